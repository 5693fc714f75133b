"""A group: units of many callers in one transaction; each caller gets the outcome of its own unit.

The units run one after another; their messages are sent after the last unit, and then the transaction commits like any other
(docs/how-it-works/recipe.md). The units are run in up to three ways:

1. If units have rarely failed: all under one savepoint, so that if one fails, all are undone.
2. In the same transaction, each under its own savepoint, so that one can be undone alone. Those that succeed are committed.
   (If messages had already been sent when the database's last response arrived: in a new transaction.)
3. One by one, each in its own transaction, if the group's transaction fails for a reason that one unit may have caused. If one
   fails alone for a reason that is not its own, such as a partition that does not answer, the others get its error; or the
   group's, if that one may have committed.

A unit that is about to change what the units after it see, such as a setting, is undone and set aside. After the group it runs
in a transaction of its own, and later calls of its function do so at once (`alone.py`). A unit that the database has rolled
back because of another transaction, perhaps of another group, runs again in a later group (`conflicted`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from dualwrite.errors import (
    AfterCommitError,
    BrokerAuthorizationError,
    DeliveryError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    InvalidMessageError,
    LostTransactionError,
    MessageRefusedError,
    MessageTooLargeError,
    StoreError,
    StoreUnavailableError,
    TransactionTimeoutError,
    UnknownTopicError,
    UnverifiedTransactionError,
)
from dualwrite.failpoints import hit
from dualwrite.kafka.base import Message
from dualwrite.logs import SubjectLogger, if_unexpected
from dualwrite.pool.calls import Call
from dualwrite.transaction import OpenTransaction
from dualwrite.writer import DualWriter

_LONGEST: Final = 64


class SavepointPolicy:
    """After a group with a failed unit, the next groups set a savepoint for each unit: first one group, up to 64 later.

    The number of these groups doubles with each such failure, and each group that succeeds under one savepoint halves it again.
    So a service whose units rarely fail does not pay for savepoints, and one whose units often fail rarely has to run a group
    twice. Threads may share a policy without a lock: a lost update only delays its effect.
    """

    def __init__(self) -> None:
        self._groups_with_savepoints = 0
        self._next = 1

    def allow(self) -> bool:
        """Whether the next group may have one savepoint for all of its units."""
        return self._groups_with_savepoints == 0

    def note(self, *, has_failed: bool) -> None:
        """Note how a group of several units ended: whether one has failed."""
        if has_failed:
            self._groups_with_savepoints = self._next
            self._next = min(2 * self._next, _LONGEST)
        elif self._groups_with_savepoints:
            self._groups_with_savepoints -= 1
        else:
            self._next = max(1, self._next // 2)


log = SubjectLogger(__name__)

_MAY_BE_CAUSED_BY_ONE_UNIT: Final = (
    StoreError,  # a deferred constraint, a conflict with another transaction, or a unit that can't be undone alone
    DeliveryError,
    BrokerAuthorizationError,  # for the topic of one unit
    InvalidMessageError,
    MessageTooLargeError,
    UnknownTopicError,
    TransactionTimeoutError,
)
"""Errors of a group after which both sides are rolled back and its units may succeed one by one."""


_MAY_HAVE_COMMITTED: Final = (InDoubtTransactionError, LostTransactionError, UnverifiedTransactionError)


_MOST_NAMES: Final = 5


class _SentTooSoonError(Exception):
    """The units were undone after their messages had been sent: both sides must be rolled back."""


class _AllFailedError(Exception):
    """Every unit of the group has failed or was cancelled: there is nothing to commit."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a group may do.

    Args:
        most_units: The number of units, including the savepoints that they set themselves, at which the group is complete.
        most_bytes: The total size of its messages, in bytes, at which the group is complete.
        when_decided: Deliver the outcomes as soon as the database has committed; only with two-phase commit.
        more: Takes up to n further calls from the queue, without waiting.
        put_back: Puts calls that have not begun back into the queue; the group is complete without them.
        has_written: Called when the last unit has run, before the messages are sent.
        doing: Called with a description of the next step: the name of each unit before it runs, and the commit.
        savepoint_policy: Decides whether the units may first run under one savepoint; None: they never do.
        goes_alone: Whether a call must have a transaction of its own.
        runs_alone: Called with a call that must have one from now on, and the reason.
        runs_again: Called with a call that the database has rolled back because of another transaction: a serialization failure
            or a deadlock. Returns whether it runs once more.
    """

    most_units: int = 1
    most_bytes: int = 0
    when_decided: bool = False
    more: Callable[[int], list[Call]] = lambda _: []
    put_back: Callable[[list[Call]], None] = lambda _: None
    has_written: Callable[[], None] = lambda: None
    doing: Callable[[str], None] = lambda _: None
    savepoint_policy: SavepointPolicy | None = None
    goes_alone: Callable[[Call], bool] = lambda call: call.alone
    runs_alone: Callable[[Call, str], None] = lambda _call, _what: None
    runs_again: Callable[[Call], bool] = lambda _: False


class Group:
    """One group of calls, on one writer.

    Args:
        writer: The writer to run on; no other thread uses it at the same time.
        calls: The calls, in order.
        rules: What the group may do.

    Attributes:
        error: The error of the group as a whole, if it has failed.
        conflicted: Calls that have no outcome yet, in order: those that `runs_again` has accepted, and later ones with their
            keys.
    """

    def __init__(self, writer: DualWriter[Any], calls: list[Call], rules: Rules) -> None:
        self.calls = calls
        self.error: BaseException | None = None
        self.conflicted: list[Call] = []
        self._writer = writer
        self._rules = rules
        self._has_begun = False
        self._has_sent_too_soon = False
        self._is_committing = False
        self._aside: list[Call] = []  # they run after the group, each in a transaction of its own

    def run(self) -> None:
        """Run the units, commit them, and deliver the outcome of each unit to its caller.

        Units that are cancelled before they start do not run; they are removed from `calls`.

        Raises:
            FencedError: The writer can't be used any more. It is not delivered, since the units may run on another writer if
                none of them has begun (`has_begun`).
        """
        self.calls[:] = [call for call in self.calls if not call.is_cancelled]  # while the group waited for its writer
        if not self.calls:
            return
        run_again = False
        try:
            if not self._try_to_commit():
                self._commit()
        except _AllFailedError:
            self._deliver()
        except AfterCommitError:
            log.exception("a group of %s has committed, and a listener of it has failed", _units(self.calls), **self._fields)
            self._deliver()
        except BaseException as error:
            self.error = error
            if isinstance(error, FencedError):
                raise
            run_again = len(self.calls) > 1 and self._has_begun and _may_be_caused_by_one_unit(error)
            if run_again:
                log.info(
                    "a group of %d units failed; running them one by one: %s",
                    *(len(self.calls), error),
                    exc_info=if_unexpected(error),
                    **self._fields,
                )
            else:
                self._deliver_error(error)
        else:
            self._deliver()
        # not in the `except`: the group's error would become the context of what the units raise
        if run_again:
            self._run_one_by_one()
        self._run_aside()

    def _run_aside(self) -> None:
        for call in sorted(self._aside, key=_number):  # one with a key may follow another to be set aside
            if not self._follows_conflicted(call):
                self._run_alone(call)
        self.conflicted.sort(key=_number)

    def _run_alone(self, call: Call) -> BaseException | None:
        """Run a call in a transaction of its own; return the error if the transaction has failed."""
        alone = Group(self._writer, [call], replace(self._rules, most_units=1))
        try:
            alone.run()
        finally:
            self.conflicted += alone.conflicted
        return alone.error

    def _follows_conflicted(self, call: Call) -> bool:
        """Whether a call waits for a conflicted one that has the same key and came before; then it is one of them, too."""
        if call.key is None or all(call.key != other.key or call.number < other.number for other in self.conflicted):
            return False
        self.conflicted.append(call)
        return True

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields of a log record."""
        return {"transactional_id": self._writer.transactional_id}

    @property
    def has_begun(self) -> bool:
        """Whether the units have begun to run."""
        return self._has_begun or self._has_sent_too_soon

    def _try_to_commit(self) -> bool:
        """Commit; False if both sides were rolled back, and the units must run in another transaction."""
        try:
            self._commit()
        except _SentTooSoonError:
            self._has_begun, self._has_sent_too_soon = False, True
            return False
        return True

    def _commit(self) -> None:
        with self._writer.group_transaction(is_group=len(self.calls) > 1) as whole:
            self._has_begun = True
            if len(self.calls) == 1 and not self._rules.goes_alone(self.calls[0]):
                self._grow()
            try:
                messages = self._run(whole)
                whole.check_fence()
            except BaseException:
                if whole.begin_error is None:
                    raise
                self._has_begun = False  # the transaction begins with the units' first statement, or here
                raise whole.begin_error from None
            if not self.calls:
                raise _AllFailedError
            self._rules.doing(f"committing a group of {_units(self.calls)}")
            self._rules.has_written()
            hit("group_after_units")
            if messages:
                whole.send_messages(messages)
            if self._rules.when_decided:
                whole.on_decided = self._deliver
            self._is_committing = True

    def _run(self, whole: OpenTransaction) -> list[Message]:
        if len(self.calls) == 1:
            return self._run_only_unit(whole)
        savepoint_policy = self._rules.savepoint_policy
        if savepoint_policy is None:
            return self._run_with_savepoints(whole)
        is_under_one = not self._has_sent_too_soon and savepoint_policy.allow()
        messages: list[Message] | None = None
        try:
            messages = self._run_under_one_savepoint(whole) if is_under_one else None
            return self._run_with_savepoints(whole) if messages is None else messages
        finally:
            has_failed = (is_under_one and messages is None and not self._aside) or any(call.has_failed for call in self.calls)
            savepoint_policy.note(has_failed=has_failed)

    def _grow(self) -> None:
        room = self._rules.most_units - len(self.calls)
        if room > 0:
            self.calls += self._rules.more(room)

    # --- the units ----------------------------------------------------------------------------------------------------------

    def _run_only_unit(self, whole: OpenTransaction) -> list[Message]:
        """The only unit needs no savepoint: if it fails, the transaction is rolled back."""
        (call,) = self.calls
        if not call.begin():
            self.calls.clear()
            raise _AllFailedError
        self._rules.doing(call.name)
        whole.watch(shares=False)
        unit = whole.only_unit()
        try:
            call.run(unit)
            unit.end_unit()  # flushes its pending changes: an error here is the unit's own, and nothing is in doubt
        except BaseException as error:
            if not self._runs_again(call, error):
                call.failed(error)
            raise _AllFailedError from error
        finally:
            unit.end()
        hit("group_after_unit")
        return unit.messages

    def _run_under_one_savepoint(self, whole: OpenTransaction) -> list[Message] | None:
        """Run the units under one savepoint; None if a unit failed, or a statement whose response arrived only later."""
        messages: list[Message] = []
        has_sent = False
        running: Call | None = None
        whole.begin_units()
        try:
            for call in self._growing(whole, messages):
                running = call
                with whole.only_unit() as unit:
                    call.run(unit)
                    unit.end_unit()
                messages += unit.messages
                running = None
                hit("group_after_unit")
            if whole.has_unanswered_statements:  # the messages are sent while the database executes them
                self._rules.doing(_statements_of(self.calls))
                has_sent = bool(messages)
                whole.send_messages(messages)
            whole.end_units()
        except BaseException as error:
            log.debug("%d units are run again, one of them has failed: %r", len(self.calls), error, **self._fields)
            if whole.refused is not None and running is not None:
                self._rules.runs_alone(running, whole.refused)
                self._set_aside(running)
            whole.undo_units(error)
            if has_sent:
                raise _SentTooSoonError from error
            return None
        return [] if has_sent else messages

    def _run_with_savepoints(self, whole: OpenTransaction) -> list[Message]:
        """Run each unit under its own savepoint."""
        messages: list[Message] = []
        for call in self._growing(whole, messages):
            unit = whole.begin_unit()
            try:
                call.run(unit)
                unit.end_unit()
            except BaseException as error:  # noqa: BLE001  (it is delivered to the caller)
                refused = whole.refused
                unit.undo_unit(error)
                if refused is not None:
                    self._rules.runs_alone(call, refused)
                    self._set_aside(call)
                elif not self._runs_again(call, error):
                    call.failed(error)
            else:
                messages += unit.messages
            hit("group_after_unit")
        if all(call.has_failed for call in self.calls):
            raise _AllFailedError
        return messages

    def _growing(self, whole: OpenTransaction, messages: list[Message]) -> Iterator[Call]:
        """Yield the calls, and those that arrive while the last one runs, until the group is complete; put the rest back."""
        place = size = counted = most_own = 0
        before = own = whole.savepoints  # savepoints of an earlier run were undone and don't count
        while place < len(self.calls):
            call = self.calls[place]
            if not call.begin():
                del self.calls[place]
                continue
            if self._follows_conflicted(call):
                del self.calls[place]
                continue
            if self._must_wait(call):
                self._aside.append(call)
                del self.calls[place]
                continue
            place += 1
            self._rules.doing(call.name)
            yield call
            if call in self._aside or call in self.conflicted:
                place -= 1
            size += sum(message.size for message in messages[counted:])
            counted = len(messages)
            most_own, own = max(most_own, whole.savepoints - own), whole.savepoints
            room = self._rules.most_units - place - (own - before)
            if size >= self._rules.most_bytes or room < 1 + most_own:  # the next unit may set as many savepoints
                self._put_back(place)
            elif place == len(self.calls):
                self._grow()

    def _must_wait(self, call: Call) -> bool:
        """Whether a call runs after the group: its function must run alone, or a call with its key that came before does."""
        return self._rules.goes_alone(call) or (call.key is not None and any(call.key == other.key for other in self._aside))

    def _set_aside(self, call: Call) -> None:
        """Take a call out of the group, whose unit is undone."""
        self.calls.remove(call)
        self._aside.append(call)

    def _runs_again(self, call: Call, error: BaseException) -> bool:
        """Whether a call whose unit is undone runs again in another group; if so, it is taken out of this one."""
        if not self._writer.store.is_conflict(error) or not self._rules.runs_again(call):
            return False
        self.calls.remove(call)
        self.conflicted.append(call)
        return True

    def _put_back(self, place: int) -> None:
        """Put back the calls from index `place` on, except those that have begun, which can't be cancelled any more."""
        rest = [call for call in self.calls[place:] if not call.has_begun]
        if rest:
            del self.calls[-len(rest) :]  # calls begin in their order, so these are the last ones
            self._rules.put_back(rest)

    # --- the outcome ----------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        for call in self.calls:
            call.deliver()

    def _deliver_error(self, error: BaseException) -> None:
        """Deliver a copy of the group's error to each caller.

        If the group may have committed, the caller of a unit that failed gets the unit's own error: it was undone in any case.
        """
        if self._is_committing and not isinstance(error, DualWriteError):
            error = _unexpected(error, self._writer.transactional_id)
        for call in self.calls:
            if call.has_failed and isinstance(error, _MAY_HAVE_COMMITTED):
                call.deliver()
            else:
                call.deliver_error(error)

    def _run_one_by_one(self) -> None:
        for place, call in enumerate(self.calls):
            if self._follows_conflicted(call):
                continue
            error: BaseException | None = None
            try:
                error = self._run_alone(call)
            except BaseException as raised:
                error = raised
                raise
            finally:
                if error is not None and _would_hit_others(error):
                    self._deliver_not_run(self.calls[place + 1 :], error)
            if error is not None and _would_hit_others(error):
                return

    def _deliver_not_run(self, calls: list[Call], error: BaseException) -> None:
        """Deliver the outcome of units that do not run again: they were rolled back with the group.

        They get the error of the unit because of which they do not run, unless that unit may have committed.
        """
        assert self.error is not None
        if isinstance(error, DualWriteError) and not isinstance(error, _MAY_HAVE_COMMITTED):
            for call in calls:
                call.deliver_error(error)
            return
        for call in calls:
            if call.has_failed:
                call.deliver()
            else:
                call.deliver_error(self.error)


def _number(call: Call) -> int:
    return call.number


def _units(calls: list[Call]) -> str:
    return "1 unit" if len(calls) == 1 else f"{len(calls)} units"


def _statements_of(calls: list[Call]) -> str:
    """What the database may still be executing: the statements of any of the units."""
    names = list(dict.fromkeys(call.name for call in calls))
    return f"statements of {', '.join(names[:_MOST_NAMES])}{', …' if len(names) > _MOST_NAMES else ''} ({_units(calls)})"


def _may_be_caused_by_one_unit(error: BaseException) -> bool:
    """Whether both sides are rolled back and the other units may succeed without the one that caused the error."""
    return isinstance(error, _MAY_BE_CAUSED_BY_ONE_UNIT) and not isinstance(error, StoreUnavailableError)


def _would_hit_others(error: BaseException) -> bool:
    """Whether the error of a unit that ran alone is likely to be that of the next ones, too.

    A partition that does not answer costs the time limit of a delivery: one unit after the other, it would be a long time.
    """
    return (
        not _may_be_caused_by_one_unit(error) or _is_outage_of_a_partition(error) or _is_outage_of_a_partition(error.__cause__)
    )


def _is_outage_of_a_partition(error: BaseException | None) -> bool:
    """Whether a message was not stored, for another reason than the message; the cause, if the transaction's time is over."""
    return isinstance(error, DeliveryError) and not isinstance(error, MessageRefusedError)


def _unexpected(error: BaseException, transactional_id: str) -> InDoubtTransactionError:
    """An error that is not a DualWriteError, when the commit may have been sent."""
    wrapped = InDoubtTransactionError(
        "An unexpected error ended the commit; it is unknown whether the transaction committed.",
        transactional_id=transactional_id,
        cause=f"{type(error).__name__}: {error}",
        next_step="check in your data whether it committed; the pool resolves Kafka's side as soon as it can, or recovery does",
        state="",
        database_committed=None,
    )
    wrapped.__cause__ = error
    return wrapped
