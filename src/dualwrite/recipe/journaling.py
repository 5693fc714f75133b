"""Writing while Kafka is down: messages go into the journal, in the database transaction of their unit.

A journaled transaction follows the recipe without its steps at Kafka. The row keeps the prepared state of the transaction
before: that one may still be in doubt at Kafka, and the writer recovers it when Kafka answers. docs/how-it-works/journal.md
has the rules that keep the order by cause; `tests/model/journal_model.py` shows that each is needed.
"""

from __future__ import annotations

import json
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

from dualwrite.errors import DualWriteError, JournalFullError, JournalSwitchedError, StoreError, UsageError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import GivenMessage, GroupMetadata, Message, TransactionalProducer
from dualwrite.kafka.messages import checked
from dualwrite.observability import observers
from dualwrite.observability.events import JournalClosed, JournalOpened
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import is_no_answer
from dualwrite.observability.readings import Reading
from dualwrite.recipe.ownership import Ownership
from dualwrite.recipe.phases import Change, Way
from dualwrite.recipe.remembered import RecordedTransaction
from dualwrite.recipe.republish import LostMessages
from dualwrite.recipe.routes import Aborted, Choice, KafkaRoute, Route
from dualwrite.recovery.report import GenerationOutcome
from dualwrite.settings import SWITCH_AFTER
from dualwrite.state import ConsumedOffset, Delivery, PreparedTxnState
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.journal import GateStatus, JournaledTransaction, JournalEntry, JournalLimits, JournalStore, is_open
from dualwrite.transactional_id import TransactionalId

log = SubjectLogger(__name__)

RENEWAL_LIMIT: Final = 0.5
"""Seconds for asking, after a pause, whether the coordinator still knows the id: its answer is not necessary."""

COMMIT_LIMIT: Final = 5.0
"""Seconds that a block waits for Kafka's commit, and for each step of resolving it, once the database has committed."""


class Journal:
    """The journal of a prefix, as the writers of one process see it. Thread-safe.

    Attributes:
        prefix: The prefix of the pools that share the gate.
        is_open: Whether the gate was open when this process has read it last; each transaction reads it.
        is_lost: Whether Kafka did not answer when it was needed last.
        written: Set when there may be something to publish, or `is_open` has become true; whoever drains waits for it.
        limits: How much it may contain.
        full: Which limit is reached, in words; kept up to date by whoever counts what it contains.
    """

    def __init__(self, store: JournalStore, prefix: str, owner: str, limits: JournalLimits) -> None:
        self.prefix = prefix
        self.store = store
        self.owner = owner
        self.limits = limits
        self.is_open = False
        self.is_lost = False
        self.written = threading.Event()
        self.full: str | None = None
        self._failure: str | None = None
        self._epoch = 0
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Create the gate, if there is none, and read it."""
        self.note(self.store.prepare(self.prefix).epoch)

    def note(self, epoch: int) -> None:
        """Learn what the gate was when it was just read."""
        if epoch == self._epoch:
            return
        with self._lock:
            if epoch <= self._epoch:  # another thread has read it later
                return
            found, before = is_open(epoch), self.is_open
            self._epoch, self.is_open = epoch, found
        if found == before:
            return
        self._report()
        if found:
            log.info("messages go into the journal, since its gate is open", prefix=self.prefix)
            self.written.set()
        else:
            self.full = None
            log.info("messages go to Kafka again: the journal is empty, and its gate is closed", prefix=self.prefix)

    def note_counts(self, status: GateStatus) -> None:
        """Learn what the journal contains."""
        full = self.limits.reached(status, time.time())
        with self._lock:
            if status.epoch == self._epoch:  # otherwise it was opened or closed meanwhile
                self.full, self._failure = full, status.failure

    def keep_open(self) -> None:
        """Open the gate, unless it is open: messages go into the journal although Kafka answers."""
        if self.store.open(self.prefix, self.owner, self.limits):
            log.info('messages go into the journal from now on, since acknowledge="journaled"', prefix=self.prefix)
        self.prepare()

    def lost(self, error: BaseException) -> bool:
        """Whether an error says that Kafka does not answer; if so, the gate is open when this returns.

        Raises:
            StoreError: The database did not answer either.
        """
        if isinstance(error, StoreError | JournalFullError) or not is_no_answer(error):
            return False
        self.is_lost = True
        if not self.is_open:
            if self.store.open(self.prefix, self.owner, self.limits):
                log.warning("Kafka does not answer: messages go into the journal from now on: %s", error, prefix=self.prefix)
                hit("journal_after_open")
            with self._lock:
                self._epoch += not is_open(self._epoch)  # at least
                is_news, self.is_open = not self.is_open, True
            if is_news:
                self._report()
            self.written.set()
        return True

    def _report(self) -> None:
        if observers.installed:
            observers.notify((JournalOpened if self.is_open else JournalClosed)(self.prefix))

    def judged(self, error: BaseException, transactional_id: str) -> BaseException:
        """What to raise for an error of a transaction of which nothing was recorded: it can run again, through the journal."""
        try:
            is_lost = self.lost(error)
        except DualWriteError as opening:
            error.add_note(f"dualwrite, opening the journal: {opening}")
            return error
        if not is_lost:
            return error
        switched = JournalSwitchedError(
            "Kafka does not answer. Both sides are rolled back, and messages go into the journal from now on.",
            transactional_id=transactional_id,
            cause=f"{error}",
            next_step="run the whole transaction again",
            epoch=None,
        )
        switched.__cause__ = error
        return switched

    def check_room(self, transactional_id: str) -> None:
        """Check that the journal takes more messages.

        Raises:
            JournalFullError: It has reached one of its limits.
        """
        if self.full is not None:
            down = "Kafka does not answer" + ("" if self.is_lost else ", or takes fewer messages than are written")
            raise JournalFullError(
                f"The journal of {self.prefix!r} is full: {self.full}. Both sides are rolled back.",
                transactional_id=transactional_id,
                cause=self._failure or down,
                next_step="see what it waits for, with `dualwrite doctor`: units can write again when enough of it is "
                "published; or raise the limits, which are in JournalLimits",
                limit=self.full,
            )

    def closed(self, transactional_id: str) -> JournalSwitchedError:
        """The error for a transaction that could only write into the journal, whose gate is closed."""
        return JournalSwitchedError(
            "The journal's gate is closed: messages go to Kafka again. Both sides are rolled back.",
            transactional_id=transactional_id,
            next_step="run the whole transaction again",
            epoch=None,
        )


class KafkaOrJournal(KafkaRoute, Choice):
    """Of a lane with a journal: to Kafka, or into the journal while its gate is open, which each transaction reads.

    Args:
        ownership: As for KafkaRoute.
        lost: As for KafkaRoute.
        journal: The journal.
    """

    def __init__(self, ownership: Ownership, lost: LostMessages | None, journal: Journal) -> None:
        super().__init__(ownership, lost)
        self._journal = journal
        self._logical_id = TransactionalId.of_row(ownership.transactional_id).logical
        self._into_journal = JournalRoute(journal, self._logical_id)
        self.choice = self
        self.gate = journal.prefix

    # While a transaction may also go into the journal, it waits less for Kafka.

    commit_limit = COMMIT_LIMIT

    def leave(self) -> None:
        self.producer.abort_transaction(timeout=SWITCH_AFTER)

    def abort(self) -> Aborted:
        return Aborted.UNREACHABLE if self.is_down else super().abort()

    def resolve(self) -> tuple[GenerationOutcome, ...]:
        with self._parties.limited(COMMIT_LIMIT):
            return super().resolve()

    def renew(self) -> None:
        with self._parties.limited(RENEWAL_LIMIT):
            super().renew()

    @property
    def is_down(self) -> bool:
        return self._journal.is_lost

    def begin(self, claim: Claim, *, at_once: bool) -> StoreTransaction:
        return self._journal.store.begin(claim, self._journal.prefix, at_once=at_once)

    @property
    def first_way(self) -> Way:
        return Way.JOURNAL if self._journal.is_open else Way.KAFKA

    def way_of(self, transaction: StoreTransaction, way: Way) -> Way:
        assert isinstance(transaction, JournaledTransaction)
        epoch = transaction.epoch
        self._journal.note(epoch)
        if is_open(epoch):
            return Way.JOURNAL if way is Way.KAFKA else way
        if way is Way.DETOUR or (way is Way.JOURNAL and self._ownership.producer_must_be_replaced):
            raise self._journal.closed(self._logical_id)
        return Way.KAFKA

    def route(self, way: Way) -> Route:
        return self if way is Way.KAFKA else self._into_journal

    def judged(self, error: BaseException) -> BaseException:
        return self._journal.judged(error, self._logical_id)


class JournalRoute(Route):
    """Into the journal, in the transaction of the database: with its commit, the messages are committed as well."""

    outcome = "journaled"
    committed = "committed, with its messages in the journal"

    def __init__(self, journal: Journal, logical_id: str) -> None:
        self._journal = journal
        self._id = logical_id
        self._buffer = JournalBuffer(logical_id)

    @property
    def producer(self) -> TransactionalProducer:
        return self._buffer

    @property
    def has_messages(self) -> bool:
        """Whether the transaction has sent any."""
        return bool(self._buffer.entries)

    def record(self, transaction: StoreTransaction, decided: RecordedTransaction) -> None:
        assert isinstance(transaction, JournaledTransaction)
        if self._buffer.entries:
            self._journal.check_room(self._id)
        transaction.write_journal(self._buffer.entries, decided.number)
        hit("journal_after_entries")

    def commit(self, state: PreparedTxnState | None) -> None:
        """Nothing to do: the database's commit was theirs."""

    def leave(self) -> None:
        """Nothing to do."""

    def abort(self) -> Aborted:
        return Aborted.CLEAN

    def resolve(self) -> tuple[GenerationOutcome, ...]:
        return ()  # the outcome is the database's

    def resume(self) -> Change:
        return Change.CLAIMED


class Keeper(Protocol):
    """Looks after a journal, in a thread of its own: `relay.journal_keeper.JournalKeeper`."""

    journal: Journal

    def readings(self) -> Iterator[Reading]:
        """Whether the journal is open, and what it contains."""
        ...

    def start(self) -> None:
        """Begin."""
        ...

    def stop(self) -> None:
        """End, and release what it uses. May be called more than once, and without `start`."""
        ...


class JournalBuffer:
    """Takes the place of a transaction's producer while the gate is open: keeps the messages until they are written.

    Its other methods are those of a producer whose transaction is empty.
    """

    kafka_transactional_id = ""
    transaction_timeout: float | None = None
    must_be_replaced = False
    delivery: Delivery | None = None

    def __init__(self, transactional_id: str) -> None:
        self.entries: list[JournalEntry] = []
        self._id = transactional_id

    def send_messages(self, messages: Iterable[GivenMessage]) -> None:
        """Check messages and keep them. Whether a topic exists is not known while Kafka is down."""
        self.entries += map(entry_of, map(checked, messages))

    def send_offsets_to_transaction(self, offsets: Iterable[ConsumedOffset], group: GroupMetadata, *, timeout: float) -> None:
        """Not possible: a consumer's positions are Kafka's."""
        del offsets, group, timeout
        raise UsageError(
            "A consumer's positions can't be committed while Kafka is down.",
            transactional_id=self._id,
            next_step="keep the positions in the database",
        )

    def init_transactions(self, *, timeout: Any) -> PreparedTxnState | None:
        """Nothing to do."""
        del timeout
        return None

    def begin_transaction(self) -> None:
        """Forget the messages of the transaction before."""
        self.entries = []

    def prepare_transaction(self, *, timeout: float) -> PreparedTxnState | None:
        """None: nothing was sent."""
        del timeout
        return None

    def check_time_left(self) -> None:
        """There is no limit."""

    def commit_transaction(self, *, timeout: float) -> None:
        """Nothing to do."""
        del timeout

    def abort_transaction(self, *, timeout: float) -> None:
        """Nothing to do."""
        del timeout

    def close(self) -> None:
        """Nothing to do."""


# --- entries --------------------------------------------------------------------------------------------------------------


def entry_of(message: Message) -> JournalEntry:
    """A message as it is stored; without a timestamp it gets the current time."""
    topic, value, key, headers, partition, timestamp = message
    sent_at_ms = time.time_ns() // 1_000_000 if timestamp is None else timestamp
    return JournalEntry(topic, key, value, _headers_text(headers), partition, sent_at_ms, timestamp is not None)


def message_of(entry: JournalEntry, *, at_present: bool = False) -> Message:
    """The message of an entry. `at_present`: unless it has its own time, it gets that at which it is sent.

    Raises:
        InvalidMessageError: Somebody has changed it.
    """
    timestamp = None if at_present and not entry.has_own_time else entry.sent_at_ms
    return checked((entry.topic, entry.value, entry.key, _headers(entry.headers), entry.partition, timestamp))


def _headers_text(headers: list[tuple[str, bytes | None]] | None) -> str | None:
    if not headers:
        return None
    return json.dumps([[name, None if content is None else b64encode(content).decode()] for name, content in headers])


def _headers(text: str | None) -> list[tuple[str, bytes | None]] | None:
    if text is None:
        return None
    return [(name, None if content is None else b64decode(content)) for name, content in json.loads(text)]
