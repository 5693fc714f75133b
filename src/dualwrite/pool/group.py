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
in a transaction of its own, and later calls of its function do so at once (`AloneUnits`). Settings that a unit declares are
changed between the units instead (`StoreTransaction.set_local`). A unit that the database has rolled
back because of another transaction, perhaps of another group, runs again in a later group (`conflicted`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dualwrite.errors import (
    AfterCommitError,
    BrokerAuthorizationError,
    DeliveryError,
    DualWriteError,
    FencedError,
    InDoubtTransactionError,
    InvalidMessageError,
    JournalSwitchedError,
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
from dualwrite.observability import observers
from dualwrite.observability.events import GroupFormed
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.pool.calls import AloneUnits, UnitCall, WaitingCalls
from dualwrite.pool.scaling import Sizing
from dualwrite.pool.writers import Writers
from dualwrite.stores.store_transaction import StoreTransaction
from dualwrite.transaction import OpenTransaction, UnitTransaction
from dualwrite.transactional import MAX_SWITCHES
from dualwrite.writer import DualWriter

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

_MAX_GROUPS_WITH_SAVEPOINTS: Final = 64

_MAX_RUNS: Final = 5
"""How often a unit runs, if the database rolls it back each time because of another transaction."""

_MAX_NAMES: Final = 5


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
            self._next = min(2 * self._next, _MAX_GROUPS_WITH_SAVEPOINTS)
        elif self._groups_with_savepoints:
            self._groups_with_savepoints -= 1
        else:
            self._next = max(1, self._next // 2)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What the groups of a pool share, and what they may do.

    Args:
        waiting: The queue, from which a group takes further calls while it runs.
        writers: Get a description of what a group does with its writer.
        scaler: Learns of conflicts with other transactions.
        alone: Which calls must have a transaction of their own.
        savepoint_policy: Decides whether the units may first run under one savepoint; None: they never do.
        most_units: The number of units, including the savepoints that they set themselves, at which a group is complete.
        most_bytes: The total size of its messages, in bytes, at which a group is complete.
    """

    waiting: WaitingCalls
    writers: Writers
    scaler: Sizing
    alone: AloneUnits
    savepoint_policy: SavepointPolicy | None
    most_units: int
    most_bytes: int


class _UndoneError(Exception):
    """Leaves the block of a transaction to roll back both sides, since none of its units is left; no error of the group."""


class _SentTooSoonError(Exception):
    """Leaves the block as well: messages had been sent before a unit was found to have failed, so all units run again."""


class Group:
    """One group of calls, on one writer, which no other thread uses at the same time.

    Args:
        taken: What the group has taken from the queue. The list is kept up to date, also with calls that have ended.
        has_written: Called when the last unit has run, before the messages are sent; perhaps more than once.
        grows: Whether the group may take further calls.

    Attributes:
        error: The error of the group as a whole, if it has failed.
        conflicted: Calls that have no outcome yet, in order: those that run again after a conflict with another transaction,
            and later ones with their keys.
    """

    def __init__(
        self,
        shared: Shared,
        writer: DualWriter[Any],
        taken: list[UnitCall],
        has_written: Callable[[], None],
        *,
        grows: bool = True,
    ) -> None:
        self.error: BaseException | None = None
        self.conflicted: list[UnitCall] = []
        self._shared = shared
        self._writer = writer
        self._taken = taken
        self._has_written = has_written
        self._grows = grows
        self._calls = [call for call in taken if not call.is_cancelled]  # while the group waited for its writer
        self._aside: list[UnitCall] = []  # they run after the group, each in a transaction of its own
        self._has_begun = False
        self._is_rerun = False  # after messages were sent too soon: each unit has its own savepoint now
        self._is_committing = False

    @property
    def has_begun(self) -> bool:
        """Whether the units have begun to run."""
        return self._has_begun or self._is_rerun

    def run(self) -> None:
        """Run the units, commit them, and deliver the outcome of each to its caller; units that were cancelled do not run.

        Raises:
            FencedError: The writer can't be used any more. It is not delivered, since the units may run on another writer if
                none of them has begun (`has_begun`).
        """
        if self._calls and not self._run_together():  # its error must not become the context of what they raise
            for place, call in enumerate(self._calls):
                if not self._follows_conflicted(call) and not self._run_alone(call, self._calls[place + 1 :]):
                    break
        for call in sorted(self._aside, key=lambda each: each.number):  # one with a key may follow another to be set aside
            if not self._follows_conflicted(call):
                self._run_alone(call)
        self.conflicted.sort(key=lambda each: each.number)

    def _run_together(self) -> bool:
        """Commit the units in one transaction, and deliver their outcomes; False if they have none, and run one by one.

        The transaction runs again if messages were sent too soon, and if Kafka went down or came back before anything was
        recorded (`when_kafka_is_down`).
        """
        switches = 0
        while True:
            try:
                self._commit()
            except _SentTooSoonError:
                self._has_begun, self._is_rerun = False, True
                continue
            except _UndoneError:
                pass
            except AfterCommitError:
                text = "a group of %s has committed, and a listener of it has failed"
                log.exception(text, _units(self._calls), **self._fields)
            except BaseException as error:
                if isinstance(error, JournalSwitchedError) and switches < MAX_SWITCHES:
                    switches += 1
                    text = "running %s again: %s"
                    log.info(text, _units(self._calls), error, exc_info=if_unexpected(error), **self._fields)
                    self._has_begun = self._is_rerun = self._is_committing = False
                    continue
                self.error = error
                if isinstance(error, FencedError):
                    raise
                if len(self._calls) > 1 and self._has_begun and _may_be_caused_by_one_unit(error):
                    text = "a group of %d units failed; running them one by one: %s"
                    log.info(text, len(self._calls), error, exc_info=if_unexpected(error), **self._fields)
                    return False
                self._deliver_error(error)
                return True
            self._deliver()
            return True

    def _run_alone(self, call: UnitCall, behind: Sequence[UnitCall] = ()) -> bool:
        """Run a call in a transaction of its own; False if those behind it do not run, since they would fail as well."""
        alone = Group(self._shared, self._writer, [call], self._has_written, grows=False)
        fails_all = False
        try:
            alone.run()
        finally:
            self.conflicted += alone.conflicted
            if alone.error is not None and (fails_all := _would_hit_others(alone.error)):
                self._deliver_not_run(behind, alone.error)
        return not fails_all

    def put_back(self, calls: list[UnitCall]) -> None:
        """Put calls without an outcome back into the queue."""
        self._taken[:] = [call for call in self._taken if call not in calls]
        self._shared.waiting.put_back(calls, self._taken)

    @property
    def _fields(self) -> dict[str, Any]:
        """The fields of a log record."""
        return {"transactional_id": self._writer.transactional_id}

    def _commit(self) -> None:
        """Run the units in one transaction, and commit it."""
        with self._writer.untraced_transaction() as whole:
            messages = self._run_units(whole)
            if not self._calls:
                raise _UndoneError
            self._shared.writers.note(self._writer, f"committing a group of {_units(self._calls)}")
            if observers.installed:
                observers.notify(GroupFormed(whole.transactional_id, whole.number, len(self._calls)))
            self._has_written()
            hit("group_after_units")
            if messages:
                whole.send_messages(messages)
            self._is_committing = True

    # --- the units ----------------------------------------------------------------------------------------------------------

    def _run_units(self, whole: OpenTransaction) -> list[Message]:
        """Run the units in one of the three ways; return the messages that are still to be sent."""
        self._has_begun = True
        if len(self._calls) == 1 and not self._shared.alone.goes_alone(self._calls[0]):
            self._grow()
        messages: list[Message] = []
        try:
            messages = self._run_only_unit(whole) if len(self._calls) == 1 else self._run_several(whole)
            whole.check_fence()
        except BaseException:
            if whole.store_transaction.begin_error is None:
                raise
        if (error := whole.store_transaction.begin_error) is not None:
            self._has_begun = False  # the transaction begins with the units' first statement, or here
            raise error
        return messages

    def _grow(self) -> None:
        room = self._shared.most_units - len(self._calls)
        if self._grows and room > 0:
            came = self._shared.waiting.take_more(room, self._taken, self._shared.scaler.side_by_side)
            self._taken += came
            self._calls += came

    def _run_only_unit(self, whole: OpenTransaction) -> list[Message]:
        """The only unit needs no savepoint: if it fails, the transaction is rolled back."""
        (call,) = self._calls
        if not call.begin():
            self._calls.clear()
            raise _UndoneError
        self._shared.writers.note(self._writer, call.name)
        whole.store_transaction.watch(shares=False)
        unit = UnitTransaction(whole)
        try:
            whole.store_transaction.set_local(call.local)
            call.run(unit)
            unit.end_unit()  # flushes its pending changes: an error here is the unit's own, and nothing is in doubt
        except BaseException as error:  # noqa: BLE001  (it is delivered to the caller)
            if not self._runs_again(call, error):
                call.failed(error)
            raise _UndoneError from None
        finally:
            unit.end()
        hit("group_after_unit")
        return unit.messages

    def _run_several(self, whole: OpenTransaction) -> list[Message]:
        """Run the units under one savepoint, if few have failed so far; if that fails, each under its own."""
        policy = self._shared.savepoint_policy
        is_shared = policy is not None and policy.allow() and not self._is_rerun
        messages: list[Message] | None = None
        try:
            if is_shared:
                messages = self._run_under_one_savepoint(whole)
            return self._run_with_savepoints(whole) if messages is None else messages
        finally:
            if policy is not None:
                is_undone = is_shared and messages is None and not self._aside
                policy.note(has_failed=is_undone or any(call.has_failed for call in self._calls))

    def _run_under_one_savepoint(self, whole: OpenTransaction) -> list[Message] | None:
        """Run the units under one savepoint; None if a unit failed, or a statement whose response arrived only later.

        Raises:
            _SentTooSoonError: So it was, and messages had been sent by then: the transaction must be rolled back.
        """
        messages: list[Message] = []
        has_sent = False
        running: UnitCall | None = None
        database = whole.store_transaction
        database.begin_units()
        try:
            for call in self._growing(whole, messages):
                running = call
                with UnitTransaction(whole) as unit:
                    database.set_local(call.local)
                    call.run(unit)
                    unit.end_unit()
                messages += unit.messages
                running = None
                hit("group_after_unit")
            if database.has_unanswered_statements:  # the messages are sent while the database executes them
                self._shared.writers.note(self._writer, _statements_of(self._calls))
                has_sent = bool(messages)
                whole.send_messages(messages)
            database.end_units()
        except BaseException as error:  # noqa: BLE001  (the unit runs again, by itself)
            log.debug("%d units are run again, one of them has failed: %r", len(self._calls), error, **self._fields)
            for call in self._calls:
                call.undone(error if call is running and database.refused is None else None)
            if database.refused is not None and running is not None:
                self._set_aside(running, database.refused)
            database.undo_units(error)
            if has_sent:
                raise _SentTooSoonError from None
            return None
        return [] if has_sent else messages

    def _run_with_savepoints(self, whole: OpenTransaction) -> list[Message]:
        """Run each unit under its own savepoint."""
        messages: list[Message] = []
        for call in self._growing(whole, messages):
            whole.store_transaction.begin_unit()
            unit = UnitTransaction(whole)
            try:
                whole.store_transaction.set_local(call.local)
                call.run(unit)
                unit.end_unit()
            except BaseException as error:  # noqa: BLE001  (it is delivered to the caller)
                refused = whole.store_transaction.refused
                unit.undo_unit(error)
                call.undone(error if refused is None else None)
                if refused is not None:
                    self._set_aside(call, refused)
                elif not self._runs_again(call, error):
                    call.failed(error)
            else:
                messages += unit.messages
            hit("group_after_unit")
        if all(call.has_failed for call in self._calls):
            raise _UndoneError
        return messages

    def _growing(self, whole: OpenTransaction, messages: list[Message]) -> Iterator[UnitCall]:
        """Yield the calls, and those that arrive while the last one runs, until the group is complete; put the rest back."""
        place = size = counted = most_own = 0
        database = whole.store_transaction
        before = own = database.savepoints  # savepoints of an earlier run were undone and don't count
        while place < len(self._calls):
            call = self._calls[place]
            if not call.begin() or self._follows_conflicted(call):
                del self._calls[place]
                continue
            if self._must_wait(call, database):
                self._aside.append(call)
                del self._calls[place]
                continue
            place += 1
            self._shared.writers.note(self._writer, call.name)
            yield call
            if call in self._aside or call in self.conflicted:
                place -= 1
            size += sum(message.size for message in messages[counted:])
            counted = len(messages)
            most_own, own = max(most_own, database.savepoints - own), database.savepoints
            room = self._shared.most_units - place - (own - before)
            if size >= self._shared.most_bytes or room < 1 + most_own:  # the next unit may set as many savepoints
                # without those that have begun, which can't be cancelled any more: calls begin in their order
                rest = [call for call in self._calls[place:] if not call.has_begun]
                if rest:
                    del self._calls[-len(rest) :]
                    self.put_back(rest)
            elif place == len(self._calls):
                self._grow()

    def _must_wait(self, call: UnitCall, database: StoreTransaction) -> bool:
        """Whether a call runs after the group: a call with its key that came before does, or its function must run alone.

        Or its settings would be seen by something that the units before it have left for the COMMIT.
        """
        is_behind = call.key is not None and any(call.key == other.key for other in self._aside)
        return is_behind or self._shared.alone.goes_alone(call) or not database.may_set_local(call.local)

    def _set_aside(self, call: UnitCall, refused: str) -> None:
        """Take a call out of the group, whose unit is undone, and run its function alone from now on."""
        self._shared.alone.add(call, refused)
        self._calls.remove(call)
        self._aside.append(call)

    def _runs_again(self, call: UnitCall, error: BaseException) -> bool:
        """Whether a call whose unit is undone runs in another group, since another transaction got in its way.

        If so, it is taken out of this one. The other transaction may have been that of another group.
        """
        if not self._writer.store.is_conflict(error):
            return False
        self._shared.scaler.conflicted()
        call.conflicts += 1
        if call.conflicts >= _MAX_RUNS:
            return False
        self._calls.remove(call)
        self.conflicted.append(call)
        return True

    def _follows_conflicted(self, call: UnitCall) -> bool:
        """Whether a call waits for a conflicted one that has the same key and came before; then it is one of them, too."""
        if call.key is None or all(call.key != other.key or call.number < other.number for other in self.conflicted):
            return False
        self.conflicted.append(call)
        return True

    # --- the outcome ----------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        for call in self._calls:
            call.deliver()

    def _deliver_error(self, error: BaseException) -> None:
        """Deliver a copy of the group's error to each caller.

        If the group may have committed, the caller of a unit that failed gets the unit's own error: it was undone in any case.
        """
        if self._is_committing and not isinstance(error, DualWriteError):
            error = _unexpected(error, self._writer.transactional_id)
        for call in self._calls:
            if call.has_failed and isinstance(error, _MAY_HAVE_COMMITTED):
                call.deliver()
            else:
                call.deliver_error(error)

    def _deliver_not_run(self, calls: Sequence[UnitCall], error: BaseException) -> None:
        """Deliver the outcome of units that do not run again: they were rolled back with the group.

        They get the error of the unit because of which they do not run, unless that unit may have committed.
        """
        is_theirs = isinstance(error, DualWriteError) and not isinstance(error, _MAY_HAVE_COMMITTED)
        for call in calls:
            if call.has_failed and not is_theirs:
                call.deliver()
            else:
                call.deliver_error(error if is_theirs else self.error or error)


def _units(calls: list[UnitCall]) -> str:
    return "1 unit" if len(calls) == 1 else f"{len(calls)} units"


def _statements_of(calls: list[UnitCall]) -> str:
    """What the database may still be executing: the statements of any of the units."""
    names = list(dict.fromkeys(call.name for call in calls))
    return f"statements of {', '.join(names[:_MAX_NAMES])}{', …' if len(names) > _MAX_NAMES else ''} ({_units(calls)})"


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
