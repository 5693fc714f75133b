"""Counts what a transaction, a pool's unit and `connect` do: figures that don't depend on time.

::

    python benchmarks/counts.py      # starts its own PostgreSQL and broker; half a minute

Calls are those of our own Python functions in all threads, on a checkout without compiled modules, once a writer's lanes or a
pool's ids have all been used; one INSERT and one message on PostgreSQL. A round trip is an answer that a client waited for,
as a proxy in front of the servers saw it; a request to Kafka is a write to one of our own sockets. Numbers are the lowest of
five: threads that look after something now and then come on top.
"""

from __future__ import annotations

import secrets
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

from sqlalchemy import create_engine, text

import dualwrite
from connect import network_between, statements_of
from delay import Network
from dualwrite import PoolOptions
from dualwrite.kafka.librdkafka.topic_admin import create_topic
from figures import table
from surroundings import show_progress

_SOURCE: Final = str(Path(dualwrite.__file__).parent)
_INSERT: Final = text("INSERT INTO counted (item) VALUES ('sofa')")
_WARM_UP: Final = 6
"""Enough that every lane, or every id of a pool, has been used."""
_TIMES: Final = 5
_PAUSE: Final = 0.1


@dataclass
class Profile:
    """How often each of our functions was called while it was `on`, and how often something was written to a socket."""

    on: bool = False
    calls: Counter[CodeType] = field(default_factory=Counter)
    requests: int = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """For `sys.setprofile`."""
        if not self.on:
            return
        if event == "call" and frame.f_code.co_filename.startswith(_SOURCE):
            self.calls[frame.f_code] += 1
        elif event == "c_call" and argument.__name__ in ("send", "sendall") and isinstance(argument.__self__, socket.socket):
            self.requests += 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from zero in the block."""
        self.calls, self.requests, self.on = Counter(), 0, True
        try:
            yield
        finally:
            self.on = False


def _unit(tx: dualwrite.Transaction, topic: str) -> None:
    tx.db.execute(_INSERT)
    tx.send(topic, "sofa", key="1")


class Counting:
    """Counts what something calls and sends; `lines` are those of the table."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._profile = Profile()
        self.lines: list[list[str]] = []

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Profile this thread, and those that begin in the block."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def count(self, what: str, run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> None:
        """Count what `run` does, a few times, each after `prepare`."""
        show_progress(what)
        found = []
        for number in range(_WARM_UP + _TIMES):
            prepare()
            time.sleep(_PAUSE)  # until the markers of the transaction before have been written
            before = self._network.passed()
            with self._profile.counting():
                run()
            passed = [now.since(then).exchanges for now, then in zip(self._network.passed(), before, strict=True)]
            calls = self._profile.calls
            files = {code.co_filename for code in calls}
            if number >= _WARM_UP:
                found.append((calls.total(), len(calls), len(files), *passed, self._profile.requests))
        self.lines.append([what, *(f"{min(each):.0f}" for each in zip(*found, strict=True))])


def calls() -> str:
    """The table of calls, round trips and requests."""
    with network_between(0.0) as (network, server):
        engine, counting = create_engine(network.url), Counting(network)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE counted (item text)"))
        name = topic = f"counted-{secrets.token_hex(4)}"
        create_topic({**network.kafka, "log_level": 2}, topic, 1, timeout=60.0)
        arguments: dict[str, Any] = {"kafka": network.kafka, "producer": "native"}
        made: list[Any] = []

        def connect() -> None:
            made.append(dualwrite.connect(engine, transactional_id=name, lanes=3, **arguments))

        def close() -> None:
            while made:
                made.pop().close()
            engine.dispose()

        def transaction() -> None:
            with made[0].transaction() as tx:
                _unit(tx, topic)

        with counting.profiled():
            connect()
            counting.count("with writer.transaction()", transaction)
            close()
            # of several writers, each may rest for long enough to ask first whether its id is known
            with dualwrite.create_pool(engine, prefix=f"{name}-pool", options=PoolOptions(max_size=1), **arguments) as pool:
                counting.count("pool.run(unit), alone in its group", lambda: pool.run(_unit, topic))
            options = PoolOptions(max_size=1, when_kafka_is_down="journal")
            with dualwrite.create_pool(engine, prefix=f"{name}-journal", options=options, **arguments) as pool:
                counting.count("pool.run(unit), with a journal", lambda: pool.run(_unit, topic))
            counting.count("connect(lanes=3), known id", connect, close)
            close()
        with statements_of(server) as statements:
            connect()
            close()
    head = ["call", "our calls", "functions", "files", "round trips: database", "Kafka", "requests to Kafka"]
    return f"{table(head, counting.lines)}\n\nconnect executes {statements.total()} statements."


if __name__ == "__main__":
    print(calls())
