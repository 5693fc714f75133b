"""The scene of a writer test: one id with its own topic, on a database and a broker shared with other scenes."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import dualwrite
from dualwrite import DualWriter, Timeouts, Transaction
from dualwrite.errors import LostTransactionError
from dualwrite.kafka.base import ListedTransaction
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.opening import Database
from dualwrite.recovery.recoverer import ids_with_lanes
from dualwrite.state import TransactionStatus
from dualwrite.stores.base import StateRow
from dualwrite.stores.sql import SqlStateStore
from dualwrite.testing import failpoints
from dualwrite.testing.topics import CommittedMessage, read_committed
from dualwrite.transactional_id import TransactionalId
from fixtures.pace import LIMIT, limit, until

TIMEOUTS = Timeouts(claim=limit(10), kafka=limit(20), delivery=limit(20))


def _new_id() -> str:
    return f"w-{uuid4().hex[:12]}"


class Base(DeclarativeBase):
    pass


class Event(Base):
    """The user's table."""

    __tablename__ = "events"
    writer: Mapped[str] = mapped_column(sa.String(80), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


@dataclass
class Scene:
    """One id with its own topic.

    Args:
        engine: The user's engine.
        servers: Kafka's `bootstrap.servers`.
        kafka: Further Kafka settings.
        timeouts: The writer's time limits.
        lanes: The number of lanes of its writers; None for the producer's default.
    """

    engine: sa.Engine
    servers: str
    kafka: Mapping[str, Any] = field(default_factory=dict)
    timeouts: Timeouts = TIMEOUTS
    transactional_id: str = field(default_factory=_new_id)
    lanes: int | None = None

    @property
    def url(self) -> str:
        """The database, for another process."""
        return self.engine.url.render_as_string(hide_password=False)

    @property
    def topic(self) -> str:
        return f"events-{self.transactional_id}"

    def with_new_id(self) -> Scene:
        """The same with another id and topic."""
        return replace(self, transactional_id=_new_id())

    def connect(
        self, database: Database | None = None, *, kafka: Mapping[str, Any] | None = None, **changes: Any
    ) -> DualWriter:
        """An open writer."""
        return dualwrite.connect(
            self.engine if database is None else database,
            kafka={"bootstrap.servers": self.servers, **self.kafka, **(kafka or {})},
            **{"transactional_id": self.transactional_id, "timeouts": self.timeouts, "lanes": self.lanes, **changes},
        )

    def recover(self) -> dualwrite.RecoveryReport:
        """Recover the id."""
        return dualwrite.recover(
            self.engine,
            kafka={"bootstrap.servers": self.servers, **self.kafka},
            ids=[self.transactional_id],
            timeouts=self.timeouts,
        )

    # --- what a user's block does -----------------------------------------------------------------------------------------

    def insert(self, tx: Transaction, number: int) -> None:
        """Write a row."""
        tx.db.execute(sa.insert(Event).values(writer=self.transactional_id, number=number))

    def send(self, tx: Transaction, number: int) -> None:
        """Send a message."""
        tx.send(self.topic, str(number), key=self.transactional_id)

    def both(self, tx: Transaction, number: int) -> None:
        """Write a row and send a message."""
        self.insert(tx, number)
        self.send(tx, number)

    def write(self, writer: DualWriter, *numbers: int) -> None:
        """Write rows and send messages, one of each per transaction."""
        for number in numbers:
            with writer.transaction() as tx:
                self.both(tx, number)

    # --- results ----------------------------------------------------------------------------------------------------------

    def rows(self) -> list[int]:
        """The numbers in the database."""
        query = sa.select(Event.number).where(Event.writer == self.transactional_id).order_by(Event.number)
        with self.engine.connect() as connection:
            return list(connection.scalars(query))

    def raw_messages(self) -> list[CommittedMessage]:
        """What a read_committed consumer gets."""
        return read_committed({"bootstrap.servers": self.servers, **self.kafka}, self.topic, timeout=LIMIT)

    def messages(self) -> list[int]:
        """The numbers that a read_committed consumer gets."""
        return sorted(int(m.value or b"-1") for m in self.raw_messages())

    def agree(self) -> list[int]:
        """The numbers, after checking that both sides have the same ones, each once."""
        rows, messages = self.rows(), self.messages()
        assert Counter(rows) == Counter(messages), f"database {rows}, topic {messages}"
        assert len(set(rows)) == len(rows), f"duplicates: {rows}"
        return rows

    def abort(self, lane: int = 0) -> None:
        """Abort Kafka's side of the transaction that the row names, as an operator or a timeout can."""
        row = self.state_row(lane)
        state = row.prepared_state
        assert state is not None
        kafka_id = row.kafka_id(row.prepared_generation)
        with closing(WireTransactionCoordinator(KafkaConfig.of(self.servers), timeout=LIMIT)) as coordinator:
            ended = coordinator.end_transaction(kafka_id, producer_id=state.producer_id, epoch=state.epoch, commit=False)
        assert ended.proven

    def lose(self, writer: DualWriter, number: int, lane: int = 0) -> LostTransactionError:
        """Write in a transaction whose Kafka side is aborted between the two commits."""
        with failpoints.armed("before_kafka_commit", lambda: self.abort(lane)), pytest.raises(LostTransactionError) as caught:
            self.write(writer, number)
        return caught.value

    def state_row(self, lane: int = 0) -> StateRow:
        """The row of one of the id's lanes."""
        row = SqlStateStore(self.engine).read(TransactionalId(self.transactional_id, lane).row)
        assert row is not None
        return row

    def state_rows(self) -> list[StateRow]:
        """The rows of all the id's lanes."""
        store = SqlStateStore(self.engine)
        return [row for row in map(store.read, ids_with_lanes(store, [self.transactional_id])) if row is not None]

    def unfinished(self) -> list[str]:
        """The scene's unfinished Kafka ids; waits until a transaction that is being ended has written its markers."""
        coordinator = WireTransactionCoordinator(
            KafkaConfig.of({"bootstrap.servers": self.servers, **self.kafka}), timeout=LIMIT
        )
        finished = (TransactionStatus.EMPTY, TransactionStatus.COMPLETE_COMMIT, TransactionStatus.COMPLETE_ABORT)
        listed: list[ListedTransaction] = []

        def none_is_ending() -> bool:
            listed[:] = coordinator.list_transactions(self.transactional_id)
            return not any(found.status.is_ending for found in listed)

        try:
            until(none_is_ending, lambda: f"the markers of {listed}", pause=0.01)
        finally:
            coordinator.close()
        return [found.kafka_transactional_id for found in listed if found.status not in finished]

    def wait_until_unfinished(self) -> None:
        """Wait until Kafka knows the transaction of the current block: the producers send in the background."""
        until(self.unfinished, f"a transaction of {self.transactional_id}, of which Kafka has heard", pause=0.01)

    def assert_resolved(self) -> None:
        """Check that nothing is prepared, ongoing or unresolved, and no connection is checked out."""
        for row in self.state_rows():
            assert row.prepared_state is None, row
            assert list(row.unresolved_generations) == [], row
        assert self.unfinished() == []
        assert self.checked_out() == 0

    def checked_out(self) -> int:
        """The number of connections checked out from the engine's pool, if it has one."""
        pool = self.engine.pool
        if not isinstance(pool, sa.QueuePool):
            return 0
        if pool.checkedout():
            gc.collect()
        return pool.checkedout()
