"""What pool.py and recipe.py write: orders of 200 bytes, each a row and a message; and what must be there afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.exc import ProgrammingError

from records import SIZE, VerificationError, check_records, record

_ACCOUNTS: Final = 10_000  # enough that 8 writers rarely need the same row
_BALANCE: Final = 1_000_000
CHANNEL: Final = "benchmark_outbox"
"""Where a relay is notified of new rows."""

_metadata: Final = sa.MetaData()
_accounts: Final = sa.Table(
    "benchmark_accounts",
    _metadata,
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("balance", sa.BigInteger, nullable=False),
)
_orders: Final = sa.Table(
    "benchmark_orders",
    _metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("body", sa.String(SIZE), nullable=False),
)
_outbox: Final = sa.Table(
    "benchmark_outbox",
    _metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
    sa.Column("topic", sa.String(249), nullable=False),
    sa.Column("key", sa.LargeBinary),
    sa.Column("value", sa.LargeBinary),
)

INSERT: Final = sa.insert(_orders).inline()  # without RETURNING: the order's id is not needed
INSERT_OUTBOX: Final = sa.insert(_outbox).inline()
INSERT_SQL: Final = f"INSERT INTO {_orders.name} (body) VALUES (%s)"
INSERT_OUTBOX_SQL: Final = f"INSERT INTO {_outbox.name} (topic, key, value) VALUES (%s, %s, %s)"
_DEBIT: Final = (
    sa.update(_accounts)
    .where(_accounts.c.id == sa.bindparam("account"))
    .values(balance=_accounts.c.balance - sa.bindparam("amount"))
)
_SET_TENANT: Final = sa.text("SELECT set_config('app.tenant', :tenant, true)")


class Order:
    """One order.

    Attributes:
        body: Its text, in the row and in the message: a record whose writer is the caller.
        key: The message's key: orders are spread over the partitions.
    """

    __slots__ = ("_place", "body", "key")

    def __init__(self, caller: int, number: int) -> None:
        self._place = caller, number
        self.body = record(caller, number).decode()
        self.key = f"{caller}.{number}"

    @property
    def debit(self) -> dict[str, int]:
        """The account to debit in recipe.py, and the amount; the same in every measurement."""
        caller, number = self._place
        place = (caller * 1_000_003 + number) * 7_919
        return {"account": place % _ACCOUNTS, "amount": 1 + place % 499}

    def outbox_row(self, topic: str) -> dict[str, Any]:
        """Its row in the outbox."""
        return {"topic": topic, "key": self.key.encode(), "value": self.body.encode()}


def insert_core(connection: sa.Connection, order: Order) -> None:
    """Place an order through SQLAlchemy Core."""
    connection.execute(INSERT, {"body": order.body})


def insert_of_a_tenant(connection: sa.Connection, order: Order) -> None:
    """The same, after the tenant is set for the transaction."""
    connection.execute(_SET_TENANT, {"tenant": order.key})
    insert_core(connection, order)


def debit_and_insert(connection: sa.Connection, order: Order) -> None:
    """The same, and debit an account: recipe.py's unit of work."""
    connection.execute(_DEBIT, order.debit)
    insert_core(connection, order)


def insert_psycopg(connection: Any, order: Order) -> None:
    """Place an order through psycopg."""
    connection.execute(INSERT_SQL, (order.body,))


def prepare(database: sa.Engine) -> None:
    _metadata.drop_all(database)
    _metadata.create_all(database)
    with database.begin() as connection:
        connection.execute(sa.insert(_accounts), [{"id": number, "balance": _BALANCE} for number in range(_ACCOUNTS)])


def publish_one(database: sa.Engine, topic: str, limit: float) -> None:
    """Wait until the relay has published a row.

    Raises:
        VerificationError: It has not done so within so many seconds.
    """
    deadline = time.monotonic() + limit
    with database.begin() as connection:
        connection.execute(INSERT_OUTBOX, Order(0, 0).outbox_row(topic))
    while True:
        with database.begin() as connection:
            if not connection.scalar(sa.select(sa.func.count()).select_from(_outbox)):
                return
        if time.monotonic() > deadline:
            raise VerificationError(f"the relay has published nothing within {limit:g} s")
        time.sleep(0.01)


def remove(database: sa.Engine) -> None:
    _metadata.drop_all(database)


def clean(database: sa.Engine) -> None:
    """Restore the state that every measurement starts with: initial balances, no orders, no dead rows, a recent checkpoint."""
    with database.begin() as connection:
        connection.execute(sa.text(f"TRUNCATE {_orders.name}, {_outbox.name} RESTART IDENTITY"))
        connection.execute(sa.update(_accounts).where(_accounts.c.balance != _BALANCE).values(balance=_BALANCE))
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in _metadata.tables:
            connection.execute(sa.text(f"VACUUM (ANALYZE) {table}"))
        try:
            connection.execute(sa.text("CHECKPOINT"))
        except ProgrammingError:  # in an existing database the user may lack the privilege; the figures then vary a little more
            return


def verify(
    name: str, database: sa.Engine, done: Mapping[int, int], messages: Iterable[bytes], *, sends: bool, debits: bool
) -> int:
    """Check that rows, messages and balances are those of the callers' orders; returns how many messages there are.

    Args:
        name: The alternative.
        database: The database.
        done: How many orders each caller has placed.
        messages: What consumers have seen.
        sends: Whether there is a message for each order; otherwise none.
        debits: Whether the orders have debited accounts.
    """
    with database.connect() as connection:
        check_records(name, "rows", done, (str(body).encode() for body in connection.scalars(sa.select(_orders.c.body))))
        waiting = connection.scalar(sa.select(sa.func.count()).select_from(_outbox))
        spent = _ACCOUNTS * _BALANCE - int(connection.scalar(sa.select(sa.func.sum(_accounts.c.balance))) or 0)
    if waiting:
        raise VerificationError(f"{name}: {waiting} rows are still in the outbox")
    wanted = sum(Order(caller, number).debit["amount"] for caller, total in done.items() for number in range(total))
    if spent != wanted * debits:
        raise VerificationError(f"{name}: the accounts were debited by {spent}, the orders' amounts are {wanted}")
    return check_records(name, "messages", done if sends else {}, messages)
