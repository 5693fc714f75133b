"""What the store tests share: an id, a state, and user tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, func, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import Claim, StoreTransaction
from dualwrite.stores.sql import SqlStateStore
from fixtures.pace import LIMIT

ID = "orders"
STATE = PreparedTxnState(4711, 3)

user_metadata = MetaData()
orders = Table("orders", user_metadata, Column("id", Integer, primary_key=True), Column("item", String(50)))


class Base(DeclarativeBase):
    metadata = user_metadata


class Order(Base):
    __tablename__ = "orm_orders"
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    item: Mapped[str] = mapped_column(String(50))


def rows(engine: Engine, table: Any = orders) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(table)) or 0


def assert_nothing_is_checked_out(store: SqlStateStore) -> None:
    assert store.engine.pool.checkedout() == 0  # type: ignore[attr-defined]  # QueuePool


def first_claim(store: SqlStateStore) -> Claim:
    """The first claim of the id, in a database that has the user's tables too."""
    user_metadata.create_all(store.engine)
    return store.claim(ID, "tests", timeout=LIMIT)


@contextmanager
def store_on_engine(url: str, **options: Any) -> Iterator[SqlStateStore]:
    """A store on an engine of the user, in a database that has the user's tables too."""
    engine = create_engine(url, **options)
    try:
        user_metadata.create_all(engine)
        yield SqlStateStore(engine)
    finally:
        engine.dispose()


def execute_past_the_guard(transaction: StoreTransaction, statement: str) -> None:
    """On the driver's own connection, where no guard checks it."""
    with transaction.handle.connection.cursor() as cursor:
        cursor.execute(statement)


def write(transaction: StoreTransaction, number: int = 1) -> None:
    """Insert an order."""
    transaction.handle.execute(insert(orders).values(id=number, item="chair"))


def commit(transaction: StoreTransaction, number: int = 1) -> None:
    """Record the state of the transaction with this number, and commit."""
    transaction.record(STATE, generation=0, transaction_number=number)
    transaction.commit()


def recorded(store: SqlStateStore, claim: Claim, record: str = "record", *, number: int = 1) -> StoreTransaction:
    """A transaction of the claim with an order and the state, which `record_at_commit` may write only in COMMIT."""
    transaction = store.begin(claim)
    write(transaction, number)
    getattr(transaction, record)(STATE, generation=0, transaction_number=number)
    return transaction


def assert_outcome(store: SqlStateStore, claim: Claim, *, committed: bool) -> None:
    """What the writer does after an unknown COMMIT (rule F8)."""
    again = store.claim(ID, "tests", timeout=LIMIT, expected_fence=claim.fence)
    row = store.read_claimed(again)
    assert (row.transaction_number == 1, row.prepared_state) == (committed, STATE if committed else None)
    assert rows(store.engine) == (1 if committed else 0)
    assert_nothing_is_checked_out(store)
