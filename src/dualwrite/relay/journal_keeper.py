"""Looks after the journal of a pool or of a writer: notices that Kafka answers, drains, and closes the gate; also by hand."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import ClassVar, Final

from dualwrite.deadline import Pauses
from dualwrite.errors import ConfigurationError, DualWriteError, InvalidTransactionalIdError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.observability.logs import SubjectLogger, if_unexpected
from dualwrite.observability.outages import database_at, is_no_answer, level_of
from dualwrite.observability.readings import Reading
from dualwrite.opening import Kafka, connected
from dualwrite.pool.pool_ids import LeasedIds
from dualwrite.recipe.journaling import Journal
from dualwrite.recovery.clusters import cluster_that_answers
from dualwrite.recovery.recoverer import describe_owner
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import Turn, leased_id, replay, sql_store
from dualwrite.relay.drainer import Drainer
from dualwrite.relay.journal_count import JournalCount
from dualwrite.relay.journal_drain import JournalDrain, JournalSource
from dualwrite.settings import Settings
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.journal import JournalLimits
from dualwrite.transactional_id import drainer_id, validate_transactional_id

log = SubjectLogger(__name__)

_OPEN_LOOK_SECONDS: Final = 0.5
"""Seconds between two looks while the gate is open."""

_CLOSED_LOOK_SECONDS: Final = 5.0
"""Seconds between two looks while it is closed: another process may have opened it and died."""

_LEASE_SECONDS: Final = 15.0
"""Seconds after which another process drains, if this one has died."""

_MAX_PAUSE_SECONDS: Final = 10.0
_PROBE_SECONDS: Final = 1.0
"""Seconds in which Kafka must answer."""

_JOIN_SECONDS: Final = 10.0


class JournalKeeper(Drainer):
    """The journal of a prefix, and the thread that looks after it. `stop` releases what it uses.

    Attributes:
        journal: The journal, for the writers of this process.

    Args:
        store: The database.
        prefix: The prefix of the pools that share the journal.
        kafka: As for `connect`.
        settings: Those of the writer that drains it.
        limits: How much the journal may contain.

    Raises:
        ConfigurationError: The database keeps no journals.
        InvalidTransactionalIdError: The prefix is too long for the id that drains its journal.
        StoreError: The database's own errors, translated.
    """

    keeps_open: ClassVar[bool] = False
    """Whether the gate stays open as long as this runs."""

    def __init__(
        self, store: TxnStateStore, prefix: str, kafka: Kafka | None, settings: Settings, limits: JournalLimits | None = None
    ) -> None:
        try:
            name = validate_transactional_id(drainer_id(prefix))
        except InvalidTransactionalIdError as error:
            error.cause = "that is the id that drains the journal: the name that you gave, with a suffix"
            raise
        if store.journal is None or store.leases is None:
            raise ConfigurationError(
                f"A journal needs a SQL database, but the store is {store.description}.",
                next_step='use PostgreSQL, MariaDB, MySQL or SQLite; or leave out acknowledge="journaled" and '
                'when_kafka_is_down="journal"',
            )
        side = database_at(store.description, is_local=store.is_local)
        ids = LeasedIds(store.leases, prefix, seconds=_LEASE_SECONDS, database=side, role="journal")
        self.journal = Journal(store.journal, prefix, ids.owner, limits or JournalLimits())
        self.journal.prepare()
        of_drainer = settings.with_changes(transactional_id=name, lanes=1)

        def open_drain() -> JournalDrain:
            writer = connected(store, settings=of_drainer, kafka=kafka, session=None)
            return JournalDrain(writer, prefix, ids.owner, keeps_open=self.keeps_open)

        super().__init__(
            name, ids, open_drain, Pauses(_OPEN_LOOK_SECONDS, _MAX_PAUSE_SECONDS, spread=0.0), woken=self.journal.written
        )
        self._coordinator = WireTransactionCoordinator(KafkaConfig.over(kafka, settings.kafka), timeout=settings.timeouts.kafka)
        self._leases = store.leases
        self._count = JournalCount(self.journal)
        self._read_at = time.monotonic()
        self._failure: str | None = ""  # as stored; at first it is not known

    def readings(self) -> Iterator[Reading]:
        """Whether the journal is open, and what it contained when that was counted last."""
        return self._count.readings()

    def stop(self) -> None:
        """End the thread; what is in the journal stays there, for another process or the next start."""
        super().stop()
        self.join(_JOIN_SECONDS)

    def drain_now(self) -> None:
        """Publish what is in the journal, and close its gate, in the caller's thread instead of one of its own.

        The gate stays open if a process is running that writes into the journal always.

        Raises:
            DualWriteError: Another process publishes it; or as for `JournalDrain.turn`.
        """
        try:
            if not self._is_leased():
                raise self._published_elsewhere()
            turn = self.turn()
            while not (turn.is_last or turn.is_idle):
                turn = self.turn()
        finally:
            self._end()

    def _published_elsewhere(self) -> DualWriteError:
        lives = [each for each in self._leases.entries(self.name) if each.transactional_id == self.name and not each.has_ended]
        who, ends = (lives[0].owner, f", within {lives[0].seconds_left or 0:.0f} s") if lives else ("another process", "")
        return DualWriteError(
            f"The journal of {self.journal.prefix!r} is being published by {who}.",
            transactional_id=self.name,
            next_step="nothing is to be done while that process runs; if it has died, run this again when its lease has "
            f"ended{ends}",
        )

    # --- what the thread does ---------------------------------------------------------------------------------------------

    def _is_due(self) -> bool:
        journal = self.journal
        self._count.start_if_open()
        if time.monotonic() - self._read_at >= self._idle_seconds():
            self._look()
        if not (journal.is_open or journal.is_lost) or (self._drain is None and not self._kafka_answers()):
            return False
        return journal.is_open and self._is_leased()

    def _idle_seconds(self) -> float:
        return _OPEN_LOOK_SECONDS if self.journal.is_open or self.journal.is_lost else _CLOSED_LOOK_SECONDS

    def _look(self) -> None:
        """Read the gate."""
        self._read_at = time.monotonic()
        for status in self.journal.store.gates(self.journal.prefix, counts=False):
            self.journal.note(status.epoch)

    def _kafka_answers(self) -> bool:
        try:
            cluster_that_answers(self._coordinator, timeout=_PROBE_SECONDS)
        except DualWriteError as error:
            log.debug("Kafka does not answer yet: %s", error, prefix=self.journal.prefix)
            return False
        self.journal.is_lost = False
        return True

    def _is_leased(self) -> bool:
        return self.name in self._ids.held or self._ids.acquire_one(self.name)

    def _done(self, turn: Turn) -> None:
        if not turn.is_last:
            self._note(None)
            return
        self._failure = None
        log.info("the journal is empty, and its gate is closed", prefix=self.journal.prefix)
        self._look()
        self._lost()

    def _failed(self, error: Exception) -> None:
        """Whatever it is, the journal must be drained some day."""
        text = f"{error}"
        level = level_of(error) if text != self._failure else logging.DEBUG  # it fails so at each try
        message, unexpected = "the journal can't be emptied now, trying again: %s", if_unexpected(error)
        log.log(level, message, text, exc_info=unexpected, prefix=self.journal.prefix)
        self._note(None if is_no_answer(error) else text)
        self._lost()  # another process, or one on another host, may be able to

    def _note(self, failure: str | None) -> None:
        """Let `dualwrite status` and its like tell why the journal is not emptied; None: it is."""
        if failure != self._failure:
            self._failure = failure
            with suppress(DualWriteError):  # it is only for people
                self.journal.store.note_failure(self.journal.prefix, failure)

    def _lost(self) -> None:
        self._close_quietly()
        if self.name in self._ids.held:
            with suppress(DualWriteError):  # the lease ends by itself
                self._ids.release(self.name)

    def _end(self) -> None:
        super()._end()
        self._count.stop()
        self._ids.close()
        self._coordinator.close()


# --- by hand ------------------------------------------------------------------------------------------------------------------


def drain_journal(store: TxnStateStore, settings: Settings, prefix: str) -> int:
    """Publish a journal now, and close its gate, from a process without a pool of the prefix.

    Args:
        store: The database.
        settings: Kafka's settings, and the writer's.
        prefix: The prefix, which has a journal there.

    Returns:
        How many messages it had.

    Raises:
        DualWriteError: As for `JournalKeeper.drain_now`.
    """
    before = sql_store(store).journal.gates(prefix, counts=True)[0].entries
    store.check_rights("writer")
    JournalKeeper(store, prefix, None, settings).drain_now()
    return before or 0


def replay_letters(store: TxnStateStore, settings: Settings, prefix: str, letters: Collection[int]) -> int:
    """Publish messages of a journal that Kafka has refused before, each once, and remove them from the dead letters.

    Args:
        store: The database.
        settings: Kafka's settings, and the writer's.
        prefix: The prefix.
        letters: Their numbers.

    Returns:
        How many were published.

    Raises:
        DualWriteError: As for `Relay.replay`.
    """
    of_sql, owner = sql_store(store), f"{describe_owner('journal')} {uuid.uuid4().hex[:8]}"
    with leased_id(of_sql.leases, drainer_id(prefix), owner) as name:
        of_writer = settings.with_changes(transactional_id=name, lanes=1)
        with connected(store, settings=of_writer, kafka=None, session=None, uses=("writer",)) as writer:
            return replay(writer, DeadLetters(of_sql, drainer_id(prefix)), letters, JournalSource.message)
