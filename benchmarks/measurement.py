"""One measurement: one case for a number of seconds, verified order by order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from sqlalchemy import create_engine, text

import orders
from alternatives import OUTBOX, OUTBOX_NOTIFIED, OUTBOXES, PLAIN, Case, Target
from callers import Ran, close_callers, open_callers, run_callers
from figures import Latency
from orders import Order
from processes import BATCH, Worker, arrivals, exactly_once, relay
from servers import Servers
from surroundings import Load, processor_times

_COUNTER: Final = text("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()")
_LOG: Final = text("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")
_PARTITIONS: Final = 4
_HEAD_START: Final = 0.3
_HAND_IN: Final = 0.2
_LIMIT: Final = 60.0


@dataclass(frozen=True)
class Figures:
    """One measurement: `units` orders in `seconds`. Transactions, log and client are those of an order.

    Args:
        call: The duration of a call.
        visible: From the start of a call until a `read_committed` consumer next to the broker has its message.
        transactions: Database transactions, of the relay too.
        log: Bytes of the write-ahead log, of the relay too.
        client: CPU seconds of the callers' processes.
        verified: How many messages were compared with the rows and matched.
        writers: How many writers the pool had at the end.
        late: By how many seconds the delay proxy was late, in the mean.
    """

    case: Case
    units: int
    seconds: float
    call: Latency
    visible: Latency
    transactions: float
    log: float
    client: float
    load: Load
    verified: int
    writers: int | None
    late: float | None

    @property
    def rate(self) -> float:
        return self.units / self.seconds


class Bench:
    """Processes for callers, relay and consumer, started once and used for all measurements."""

    def __init__(self, servers: Servers, producer: str, processes: int) -> None:
        self._servers, self._producer = servers, producer
        self._database = create_engine(servers.url)
        self._topics = (f"benchmark-{int(time.time()):x}-{number}" for number in itertools.count(1))
        self._callers = [Worker() for _ in range(processes)]
        self._relay, self._consumer = Worker(), Worker()
        orders.prepare(self._database)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in (*self._callers, self._relay, self._consumer):
            worker.close()
        orders.remove(self._database)
        self._database.dispose()

    def measure(self, case: Case, seconds: float) -> Figures:
        """Run one measurement; if database or topic don't have what the callers wrote, it fails."""
        topic = self._servers.make_topic(f"{next(self._topics)}-{case.alternative}", _PARTITIONS)
        try:
            return self._measure(case, topic, seconds)
        finally:
            self._servers.delete_topic(topic)

    def _measure(self, case: Case, topic: str, seconds: float) -> Figures:
        network = self._servers.network
        url, kafka = self._servers.reach(case.round_trip)
        workers = self._callers[: case.processes]
        share = case.callers // case.processes
        orders.clean(self._database)
        transactions = self._transactions()
        passed = network.passed() if network is not None and case.round_trip else None
        self._consumer.start(arrivals, self._servers.kafka, topic)  # as close as possible: it is no part of what is measured
        if case.alternative in OUTBOXES:
            self._start_relay(case, topic, url, kafka)
        target = Target(url, kafka, topic, self._producer)
        for number, worker in enumerate(workers):
            worker.start(open_callers, case, target, range(number * share, (number + 1) * share))
        _results(workers)
        log, times = self._asked(_LOG), processor_times()
        ran: list[Ran] = _call(workers, run_callers, time.monotonic() + _HEAD_START, seconds)
        load = Load.since(times)
        if case.alternative in OUTBOXES:
            self._relay.finish()
        log = self._asked(_LOG) - log
        _call(workers, close_callers)
        messages: list[tuple[bytes, float]] = self._consumer.finish()
        seen = dict(messages)
        late = network.lateness(passed) if network is not None and passed is not None else None
        transactions = self._transactions() - transactions
        samples = [each for one in ran for each in one.samples]
        done = {each.caller: each.first + len(each.began) for each in samples}
        contents = [content for content, _ in messages]
        sends = case.alternative != PLAIN
        verified = orders.verify(case.alternative, self._database, done, contents, sends=sends, debits=case.debits)
        measured = [
            (began, ended, seen[Order(each.caller, number).body.encode()] if sends else None)
            for each in samples
            for number, (began, ended) in enumerate(zip(each.began, each.ended, strict=True), start=each.first)
        ]
        units = len(measured)
        return Figures(
            case=case,
            units=units,
            seconds=max(ended for _, ended, _ in measured) - min(began for began, _, _ in measured),
            call=Latency.of([ended - began for began, ended, _ in measured]),
            visible=Latency.of([at - began for began, _, at in measured if at is not None]),
            transactions=transactions / sum(done.values()),
            log=log / units,
            client=sum(one.cpu for one in ran) / units,
            load=load,
            verified=verified,
            writers=ran[0].writers,
            late=late,
        )

    def _start_relay(self, case: Case, topic: str, url: str, kafka: Mapping[str, Any]) -> None:
        """Start the relay, and wait until it has published a row, which is no order."""
        channel = orders.CHANNEL if case.alternative == OUTBOX_NOTIFIED else None
        if case.alternative == OUTBOX:
            self._relay.start(relay, url, kafka)
        else:
            self._relay.start(exactly_once, url, kafka, BATCH, f"{topic}-relay", channel)
        first = self._servers.make_topic(f"{topic}-first", 1)
        orders.publish_one(self._database, first, _LIMIT)
        self._servers.delete_topic(first)

    def _asked(self, what: Any) -> int:
        with self._database.connect() as connection:
            return int(connection.scalar(what) or 0)

    def _transactions(self) -> int:
        """PostgreSQL's counter, after closed connections, including ours, have reported theirs."""
        self._database.dispose()
        time.sleep(_HAND_IN)
        return self._asked(_COUNTER)


def _call(workers: Sequence[Worker], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in every process at the same time."""
    for worker in workers:
        worker.start(function, *arguments)
    return _results(workers)


def _results(workers: Sequence[Worker]) -> list[Any]:
    return [worker.result() for worker in workers]
