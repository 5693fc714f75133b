"""One measurement: one case for a number of seconds, verified."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from sqlalchemy import Engine

import workload
from agents import Agent, call_all
from alternatives import Target
from arrivals import Arrivals
from cases import Case
from figures import Figures, Latency
from load import Counters, Watch, Window
from machine import Conditions, ProcessorTimes
from relay import Relay, RelaySettings
from services import Services
from writing import Samples

WARM_UP_UNITS: Final = 20
_HEAD_START: Final = 0.3
_HAND_IN: Final = 0.2
_ARRIVAL_TIMEOUT: Final = 60.0


@dataclass(frozen=True)
class Plan:
    """Settings that are the same for all measurements.

    Args:
        partitions: Number of partitions of each topic.
        producer: `producer` of `dualwrite.connect`.
        relay: Settings of the outbox's relay.
        keep_topics: Don't delete topics, since we remove the whole cluster afterwards.
        two_phase: `two_phase` of `dualwrite.connect`.
    """

    partitions: int
    producer: str
    relay: RelaySettings
    keep_topics: bool
    two_phase: bool | None = None


@dataclass(frozen=True)
class Work:
    """What is written, in the database.

    Args:
        prepare: Creates the tables.
        clean: Restores the state that every measurement starts with.
        remove: Drops the tables.
        verify: Compares what the writers did (how many units each, by their numbers), the rows and the messages; returns how
            many messages there are.
    """

    prepare: Callable[[Engine], None]
    clean: Callable[[Engine], None]
    remove: Callable[[Engine], None]
    verify: Callable[[Case, Engine, Mapping[str, Any], str, Mapping[int, int]], int]


class Bench:
    """Writers, relay and consumer, started once and used for all measurements.

    Args:
        services: The servers.
        plan: See Plan.
        work: What is written.
        writers: Each starts an agent that writes. It has `open(case, target, warm_up)`, `run(begin_at, seconds)`, which returns
            a list of Samples, and `close()`.

    Attributes:
        writers: These agents.
    """

    def __init__(self, services: Services, plan: Plan, work: Work, writers: Sequence[Callable[[], Agent]]) -> None:
        self._services = services
        self._plan = plan
        self._work = work
        self._database = workload.engine(services.url)
        self._numbers = itertools.count(1)
        self._run = f"{int(time.time()):x}"
        self._agents: list[Agent] = []
        try:
            self.writers = [self._start(start()) for start in writers]
            self._relay = self._start(Agent(Relay))
            self._consumer = self._start(Agent(Arrivals))
            work.prepare(self._database)
        except BaseException:
            self.close(at_once=True)
            raise

    def _start(self, agent: Agent) -> Agent:
        self._agents.append(agent)
        return agent

    def close(self, *, at_once: bool = False) -> None:
        """End the processes, immediately if `at_once`, and drop the tables."""
        for agent in self._agents:
            agent.stop(at_once=at_once)
        self._work.remove(self._database)
        self._database.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=error is not None)

    def measure(self, case: Case, seconds: float) -> Figures:
        """Run one measurement, with the first `case.agents` of the writers' agents.

        Raises:
            VerificationError: Database and topic don't have what the writers wrote.
            AgentError: A writer, the relay or the consumer failed.
        """
        topic = f"benchmark-{self._run}-{next(self._numbers)}-{case.alternative}"
        self._services.make_topic(topic, self._plan.partitions)
        try:
            return self._measure(case, topic, self.writers[: case.agents], seconds)
        finally:
            if not self._plan.keep_topics:
                self._services.delete_topic(topic)

    def _measure(self, case: Case, topic: str, writers: list[Agent], seconds: float) -> Figures:
        kafka, plan = self._services.kafka, self._plan  # as close as possible: the consumer is no part of what is measured
        url, clients_kafka = self._services.reach(case.round_trip)
        self._work.clean(self._database)
        before = self._counters()
        self._consumer.call("watch", kafka, topic, plan.partitions)
        if case.needs_relay:
            self._relay.call("start", url, clients_kafka, plan.relay)
        try:
            target = Target(url, clients_kafka, topic, plan.producer, plan.two_phase)
            call_all(writers, "open", case, target, WARM_UP_UNITS)
            watch = Watch(
                self._database,
                writers={agent.pid for agent in writers},
                relay=self._relay.pid,
                kafka=set(self._services.brokers),
            )
            first, times = watch.window(), ProcessorTimes.now()
            results = call_all(writers, "run", time.monotonic() + _HEAD_START, seconds)
            conditions = Conditions.since(times)
        finally:
            stopped = time.monotonic()
            backlog = workload.waiting_rows(self._database)
            if case.needs_relay:
                self._relay.call("drain")
            drained = time.monotonic() - stopped if backlog else 0.0
        last = watch.window()
        call_all(writers, "close")
        after = self._counters()
        samples: list[Samples] = list(itertools.chain.from_iterable(results))
        done = sum(sample.total for sample in samples)
        arrivals = self._consumer.call("collect", done if case.sends else 0, _ARRIVAL_TIMEOUT)
        verified = self._work.verify(case, self._database, kafka, topic, {sample.writer: sample.total for sample in samples})
        return _figures(
            case,
            samples,
            {(writer, number): seen for writer, number, seen in arrivals},
            load=(before, after),
            window=(first, last),
            outbox=(backlog, drained),
            verified=verified,
            conditions=conditions,
        )

    def _counters(self) -> Counters:
        """PostgreSQL's counters, after closed connections, including ours, have reported theirs."""
        self._database.dispose()
        time.sleep(_HAND_IN)
        return Counters.of(self._database)


def _figures(
    case: Case,
    samples: Sequence[Samples],
    seen: dict[tuple[int, int], float],
    *,
    load: tuple[Counters, Counters],
    window: tuple[Window, Window],
    outbox: tuple[int, float],
    verified: int,
    conditions: Conditions,
) -> Figures:
    done = sum(sample.total for sample in samples)
    measured = [
        (began, ended, seen.get((sample.writer, number)))
        for sample in samples
        for number, (began, ended) in enumerate(zip(sample.began, sample.ended, strict=True), start=sample.first)
    ]
    start, end = min(began for began, _, _ in measured), max(ended for _, ended, _ in measured)
    visible = [(began, ended, at) for began, ended, at in measured if at is not None]
    before, after = load
    first, last = window
    units = len(measured)

    def each(then: float | None, now: float | None) -> float | None:
        return None if then is None or now is None else (now - then) / units

    return Figures(
        alternative=case.alternative,
        writers=len(samples),
        units=units,
        seconds=end - start,
        call=Latency.of([ended - began for began, ended, _ in measured]),
        visible=Latency.of([at - began for began, _, at in visible]),
        after_call=Latency.of([at - ended for _, ended, at in visible]),
        delivered=len(visible) / (max(at for _, _, at in visible) - start) if visible else None,
        backlog=outbox[0],
        drained=outbox[1],
        transactions=(after.transactions - before.transactions) / done,
        rows=(after.rows - before.rows) / done,
        log=(last.log - first.log) / units,
        cpu_writers=each(first.writers, last.writers),
        cpu_relay=each(first.relay, last.relay) if case.needs_relay else 0.0,
        cpu_database=each(first.database, last.database),
        cpu_kafka=each(first.kafka, last.kafka),
        verified=verified,
        conditions=conditions,
    )
