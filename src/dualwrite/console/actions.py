"""What an operator can do on the page. Each action is logged with who asked for it, and its result is listed there."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import anyio

from dualwrite.console.subject import Subject
from dualwrite.errors import DualWriteError, RepairRefusedError, TransactionChangedError, UsageError
from dualwrite.jobs.ledger import open_job_of
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.recovery.report import RecoveryReport
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import sql_store
from dualwrite.relay.journal_keeper import drain_journal, replay_letters
from dualwrite.settings import OnLost
from dualwrite.stores.base import LostTransaction
from dualwrite.texts import counted, printable
from dualwrite.transactional_id import drained_prefix

log = SubjectLogger(__name__)

Form = Mapping[str, Sequence[str]]
"""The fields of a form, each with its values."""

WAIT_SECONDS: Final = 15.0
"""Seconds after which the page is shown again, though the action goes on."""

_STEP_SECONDS: Final = 0.02
_MAX_ACTIONS: Final = 50


@dataclass
class Action:
    """An action.

    Args:
        at: When it was asked for, in seconds since 1970.
        who: By whom.
        what: What it does, in words.
        outcome: Its result in words; None while it goes on.
        succeeded: Whether it did what was asked for.
    """

    at: float
    who: str
    what: str
    outcome: str | None = None
    succeeded: bool = False


def entry_key(row_id: str, entry: LostTransaction) -> str:
    """What names a lost or unverified transaction in a form."""
    return f"{row_id} {entry.generation} {entry.kind.value} {entry.state}"


class Actions:
    """Carries out what operators ask for, each action in a thread of its own.

    Args:
        subject: The database and the cluster.
        done: Called after each action, so that the page reads again what may have changed.
    """

    def __init__(self, subject: Subject, done: Callable[[], None]) -> None:
        self._subject = subject
        self._done = done
        self._carried: deque[Action] = deque(maxlen=_MAX_ACTIONS)
        self._running: set[tuple[str, str]] = set()
        self._lock = threading.Lock()
        self._all: dict[str, tuple[str, Callable[[Form], str]]] = {
            "recover": ("recover {id}", lambda form: self._recover(form, "report")),
            "publish": ("publish the lost messages of {id} again", lambda form: self._recover(form, "republish")),
            "acknowledge": ("acknowledge what is lost or unverified on {id}", self._acknowledge),
            "drain": ("publish the journal of {prefix}", self._drain),
            "replay": ("replay dead letters of {relay}", self._replay),
            "drop": ("delete dead letters of {relay}", self._drop),
            "resend": ("send the dead letters of {group} in {topic} again", self._resend),
        }

    @property
    def names(self) -> frozenset[str]:
        """The actions that there are."""
        return frozenset(self._all)

    @property
    def carried(self) -> list[Action]:
        """The last actions, the newest first."""
        return list(self._carried)[::-1]

    async def carry_out(self, name: str, form: Form, who: str) -> Action:
        """Carry out an action, and wait for its end, at most for `WAIT_SECONDS` seconds.

        Args:
            name: One of `names`.
            form: What it is about.
            who: Who asks for it.
        """
        text, work = self._all[name]
        subject = {field: printable(values[0]) for field, values in form.items() if values}
        what = text.format_map({**dict.fromkeys(("id", "prefix", "relay", "group", "topic"), "?"), **subject})
        carried = Action(time.time(), printable(who), what)
        self._carried.append(carried)
        log.warning("%s asks to %s", carried.who, what)
        key = (name, what)
        with self._lock:
            if key in self._running:
                carried.outcome = "This goes on already."
                return carried
            self._running.add(key)
        threading.Thread(
            target=self._run, args=(key, carried, work, form), name=f"dualwrite console {name}", daemon=True
        ).start()
        until = time.monotonic() + WAIT_SECONDS
        while carried.outcome is None and time.monotonic() < until:  # noqa: ASYNC110  (a thread sets it)
            await anyio.sleep(_STEP_SECONDS)
        return carried

    def _run(self, key: tuple[str, str], carried: Action, work: Callable[[Form], str], form: Form) -> None:
        try:
            outcome, carried.succeeded = work(form), True
            log.warning("done for %s: %s: %s", carried.who, carried.what, outcome)
        except Exception as error:
            outcome = f"{error}" if isinstance(error, DualWriteError) else f"{type(error).__name__} (see the log)"
            log.warning("failed for %s: %s: %s", carried.who, carried.what, error, exc_info=if_unexpected(error))
        finally:
            with self._lock:
                self._running.discard(key)
        self._done()
        carried.outcome = outcome

    # --- in the thread ----------------------------------------------------------------------------------------------------

    def _recover(self, form: Form, on_lost: OnLost) -> str:
        name = _one(form, "id")
        shown = {row: int(fence) for row, _, fence in (text.rpartition(" ") for text in form.get("fence", ()))}
        store = self._subject.store
        lanes = ids_with_lanes(store, [name])
        self._check_jobs(lanes)
        rows = {lane: row.fence for lane in lanes if (row := store.read(lane)) is not None}
        if rows != shown:
            raise TransactionChangedError(
                "The id is not as the page showed it: another process has claimed it since.",
                transactional_id=name,
                next_step="nothing was changed; look again what recovery would do",
            )
        with self._subject.recoverer(on_lost) as recoverer:
            report = recoverer.recover([name], fences=rows)
        return _report_words(report)

    def _check_jobs(self, lanes: Sequence[str]) -> None:
        found = open_job_of(self._subject.store, lanes)
        if found is not None:
            name, job = found
            raise RepairRefusedError(
                f"A running job uses it: {job.job_id!r}, on the prefix {job.prefix!r}.",
                transactional_id=name,
                next_step="the job resolves it with its next run; if it is gone for good, use `dualwrite recover --prefix`",
            )

    def _acknowledge(self, form: Form) -> str:
        name, shown = _one(form, "id"), set(form.get("entry", ()))
        store = self._subject.store
        only = [
            (lane, entry)
            for lane in ids_with_lanes(store, [name])
            if (row := store.read(lane)) is not None
            for entry in row.lost
            if entry_key(lane, entry) in shown
        ]
        with self._subject.recoverer("report") as recoverer:
            removed = recoverer.acknowledge([name], only=only)
        gone = [f"{entry.kind.value} {entry.state}" for entries in removed.values() for entry in entries]
        return f"Acknowledged {counted(len(gone), 'transaction')}: {', '.join(gone)}." if gone else "There was nothing left."

    def _drain(self, form: Form) -> str:
        count = drain_journal(self._subject.store, self._subject.settings, _one(form, "prefix"))
        return f"The journal is empty, and its gate is closed: it had {counted(count, 'message')}."

    def _replay(self, form: Form) -> str:
        name, letters = _one(form, "relay"), _numbers(form)
        if (prefix := drained_prefix(name)) is not None:
            count = replay_letters(self._subject.store, self._subject.settings, prefix, letters)
        elif name in self._subject.relays:
            count = self._subject.relays[name].replay(letters)
        else:
            raise UsageError(
                f"The console does not know the layout of {name!r}'s outbox.",
                next_step=f"use `dualwrite relay dead replay --name {name}`, or pass the relay to console(relays=…)",
            )
        return f"Published {counted(count, 'dead letter')}."

    def _drop(self, form: Form) -> str:
        letters = DeadLetters(sql_store(self._subject.store), _one(form, "relay"))
        return f"Deleted {counted(letters.drop(_numbers(form)), 'dead letter')}."

    def _resend(self, form: Form) -> str:
        name, group = _one(form, "topic"), _one(form, "group")
        topic = self._subject.dead_letter_topics.get(name)
        if topic is None:
            raise UsageError(f"{name!r} is none of this console's dead-letter topics.", next_step="load the page again")
        return f"Sent {counted(topic.replay(group), 'dead letter')} again."


def _one(form: Form, name: str) -> str:
    values = form.get(name, ())
    if len(values) != 1 or not values[0]:
        raise UsageError(f"The form has no {name}.", next_step="load the page again")
    return values[0]


def _numbers(form: Form) -> list[int]:
    numbers = [int(text) for text in form.get("letter", ()) if text.isascii() and text.isdecimal()]
    if not numbers:
        raise UsageError("No dead letter is chosen.", next_step="choose some")
    return numbers


def _report_words(report: RecoveryReport) -> str:
    """What recovery did.

    Raises:
        DualWriteError: It did not finish.
    """
    for one in report.failed:
        assert one.error is not None
        raise one.error
    texts = [f"{found.transactional_id}: {found.outcome.in_words}" for found in report]
    texts += [f"{one.transactional_id}: claimed by {one.taken_over_by} meanwhile" for one in report.ids if one.taken_over_by]
    texts += [f"{kept.entry.state} can't be published again: {'; '.join(kept.reasons)}" for kept in report.not_published]
    return f"{'; '.join(texts)}." if texts else "There was nothing to do."
