"""`Relay`: publishes the rows of an outbox, each once, and shares the work with other relays of its name."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import URL, Engine

from dualwrite.deadline import Deadline, check_may_block
from dualwrite.errors import DualWriteError, FencedError, HostClockError, UsageError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.observability.health import CHECK_LIMIT, Asking, Part, RelayHealth, goes_on
from dualwrite.observability.logs import SubjectLogger
from dualwrite.observability.outages import database_at, level_of
from dualwrite.observability.readings import Reading, add_source, remove_source
from dualwrite.opening import Kafka, as_store, connected, open_recoverer
from dualwrite.pool.pool_ids import RENEWALS, Adoption, LeasedIds
from dualwrite.process import StopFlag, stopped_by_sigterm
from dualwrite.relay.dead_letters import DeadLetters
from dualwrite.relay.drain import Drain, Turn, leased_id, replay, sql_store
from dualwrite.relay.listener import Listener
from dualwrite.relay.options import RelayOptions, relay_timeouts
from dualwrite.relay.outbox_sql import Shard, key_hash, users_sql
from dualwrite.relay.outbox_table import OutboxTable, why_unordered
from dualwrite.relay.shards import RelayStatus, ShardDrainer, ShardLeases, status_of
from dualwrite.settings import Settings, check_seconds
from dualwrite.stores.leases import numbered
from dualwrite.stores.sql import SqlStateStore
from dualwrite.transactional_id import validate_transactional_id
from dualwrite.writer import DualWriter

log = SubjectLogger(__name__)

_LOOK_SECONDS: Final = 1.0
"""Seconds between two looks at the leases, and the longest that a relay that waits takes to notice a free shard."""

_STEP_SECONDS: Final = 0.1
_CHECK_SECONDS: Final = 5.0
"""Seconds in which Kafka must answer after an outage, before rows are locked again."""

_STANDSTILL_SECONDS: Final = 300.0
"""Seconds after which a shard that has not tried to publish rows stands still: each attempt has shorter limits."""

_LARGE_NUMBER: Final = 99_999
"""A number for which a relay's name must leave room in its ids."""

_CONNECTING: Final = frozenset({"producer", "two_phase", "lanes", "on_lost", "timeouts"})


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
        for given in connecting.keys() - _CONNECTING:
            raise TypeError(f"Relay() got an unexpected keyword argument {given!r}")
        self._options = options or RelayOptions()
        self._name = name or f"relay.{self._options.layout.table}"
        chosen = (settings or Settings.from_environment()).with_changes(schema=schema, **connecting)
        validate_transactional_id(numbered(self._name, _LARGE_NUMBER), lanes=chosen.lanes or 1)
        self._kafka = kafka
        self._stopped = StopFlag()
        self._running = threading.Lock()
        self._shards: dict[str, ShardDrainer] = {}
        self._counting = threading.Lock()
        self._asking = Asking()
        self._published = self._dead = 0
        self._may_publish = False
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
            if unordered := why_unordered(self._store, self._options.layout):
                log.warning("%s", unordered, prefix=self._name)
            self._sources = self._made_sources()
            self._new_listener()  # raises if there can be none
            leases, side = self._store.leases, database_at(self._store.description, is_local=self._store.is_local)
            self._ids = LeasedIds(leases, self._name, seconds=self._options.lease, database=side, role="relay")
            self._ids.on_lost = self._lost
            self._shard_leases = ShardLeases(leases, self._ids, self._name, self._options.shards)
            open_one = partial(open_recoverer, self._store, kafka=self._kafka, settings=self._settings)
            self._adoption = Adoption(self._store, leases, self._ids, self._name, open_one)
            failed.pop_all()
        add_source(self)

    def _new_listener(self) -> Listener | None:
        channel = self._options.listen
        return None if channel is None else Listener(self._store.engine, channel, self._name, self._wake)

    def _wake(self) -> None:
        for shard in list(self._shards.values()):
            shard.wake()

    def _made_sources(self) -> dict[str, OutboxTable]:
        """The table of each shard, by its id."""
        options, count = self._options, self._options.shards
        if count == 1:
            return {numbered(self._name, 1): self._table}
        by = options.shard_by
        expression = key_hash(options.layout, self._store.engine.dialect.name) if by is None else users_sql(by)
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

    def readings(self) -> Iterator[Reading]:
        """Its shards, for `dualwrite.observability.current_readings`; the size of the outbox takes a query: see `status`."""
        labels, shards = {"relay": self._name}, list(self._shards.values())
        yield Reading("relay_shards", len(shards), labels)
        now = time.monotonic()
        yield Reading("relay_idle_seconds", max((now - each.looked_at for each in shards), default=0.0), labels)

    def check(self, timeout: float = CHECK_LIMIT) -> RelayHealth:
        """Whether the relay works, for probes: asks the database and a broker at the same time. Any thread may call it.

        If a side does not answer, that is a part of the result, not an error. It stands still if one of its shards has not
        tried to publish rows for 5 minutes.

        Args:
            timeout: Seconds within which it returns.

        Raises:
            ConfigurationError: The time limit is not a number of seconds from 0 to 1000000.
        """
        check_seconds("timeout", timeout, may_be_zero=True)
        asks: dict[str, Callable[[], object]] = {
            "database": self._store.check_now,
            "kafka": partial(self._check_kafka, timeout),
        }
        answers = self._asking.answers(asks, Deadline.after(timeout))
        is_running, shards, now = self._running.locked(), list(self._shards.values()), time.monotonic()
        return RelayHealth(
            Part(is_ok=is_running, text="yes" if is_running else "no"),
            answers["database"],
            answers["kafka"],
            Part(is_ok=True, text=", ".join(each.name for each in shards) or "none"),
            goes_on(max((now - each.tried_at for each in shards), default=0.0), _STANDSTILL_SECONDS),
        )

    def status(self) -> RelayStatus:
        """The state of the outbox and of its relays. Counts the rows.

        Raises:
            StoreError: The database's own errors, translated.
        """
        leases, unordered = self._store.leases.entries(f"{self._name}."), why_unordered(self._store, self._options.layout)
        return status_of(self._name, self._table, self._dead_letters, leases, unordered)

    # --- running ----------------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End `run` once the transactions in progress have ended. May be called from any thread, and from a signal handler."""
        self._stopped.set()

    def run(self, *, until_empty: bool = False) -> None:
        """Publish rows until `stop`. In the main thread SIGTERM stops it too. It can be called again after that.

        Transient errors are retried, for as long as they last: conflicts, locks, a database or brokers that can't be reached, a
        database that takes no writes, a clock of this host that is wrong.

        Args:
            until_empty: End as soon as there is no row to publish, either by this relay or by another one; or with
                HostClockError, for which `run` waits otherwise.

        Raises:
            LostTransactionError, UnverifiedTransactionError: As for `DualWriter.transaction` and `open`: rows were removed, and
                their messages are not visible, or may not be.
            InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError: With `on_poison="stop"`, a row
                can't be sent.
            BrokerError, StoreError: A permanent error of Kafka or of the database.
            UsageError: It is running already, or an event loop runs in the thread, which it would block.
        """
        check_may_block("Relay.run()", "a thread: `await asyncio.to_thread(relay.run)`")
        with self._used("run()"), stopped_by_sigterm(self.stop), self._new_listener() or nullcontext():
            try:
                self._supervise(until_empty=until_empty)
            finally:
                self._stop_shards(list(self._shards.values()))
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

    def _turn_of(self, shard: ShardDrainer) -> int:
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
        remove_source(self)
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
            shard.start()
        next_look = next_search = 0.0
        while not self._stopped.is_set():
            now = time.monotonic()
            if now >= next_look:
                next_look = now + min(_LOOK_SECONDS, self._options.lease / RENEWALS)
                self._balance(search=now >= next_search)
                next_search = next_search if now < next_search else now + self._ids.interval
            self._check_shards()
            if until_empty:
                for shard in self._shards.values():
                    if isinstance(shard.waits_for, HostClockError):  # somebody must correct the clock
                        raise shard.waits_for
                if self._is_empty():
                    return
            self._stopped.wait(_STEP_SECONDS)

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
        if not self._may_publish:  # whoever only looks at the outbox needs fewer rights
            layout = self._options.layout
            uses = ("writer", "relay", "deletes" if layout.published is None else "marks")
            self._store.short_transactions.check_rights(*uses, outbox=layout.table)
            self._may_publish = True
        ours, excess = self._shard_leases.balance()
        for name in ours:
            if name not in self._shards:
                self._shards[name] = ShardDrainer(
                    name,
                    self._store,
                    self._ids,
                    partial(self._open_drain, name),
                    self._check_kafka,
                    self._options,
                    self._count,
                )
        return excess

    def _check_shards(self) -> None:
        """Forget the shards whose threads have ended; raise their error if they have one."""
        for shard in [each for each in self._shards.values() if each.has_ended]:
            self._forget(shard)
            if shard.error is not None:
                raise shard.error

    def _stop_shards(self, shards: list[ShardDrainer]) -> None:
        for shard in shards:
            shard.stop()
        for shard in shards:
            shard.join()
            self._forget(shard)

    def _forget(self, shard: ShardDrainer) -> None:
        self._shards.pop(shard.name, None)
        with suppress(DualWriteError):  # the lease ends by itself
            self._ids.release(shard.name)

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
        kafka, uses = self._kafka, ("writer",)
        return connected(self._store, settings=settings, kafka=kafka, session=None, uses=uses)

    def _open_drain(self, name: str) -> Drain:
        dead_letters = self._dead_letters if self._options.on_poison == "dead_letter" else None
        return Drain(self._open_writer(name), self._sources[name], options=self._options.batch, dead_letters=dead_letters)

    def _check_kafka(self, timeout: float = _CHECK_SECONDS) -> None:
        config = KafkaConfig.over(self._kafka, self._settings.kafka)
        with closing(WireTransactionCoordinator(config, timeout=timeout)) as coordinator:
            coordinator.cluster_id()

    def _count(self, turn: Turn) -> None:
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
            InvalidMessageError, MessageRefusedError, MessageTooLargeError, UnknownTopicError: One of them can't be sent; it and
                those after it are still there. Without large ones (4 MB, or 500) before it, all are.
            DualWriteError: As for `connect` and `DualWriter.transaction`.
        """
        leases, owner = self._store.leases, self._ids.owner
        with leased_id(leases, self._name, owner, without=self._sources) as name, self._open_writer(name) as writer:
            return replay(writer, self._dead_letters, ids, self._options.layout.message)
