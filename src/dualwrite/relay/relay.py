"""`Relay`: publishes the rows of an outbox, each once, and shares the work with other relays of its name."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import URL, Engine

from dualwrite.api import WriterOptions, connect, open_recoverer
from dualwrite.deadline import check_may_block
from dualwrite.errors import DualWriteError, FencedError, UsageError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.logs import SubjectLogger
from dualwrite.opening import Kafka, as_store
from dualwrite.outages import database_at, level_of
from dualwrite.outbox.dead_letters import DeadLetters
from dualwrite.outbox.drain import Drain, Turn, replay, sql_store
from dualwrite.outbox.outbox_sql import Shard
from dualwrite.outbox.outbox_table import OutboxTable
from dualwrite.pool.pool_ids import RENEWALS, Adoption, LeasedIds
from dualwrite.recovery.recoverer import Recoverer
from dualwrite.relay.defaults import key_hash, relay_timeouts
from dualwrite.relay.options import RelayOptions
from dualwrite.relay.shard_leases import ShardLeases
from dualwrite.relay.shard_relay import ShardRelay
from dualwrite.relay.status import RelayStatus, status_of
from dualwrite.relay.wake_up import Listener
from dualwrite.settings import Settings
from dualwrite.stopping import StopFlag, stopped_by_sigterm
from dualwrite.stores.leases import numbered
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import validate_transactional_id
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

_LOOK: Final = 1.0
"""Seconds between two looks at the leases, and the longest that a relay that waits takes to notice a free shard."""

_STEP: Final = 0.1
_CHECK: Final = 5.0
"""Seconds in which Kafka must answer after an outage, before rows are locked again."""

_LARGE_NUMBER: Final = 99_999
"""A number for which a relay's name must leave room in its ids."""


class Relay:
    """Publishes the rows of an outbox table to Kafka, and deletes them in the same dual write: each row is published once.

    Any number of processes may run a relay of the same name. With one shard (the default) one of them works; when it stops or
    dies, another one takes over: it recovers the transaction that was left in doubt, and continues.

    Use it in one thread; `stop` may be called from any thread, and from a signal handler.

    Args:
        database: A URL, a SQLAlchemy Engine or a SqlStateStore, as for `connect`. A store made from a URL is closed with the
            relay.
        name: The name of the relays that share an outbox: the prefix of their transactional ids. By default `relay.` and the
            table's name.
        options: The outbox's layout, batches, waiting and shards.
        kafka: As for `connect`.
        settings: As for `connect`.
        schema: The schema of dualwrite's tables; the outbox may be in another one, see `OutboxLayout`.
        **connecting: As for `connect`: producer, two_phase, lanes, on_lost, timeouts.

    Raises:
        ConfigurationError: A setting is missing; the database is not a SQL database; the table or one of its columns is
            missing; or another option does not fit the database.
        StateTableMissingError: dualwrite's tables are missing.
        StoreUnavailableError: The database can't be reached.
    """

    def __init__(
        self,
        database: str | URL | Engine | SqlStateStore | None = None,
        *,
        name: str | None = None,
        options: RelayOptions | None = None,
        kafka: Kafka | None = None,
        settings: Settings | None = None,
        schema: str | None = None,
        **connecting: Any,
    ) -> None:
        for given in connecting.keys() - WriterOptions.__annotations__.keys():
            raise TypeError(f"Relay() got an unexpected keyword argument {given!r}")
        self._options = options or RelayOptions()
        self._name = name or f"relay.{self._options.layout.table}"
        validate_transactional_id(numbered(self._name, _LARGE_NUMBER), lanes=connecting.get("lanes") or 1)
        chosen = (settings or Settings.from_environment()).with_changes(
            schema=schema, timeouts=connecting.pop("timeouts", None)
        )
        self._kafka = kafka
        self._connecting = connecting
        self._stopped = StopFlag()
        self._running = threading.Lock()
        self._shards: dict[str, ShardRelay] = {}
        self._counting = threading.Lock()
        self._published = self._dead = 0
        store = as_store(database, chosen)
        self._settings = replace(chosen, timeouts=relay_timeouts(chosen.timeouts, store))
        with ExitStack() as failed:
            if store is not database:
                failed.callback(store.close)
            self._owned = store if store is not database else None
            self._store = sql_store(store)
            self._store.check()
            self._dead_letters = DeadLetters(self._store, self._name)
            self._dead_letters.check()
            self._table = OutboxTable(self._store, self._options.layout)
            self._sources = self._made_sources()
            self._listener = self._made_listener()
            self._open_leases()
            failed.pop_all()

    def _open_leases(self) -> None:
        leases = self._store.leases
        side = database_at(self._store.description, is_local=self._store.is_local)
        self._ids = LeasedIds(leases, self._name, seconds=self._options.lease, database=side, role="relay")
        self._ids.on_lost = self._lost
        self._shard_leases = ShardLeases(leases, self._ids, self._name, self._options.shards)
        self._adoption = Adoption(self._store, leases, self._ids, self._name, self._recoverer)

    def _made_listener(self) -> Listener | None:
        return None if self._options.listen is None else Listener(self._store.engine, self._options.listen, self._name)

    def _made_sources(self) -> dict[str, OutboxTable]:
        """The table of each shard, by its id."""
        options, count = self._options, self._options.shards
        if count == 1:
            return {numbered(self._name, 1): self._table}
        expression = options.shard_by or key_hash(options.layout, self._store)
        shards = [Shard(expression, number, count) for number in range(count)]
        return {numbered(self._name, shard.number + 1): OutboxTable(self._store, options.layout, shard) for shard in shards}

    # --- properties -------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name of the relays that share the outbox."""
        return self._name

    @property
    def published(self) -> int:
        """The number of rows that this relay has published."""
        return self._published

    @property
    def dead(self) -> int:
        """The number of rows that this relay has moved to the dead letters."""
        return self._dead

    @property
    def shards(self) -> tuple[str, ...]:
        """The transactional ids of the shards on which this relay works now."""
        return tuple(self._shards)

    @property
    def dead_letters(self) -> DeadLetters:
        """The dead letters of all relays of this name, to look at and to drop."""
        return self._dead_letters

    def status(self) -> RelayStatus:
        """The state of the outbox and of its relays. Counts the rows.

        Raises:
            StoreError: The database's own errors, translated.
        """
        leases = [each for each in self._store.leases.entries(f"{self._name}.") if each.transactional_id in self._sources]
        return status_of(self._name, self._table, self._dead_letters, leases)

    # --- running ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `run` once the transactions in progress have ended. May be called from any thread, and from a signal handler."""
        self._stopped.set()

    def run(self, *, until_empty: bool = False) -> None:
        """Publish rows until `stop`. In the main thread SIGTERM stops it too. It can be called again after that.

        Transient errors are retried, for as long as they last: conflicts, locks, and a database or brokers that can't be
        reached.

        Args:
            until_empty: End as soon as there is no row to publish, either by this relay or by another one.

        Raises:
            LostTransactionError, UnverifiedTransactionError: As for `DualWriter.transaction` and `open`: rows were removed, and
                their messages are not visible, or may not be.
            InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError: With `on_poison="stop"`, a row
                can't be sent.
            BrokerError, StoreError: A permanent error of Kafka or of the database.
            UsageError: It is running already, or an event loop runs in the thread, which it would block.
        """
        check_may_block("Relay.run()", "a thread: `await asyncio.to_thread(relay.run)`")
        with self._used("run()"), stopped_by_sigterm(self.stop):
            self._listener = self._made_listener()
            try:
                if self._listener is not None:
                    self._listener.start()
                self._supervise(until_empty=until_empty)
            finally:
                self._stop_shards(list(self._shards.values()))
                if self._listener is not None:
                    self._listener.close()
                self._stopped.clear()

    def run_once(self) -> int:
        """Publish one batch of each shard that no other relay works on, and keep these shards until `close` or `run`.

        Returns:
            The number of rows that were published, or moved to the dead letters; 0 also if other relays work on all shards.

        Raises: as for `run`; besides, transient errors and FencedError are not retried.
        """
        check_may_block("Relay.run_once()", "a thread: `await asyncio.to_thread(relay.run_once)`")
        with self._used("run_once()"):
            self._take_shards()
            return sum(self._turn_of(shard) for shard in list(self._shards.values()))

    def _turn_of(self, shard: ShardRelay) -> int:
        try:
            return shard.turn().rows
        except FencedError:  # the next call opens another writer, if the shard is still ours
            shard.join()
            self._forget(shard)
            raise

    def close(self) -> None:
        """End the leases and close what the relay has opened; `run` must have ended. May be called more than once.

        Raises:
            DualWriteError: As for `DualWriter.close`; everything else is closed.
        """
        with ExitStack() as ending:
            if self._owned is not None:
                ending.callback(self._owned.close)
            ending.callback(self._ids.close)
            for shard in self._shards.values():
                ending.callback(shard.close)
            self._shards = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except DualWriteError as failed:
            error.add_note(f"dualwrite, closing the relay: {failed}")

    # --- shards -----------------------------------------------------------------------------------------------------------

    def _supervise(self, *, until_empty: bool) -> None:
        for shard in self._shards.values():  # of `run_once`
            self._listen_for(shard)
            shard.start()
        next_look = next_search = 0.0
        while not self._stopped.is_set():
            now = time.monotonic()
            if now >= next_look:
                next_look = now + min(_LOOK, self._options.lease / RENEWALS)
                self._balance(search=now >= next_search)
                next_search = next_search if now < next_search else now + self._ids.interval
            self._check_shards()
            if until_empty and self._is_empty():
                return
            self._stopped.wait(_STEP)

    def _balance(self, *, search: bool) -> None:
        """Take and release shards, and recover ids that no relay uses any more; errors are retried at the next look."""
        try:
            excess = self._take_shards()
            if excess:
                self._stop_shards(list(self._shards.values())[-excess:])
            for shard in self._shards.values():
                shard.start()
            if search:
                self._adoption.search(lambda: not self._stopped.is_set())
        except DualWriteError as error:
            if not error.retriable:
                raise
            log.log(level_of(error), "the shards can't be leased now, trying again: %s", error, prefix=self._name)

    def _take_shards(self) -> int:
        """Begin to work on the shards that are leased now; return how many are too many."""
        ours, excess = self._shard_leases.balance()
        for name in ours:
            if name not in self._shards:
                self._shards[name] = self._made_shard(name)
        return excess

    def _made_shard(self, name: str) -> ShardRelay:
        made = ShardRelay(
            name,
            self._store,
            lambda: self._open_writer(name),
            lambda writer: self._drain(writer, self._sources[name]),
            lambda: self._ids.keeps(name),
            self._check_kafka,
            self._options,
            self._done,
        )
        self._listen_for(made)
        return made

    def _listen_for(self, shard: ShardRelay) -> None:
        if self._listener is not None:
            self._listener.add(shard.wake_up)

    def _check_shards(self) -> None:
        """Forget the shards whose threads have ended; raise their error if they have one."""
        for shard in [each for each in self._shards.values() if each.has_ended]:
            self._forget(shard)
            if shard.error is not None:
                raise shard.error

    def _stop_shards(self, shards: list[ShardRelay]) -> None:
        for shard in shards:
            shard.stop()
        for shard in shards:
            shard.join()
            self._forget(shard)

    def _forget(self, shard: ShardRelay) -> None:
        self._shards.pop(shard.name, None)
        if self._listener is not None:
            self._listener.remove(shard.wake_up)
        with suppress(DualWriteError):  # the lease ends by itself
            self._shard_leases.release(shard.name)

    def _lost(self, names: frozenset[str]) -> None:
        """Other relays have leased these shards, so their writers fence ours; called by the leases' thread."""
        for name in names:
            shard = self._shards.get(name)
            if shard is not None:
                shard.stop()

    def _is_empty(self) -> bool:
        try:
            return not self._store.short_transactions.query(self._table.has_rows, "looking for rows")
        except DualWriteError as error:
            if not error.retriable:
                raise
            return False

    # --- what shards are made of ------------------------------------------------------------------------------------------

    def _open_writer(self, transactional_id: str) -> DualWriter[Any]:
        settings = self._settings.with_changes(transactional_id=transactional_id)
        return connect(self._store, kafka=self._kafka, settings=settings, **self._connecting)

    def _check_kafka(self) -> None:
        config = KafkaConfig.over(self._kafka, self._settings.kafka)
        with closing(WireTransactionCoordinator(config, timeout=_CHECK)) as coordinator:
            coordinator.cluster_id()

    def _recoverer(self) -> Recoverer:
        return open_recoverer(self._store, kafka=self._kafka, settings=self._settings)

    def _drain(self, writer: DualWriter[Any], source: OutboxTable) -> Drain:
        dead_letters = self._dead_letters if self._options.on_poison == "dead_letter" else None
        return Drain(writer, source, options=self._options.batch, dead_letters=dead_letters)

    def _done(self, turn: Turn) -> None:
        with self._counting:
            self._published += turn.published
            self._dead += turn.dead

    @contextmanager
    def _used(self, what: str) -> Iterator[None]:
        if not self._running.acquire(blocking=False):
            raise UsageError(f"{what} was called, but the relay is running already.")
        try:
            yield
        finally:
            self._running.release()

    # --- dead letters -----------------------------------------------------------------------------------------------------

    def replay(self, ids: Collection[int]) -> int:
        """Publish dead letters, each once: in a dual write that removes it from the dead letters. Other relays may be running.

        The messages are made with this relay's layout, so a relay with a corrected one replays what was not valid before.

        Args:
            ids: Their numbers; those that don't exist (any more) are ignored.

        Returns:
            How many were published.

        Raises:
            InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError: One of them can't be sent; none
                was published.
            DualWriteError: As for `connect` and `DualWriter.transaction`.
        """
        without = frozenset(self._sources)
        name = self._store.leases.lease(self._name, self._ids.owner, 1, seconds=self._options.lease, without=without)[0]
        try:
            with self._open_writer(name) as writer:
                return replay(writer, self._dead_letters, ids, self._options.layout.message)
        finally:
            with suppress(DualWriteError):  # it ends by itself
                self._store.leases.release([name], self._ids.owner)
