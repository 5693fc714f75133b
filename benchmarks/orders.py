"""The pool's unit of work: insert one order of 200 bytes, send it as a message."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import BigInteger, Column, Engine, Identity, MetaData, String, Table, insert, select, text

from cases import Case
from dualwrite.testing.topics import read_committed
from measurement import Work
from records import VerificationError, compare
from workload import MESSAGE_SIZE, outbox, tidy, waiting_rows

_metadata: Final = MetaData()
_orders: Final = Table(
    "benchmark_pool_orders",
    _metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("body", String(MESSAGE_SIZE), nullable=False),
)
_outbox: Final = outbox.to_metadata(_metadata)

INSERT: Final = insert(_orders).inline()  # without RETURNING: the order's id is not needed
INSERT_OUTBOX: Final = insert(_outbox).inline()
INSERT_SQL: Final = f"INSERT INTO {_orders.name} (body) VALUES (%s)"
INSERT_OUTBOX_SQL: Final = f"INSERT INTO {_outbox.name} (topic, key, value) VALUES (%s, %s, %s)"


class Order:
    """One order.

    Args:
        caller: The number of the caller that places it.
        number: Its number within this caller, from 0.

    Attributes:
        body: Its text, in the row and in the message.
        key: The message's key: orders are spread over the partitions.
    """

    __slots__ = ("body", "key")

    def __init__(self, caller: int, number: int) -> None:
        self.body = f'{{"writer": {caller}, "number": {number}, "note": "'.ljust(MESSAGE_SIZE - 2, ".") + '"}'
        self.key = f"{caller}.{number}"

    def outbox_row(self, topic: str) -> dict[str, Any]:
        """Its row in the outbox."""
        return {"topic": topic, "key": self.key.encode(), "value": self.body.encode()}


def _prepare(database: Engine) -> None:
    _metadata.drop_all(database)
    _metadata.create_all(database)


def _clean(database: Engine) -> None:
    with database.begin() as connection:
        connection.execute(text(f"TRUNCATE {', '.join(_metadata.tables)} RESTART IDENTITY"))
    tidy(database, _metadata.tables)


def _verify(case: Case, database: Engine, kafka: Mapping[str, Any], topic: str, done: Mapping[int, int]) -> int:
    placed = Counter(Order(caller, number).body for caller, total in done.items() for number in range(total))
    with database.connect() as connection:
        compare(case.alternative, "rows", placed, Counter(str(body) for body in connection.scalars(select(_orders.c.body))))
    waiting = waiting_rows(database)
    if waiting:
        raise VerificationError(f"{case.alternative}: {waiting} rows are still in the outbox")
    published = [(message.value or b"").decode(errors="replace") for message in read_committed(kafka, topic)]
    compare(case.alternative, "messages", placed if case.sends else Counter(), Counter(published))
    return len(published)


WORK: Final = Work(_prepare, _clean, _metadata.drop_all, _verify)
