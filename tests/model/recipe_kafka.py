"""Kafka in the model of the recipe: what requests do and answer, and how a process sends one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from model.recipe_state import DELAY, REPEAT, Id, Scene, State, go, numbered, with_id, without

CONCURRENT: Final = "CONCURRENT_TRANSACTIONS"

Steps = Iterator[tuple[str, State]]


class Answer(NamedTuple):
    """Kafka's answer to a request.

    Args:
        state: The state with the request's effect.
        error: NONE, CONCURRENT_TRANSACTIONS (send it again), or "another error".
        epoch: The epoch in the answer; -1 unless the error is NONE.
    """

    state: State
    error: str = "another error"
    epoch: int = -1


def executed(scene: Scene, s: State, request: tuple[Any, ...]) -> Answer:
    """The effect of a request, and its answer."""
    what, i, epoch, argument = request
    k = s.ids[i]
    if what == "end" and scene.ends_by_epoch and argument[1]:
        return _ended_by_epoch(scene, s, i, epoch, commit=argument[0])
    if what == "end":
        return _ended_plainly(scene, s, i, epoch, commit=argument[0])
    if what == "create":
        created = k._replace(status="E", epoch=k.epoch + 1, mark=k.epoch + 1)  # if it was forgotten: of another producer id
        return Answer(with_id(s, i, created), "NONE", created.epoch) if k.status == "N" else Answer(s)
    if what == "init":
        return _initialised(scene, s, i)
    return _received(scene, s, i, what, epoch, argument)


def in_words(scene: Scene, request: tuple[Any, ...]) -> str:
    """The request as Kafka's protocol names it."""
    what, i, epoch, argument = request
    if what == "end":
        outcome, by_epoch = "commit" if argument[0] else "abort", argument[1] and scene.ends_by_epoch
        return f"EndTxn {'v5' if by_epoch else 'v4'}({outcome}, epoch {epoch}) of id {i}"
    name = {"create": "create-only InitProducerId", "init": "InitProducerId", "add": "AddPartitionsToTxn"}.get(what, "Produce")
    if what in ("create", "init"):
        return f"{name} of id {i}"
    return f"{name}(epoch {epoch}{'' if argument is None else f', transaction {numbered(argument)}'}) of id {i}"


def _ended_by_epoch(scene: Scene, s: State, i: int, epoch: int, *, commit: bool) -> Answer:
    """EndTxn v5: it raises the epoch, and repeating it changes nothing."""
    k = s.ids[i]
    if k.status == "N":
        return Answer(s)
    is_repeated = k.epoch == epoch + 1
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT) if is_repeated and commit == (k.status == "PC") else Answer(s)
    if is_repeated and k.status in ("C", "A"):
        return Answer(s, "NONE", k.epoch) if commit == (k.status == "C") else Answer(s)
    if epoch != k.epoch or (commit and k.status != "O"):
        return Answer(s)
    start = k.start if k.status == "O" else k.start + 1
    return Answer(_ending(scene, s, i, k._replace(epoch=k.epoch + 1, start=start), commit=commit), "NONE", k.epoch + 1)


def _ended_plainly(scene: Scene, s: State, i: int, epoch: int, *, commit: bool) -> Answer:
    """EndTxn v4: the epoch stays, and its holders may go on."""
    k = s.ids[i]
    if k.status == "N" or epoch != k.epoch:
        return Answer(s)
    if k.status == "O":
        return Answer(_ending(scene, s, i, k, commit=commit), "NONE", epoch)
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT) if commit == (k.status == "PC") else Answer(s)
    is_repeated = k.status == ("C" if commit else "A")
    return Answer(s, "NONE", epoch) if is_repeated else Answer(s)


def _initialised(scene: Scene, s: State, i: int) -> Answer:
    """InitProducerId: aborts what is ongoing, and raises the epoch."""
    k = s.ids[i]
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT)
    if k.status == "O":
        return Answer(_ending(scene, s, i, k._replace(epoch=k.epoch + 1), commit=False), CONCURRENT)
    return Answer(with_id(s, i, k._replace(status="E", epoch=k.epoch + 1)), "NONE", k.epoch + 1)


def _received(scene: Scene, s: State, i: int, what: str, epoch: int, txn: int) -> Answer:
    """A message ("produce": the native producer's, which adds its partition), or librdkafka's "add" and "send"."""
    k = s.ids[i]
    if what == "send":  # to the partition's leader, which asks the coordinator only from EndTxn v5 on (KIP-890)
        is_refused = epoch < k.mark or (scene.ends_by_epoch and (k.status != "O" or epoch != k.epoch))
        return Answer(s) if is_refused else Answer(_stored_in_log(scene, s, i, k, epoch, txn), "NONE", epoch)
    if k.status == "N" or k.epoch != epoch:
        return Answer(s)
    if k.status in ("PC", "PA"):
        return Answer(s, CONCURRENT)
    if k.status != "O":
        k = k._replace(status="O", start=k.start + 1)
    return Answer(_stored_in_log(scene, s, i, k, epoch, txn) if what == "produce" else with_id(s, i, k), "NONE", epoch)


def _stored_in_log(scene: Scene, s: State, i: int, k: Id, epoch: int, txn: int) -> State:
    s = with_id(s, i, k._replace(sent=(*k.sent, txn), mark=epoch))
    if not scene.republish:
        return s
    name, generation = divmod(i, scene.generations)
    return s._replace(log=s.log | {(name // scene.databases, generation, epoch, txn)})


def _ending(scene: Scene, s: State, i: int, k: Id, *, commit: bool) -> State:
    s = with_id(s, i, k._replace(status="PC" if commit else "PA"))
    return s if scene.is_slow else completed(s, i)


def completed(s: State, i: int) -> State:
    """The state after the markers of an id's ending transaction have been written."""
    k = s.ids[i]
    if k.status not in ("PC", "PA"):
        return s
    ended = frozenset(k.sent)
    s = s._replace(visible=s.visible | ended) if k.status == "PC" else s._replace(aborted=s.aborted | ended)
    if s.order is not None and k.status == "PC":
        s = s._replace(shown=(*s.shown, *k.sent))
    return with_id(s, i, k._replace(status=k.status[1], sent=(), mark=max(k.mark, k.epoch)))


def timed_out(scene: Scene, s: State, i: int) -> State:
    """The state after an id's ongoing transaction has been aborted by its timeout."""
    k = s.ids[i]
    s = s._replace(timed_out=s.timed_out | set(k.sent))
    return _ending(scene, s, i, k._replace(epoch=k.epoch + 1), commit=False)


# --- a process that sends one -------------------------------------------------------------------------------------------------


def advanced(s: State, n: int, after: str, epoch: int = -1) -> State:
    """The state at another step of recovery, or after the generation."""
    p = s.processes[n]
    if after != "next":
        return go(s, n, after, epoch=epoch)
    if p.taking:
        return go(s, n, "verify", epoch=epoch)
    return go(s, n, "describe" if p.todo[1:] else "resolved", todo=p.todo[1:], stored=None)


def requested(scene: Scene, s: State, n: int, request: tuple[Any, ...], proven: str, refused: str) -> Steps:
    """The request is answered, or it is delayed and its sender dies or repeats it."""
    t, error, epoch = executed(scene, s, request)
    before = s.processes[n].epoch
    sent = f"sends {in_words(scene, request)}"
    if error == "NONE":
        yield f"{sent}: NONE", advanced(t, n, proven, epoch)
    elif error != CONCURRENT or t != s:
        yield f"{sent}: {error}", advanced(t, n, refused, before)
    late = tuple(sorted((*s.late, request), key=str))
    if DELAY in s.budget:
        yield f"{sent}: it is delayed, and its sender dies", go(without(s, DELAY)._replace(late=late), n, "over")
    if REPEAT in s.budget and s.processes[n].pc == "create":
        t = without(s, REPEAT)._replace(late=late)
        if scene.has("NG"):
            yield f"{sent}: it is delayed; nothing else is sent under this id", go(t, n, "take")
        else:
            yield f"{sent}: it is delayed, and will be sent again", go(t, n, "create")
    if REPEAT in s.budget and request[0] == "end" and s.processes[n].pc in ("complete", "undo", "end", "copy end"):
        again = go(without(s, REPEAT)._replace(late=late), n, s.processes[n].pc, repeated=True)
        yield f"{sent}: it is delayed, and will be sent again", again
