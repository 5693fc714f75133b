"""What the store tests share: an id, a state, and the tables of a user."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from dualwrite.state import PreparedTxnState
from dualwrite.stores.sql import SqlStateStore

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
