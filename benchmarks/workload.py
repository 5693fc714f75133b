"""The unit of work, the same for all alternatives: update one account, insert one order, send a message of about 200 bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Identity,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    bindparam,
    create_engine,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.exc import ProgrammingError

ACCOUNTS: Final = 10_000  # enough that 8 writers rarely need the same row
OPENING_BALANCE: Final = 1_000_000
MESSAGE_SIZE: Final = 200
_HIGHEST_AMOUNT: Final = 500

metadata: Final = MetaData()
accounts: Final = Table(
    "benchmark_accounts",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("balance", BigInteger, nullable=False),
)
orders: Final = Table(
    "benchmark_orders",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("writer", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("account_id", Integer, nullable=False),
    Column("amount", Integer, nullable=False),
)
outbox: Final = Table(
    "benchmark_outbox",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("topic", String(249), nullable=False),
    Column("key", LargeBinary),
    Column("value", LargeBinary),
)

_DEBIT: Final = (
    update(accounts).where(accounts.c.id == bindparam("account")).values(balance=accounts.c.balance - bindparam("amount"))
)
_ORDER: Final = insert(orders).inline()  # without RETURNING: the order's id is not needed


@dataclass(frozen=True, slots=True)
class Unit:
    """One business transaction.

    Args:
        writer: The writer's number.
        number: The unit's number within this writer, from 0.
        account: The account to debit.
        amount: The amount to debit.
    """

    writer: int
    number: int
    account: int
    amount: int

    @property
    def key(self) -> bytes:
        """The message's key: orders of one account stay in order."""
        return str(self.account).encode()

    @property
    def message(self) -> bytes:
        """The message's value."""
        content = {"writer": self.writer, "number": self.number, "account": self.account, "amount": self.amount}
        bare = json.dumps({**content, "note": ""})
        return (bare[:-2] + "." * (MESSAGE_SIZE - len(bare)) + bare[-2:]).encode()

    def apply(self, connection: Connection) -> None:
        """Execute the database's part in the connection's open transaction."""
        connection.execute(_DEBIT, {"account": self.account, "amount": self.amount})
        connection.execute(
            _ORDER, {"writer": self.writer, "number": self.number, "account_id": self.account, "amount": self.amount}
        )


def place_of(message: bytes) -> tuple[int, int]:
    """The writer that sent a message, and the number of its unit within that writer."""
    content = json.loads(message)
    return content["writer"], content["number"]


def units(writer: int) -> Iterator[Unit]:
    """An endless sequence of one writer's units; the same in every measurement."""
    rng = random.Random(writer)  # noqa: S311  (a workload, not a secret)
    number = 0
    while True:
        yield Unit(writer, number, rng.randrange(ACCOUNTS), rng.randrange(1, _HIGHEST_AMOUNT))
        number += 1


def engine(url: str) -> Engine:
    """The engine that every alternative uses."""
    return create_engine(url)


def prepare(database: Engine) -> None:
    """Create the tables."""
    metadata.drop_all(database)
    metadata.create_all(database)
    with database.begin() as connection:
        connection.execute(insert(accounts), [{"id": number, "balance": OPENING_BALANCE} for number in range(ACCOUNTS)])


def clean(database: Engine) -> None:
    """Restore the state that every measurement starts with: initial balances, no orders, no dead rows, a recent checkpoint."""
    with database.begin() as connection:
        connection.execute(text("TRUNCATE benchmark_orders, benchmark_outbox RESTART IDENTITY"))
        connection.execute(update(accounts).where(accounts.c.balance != OPENING_BALANCE).values(balance=OPENING_BALANCE))
    tidy(database, metadata.tables)


def tidy(database: Engine, tables: Iterable[str]) -> None:
    """Remove dead rows, and make a checkpoint."""
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for table in tables:
            connection.execute(text(f"VACUUM (ANALYZE) {table}"))
        try:
            connection.execute(text("CHECKPOINT"))
        except ProgrammingError:  # in an existing database the user may lack the privilege; the figures then vary a little more
            return


def remove(database: Engine) -> None:
    """Drop the tables."""
    metadata.drop_all(database)


def rows(database: Engine) -> list[Unit]:
    """The orders in the database."""
    with database.connect() as connection:
        found = connection.execute(select(orders.c.writer, orders.c.number, orders.c.account_id, orders.c.amount))
        return [Unit(*row) for row in found]


def spent(database: Engine) -> int:
    """The total amount by which the accounts were debited."""
    with database.connect() as connection:
        return ACCOUNTS * OPENING_BALANCE - int(connection.scalar(select(func.sum(accounts.c.balance))) or 0)


def waiting_rows(database: Engine) -> int:
    """How many rows are in the outbox."""
    with database.connect() as connection:
        return int(connection.scalar(select(func.count()).select_from(outbox)) or 0)
