"""Reads the state after a run: the rows in the database, and the topic as a read_committed consumer sees it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Engine, select

from dualwrite.demo.comparison import Content, Evidence, Message
from dualwrite.demo.flights import read_flights
from dualwrite.demo.tables import Tables
from dualwrite.testing.topics import CommittedMessage, read_committed

_QUIET: Final = {"log_level": 4}
"""Only warnings and worse: at a higher level, librdkafka logs that an AdminClient was closed with unread events."""


def read_evidence(engine: Engine, tables: Tables, kafka: Mapping[str, Any], topic: str, departures: int) -> Evidence:
    """Read flights, database and topic.

    Raises:
        OpenTransactionsError: A transaction is still open on the topic.
        BrokerError: The topic can't be read.
    """
    with engine.connect() as connection:
        rows = connection.execute(select(tables.departures).order_by(tables.departures.c.row)).mappings()
        found = [{name: value for name, value in row.items() if name != "row"} for row in rows]
        aircraft = {
            row["aircraft"]: {name: value for name, value in row.items() if name != "aircraft"}
            for row in connection.execute(select(tables.aircraft)).mappings()
        }
    return Evidence(
        flights=list(read_flights(departures)),
        rows=found,
        messages=[_message(each) for each in read_committed({**kafka, **_QUIET}, topic)],
        aircraft=aircraft,
    )


def _message(found: CommittedMessage) -> Message:
    return Message(found.partition, (found.key or b"").decode(errors="replace"), _content(found.value))


def _content(value: bytes | None) -> Content | None:
    try:
        content = json.loads(value or b"")
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
