"""One measurement: one alternative with a number of writers for a number of seconds, verified."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import workload
from agents import Agent, ask_all
from alternatives import Name, Target
from arrivals import Arrivals
from figures import Figures, Latency
from load import Counters, Watch, Window
from relay import Relay, RelaySettings
from services import Services
from verification import verify
from writing import Samples, Writing

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
    """

    partitions: int
    producer: str
    relay: RelaySettings
    keep_topics: bool


class Bench:
    """Writers, relay and consumer, started once and used for all measurements.

    Args:
        services: The servers.
        plan: See Plan.
        most_writers: The largest number of writers in any measurement.
        threads: Run the writers as threads of this process instead of processes.
    """

    def __init__(self, services: Services, plan: Plan, *, most_writers: int, threads: bool) -> None:
        self._services = services
        self._plan = plan
        self._database = workload.engine(services.url)
        self._numbers = itertools.count(1)
        self._run = f"{int(time.time()):x}"
        self._agents: list[Agent] = []
        try:
            self._writers = [self._start(Agent(Writing, number, in_thread=threads)) for number in range(most_writers)]
            self._relay = self._start(Agent(Relay))
            self._consumer = self._start(Agent(Arrivals))
            workload.prepare(self._database)
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
        workload.remove(self._database)
        self._database.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(at_once=error is not None)

    def measure(self, name: Name, writers: int, seconds: float) -> Figures:
        """Run one measurement.

        Raises:
            VerificationError: Database and topic don't have what the writers wrote.
            AgentError: A writer, the relay or the consumer failed.
        """
        topic = f"benchmark-{self._run}-{next(self._numbers)}-{name}"
        self._services.make_topic(topic, self._plan.partitions)
        try:
            return self._measure(name, topic, self._writers[:writers], seconds)
        finally:
            if not self._plan.keep_topics:
                self._services.delete_topic(topic)

    def _measure(self, name: Name, topic: str, writers: list[Agent], seconds: float) -> Figures:
        url, kafka = self._services.url, self._services.kafka
        workload.clean(self._database)
        before = self._counters()
        self._consumer.ask("watch", kafka, topic, self._plan.partitions)
        if name == "outbox":
            self._relay.ask("start", url, kafka, self._plan.relay)
        try:
            ask_all(writers, "open", name, Target(url, kafka, topic, self._plan.producer), WARM_UP_UNITS)
            watch = Watch(
                self._database,
                writers={agent.pid for agent in writers},
                relay=self._relay.pid,
                kafka=set(self._services.brokers),
            )
            first = watch.window()
            samples: list[Samples] = ask_all(writers, "run", time.monotonic() + _HEAD_START, seconds)
        finally:
            stopped = time.monotonic()
            backlog = workload.waiting_rows(self._database)
            if name == "outbox":
                self._relay.ask("drain")
            drained = time.monotonic() - stopped if backlog else 0.0
        last = watch.window()
        ask_all(writers, "close")
        after = self._counters()
        done = sum(sample.total for sample in samples)
        arrivals = self._consumer.ask("collect", 0 if name == "database" else done, _ARRIVAL_TIMEOUT)
        verified = verify(name, self._database, kafka, topic, done=done)
        return _figures(
            name,
            samples,
            {(writer, number): seen for writer, number, seen in arrivals},
            load=(before, after),
            window=(first, last),
            outbox=(backlog, drained),
            verified=verified,
        )

    def _counters(self) -> Counters:
        """PostgreSQL's counters, after closed connections, including ours, have reported theirs."""
        self._database.dispose()
        time.sleep(_HAND_IN)
        return Counters.of(self._database)


def _figures(
    name: Name,
    samples: Sequence[Samples],
    seen: dict[tuple[int, int], float],
    *,
    load: tuple[Counters, Counters],
    window: tuple[Window, Window],
    outbox: tuple[int, float],
    verified: int,
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
        alternative=name,
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
        cpu_relay=each(first.relay, last.relay) if name == "outbox" else 0.0,
        cpu_database=each(first.database, last.database),
        cpu_kafka=each(first.kafka, last.kafka),
        verified=verified,
    )
