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
from collections.abc import Iterable
from typing import Any, Final, Protocol

from dualwrite.errors import DualWriteError, JournalFullError, JournalSwitchedError, StoreError, UsageError
from dualwrite.failpoints import hit
from dualwrite.kafka.base import GroupMetadata, Headers, Message
from dualwrite.kafka.messages import checked_message, checked_messages
from dualwrite.logs import SubjectLogger
from dualwrite.observability import observers
from dualwrite.observability.events import JournalClosed, JournalOpened
from dualwrite.outages import is_no_answer
from dualwrite.state import ConsumedOffset, Delivery, PreparedTxnState
from dualwrite.stores.journal import JournalEntry, JournalLimits, JournalStore, is_open

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
        changed: Set when `is_open` has become true; whoever drains the journal waits for it.
        limits: How much it may contain.
        full: Which limit is reached, in words; kept up to date by whoever drains it.
    """

    def __init__(self, store: JournalStore, prefix: str, owner: str, limits: JournalLimits) -> None:
        self.prefix = prefix
        self.store = store
        self.owner = owner
        self.limits = limits
        self.is_open = False
        self.is_lost = False
        self.changed = threading.Event()
        self.full: str | None = None
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
            self.changed.set()
        else:
            self.full = None
            log.info("messages go to Kafka again: the journal is empty, and its gate is closed", prefix=self.prefix)

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
            self.changed.set()
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
            cause=str(error),
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
            raise JournalFullError(
                f"Kafka does not answer, and the journal is full: {self.full}. Both sides are rolled back.",
                transactional_id=transactional_id,
                next_step="bring Kafka back, which empties the journal; or raise the limits, which are in JournalLimits",
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


class Keeper(Protocol):
    """Looks after a journal, in a thread of its own: `pool.journal_keeper.JournalKeeper`."""

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

    def send(
        self,
        topic: str,
        value: bytes | str | None,
        *,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """Check the message and keep it. Whether the topic exists is not known while Kafka is down."""
        message = checked_message(topic, value, key=key, headers=headers, partition=partition, timestamp=timestamp)
        self.entries.append(entry_of(message))

    def send_many(
        self,
        topic: str,
        values: Iterable[bytes | str | None],
        *,
        keys: Iterable[bytes | str | None] | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
    ) -> None:
        """As `send`, for many."""
        self.send_messages(checked_messages(topic, values, keys=keys, partition=partition, timestamp=timestamp))

    def send_messages(self, messages: Iterable[Message]) -> None:
        """Keep messages that were checked."""
        self.entries += map(entry_of, messages)

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
        """Nothing to do."""

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
    return JournalEntry(topic, key, value, _headers_text(headers), partition, sent_at_ms)


def message_of(entry: JournalEntry) -> Message:
    """The message of an entry.

    Raises:
        InvalidMessageError: Somebody has changed it.
    """
    return checked_message(
        entry.topic,
        entry.value,
        key=entry.key,
        headers=_headers(entry.headers),
        partition=entry.partition,
        timestamp=entry.sent_at_ms,
    )


def _headers_text(headers: list[tuple[str, bytes | None]] | None) -> str | None:
    if not headers:
        return None
    return json.dumps([[name, None if content is None else b64encode(content).decode()] for name, content in headers])


def _headers(text: str | None) -> list[tuple[str, bytes | None]] | None:
    if text is None:
        return None
    return [(name, None if content is None else b64decode(content)) for name, content in json.loads(text)]
