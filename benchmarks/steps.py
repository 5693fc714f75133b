"""Breaks down the time of one dual write: timers around a DualWriter's store, producer and coordinator."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import workload
from alternatives import Target
from dualwrite import DualWriter, Settings
from dualwrite.kafka.base import TransactionalProducer
from dualwrite.kafka.choose import choose_producer
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.stores.base import TxnStateStore
from dualwrite.stores.sql import SqlStateStore
from figures import percentile
from workload import units

_ID: Final = "benchmark-steps"
WHOLE: Final = "whole transaction"
REST: Final = "the rest: Python between the steps"
KAFKA_COMMIT: Final = "Kafka commit (EndTxn)"
FLUSH: Final = "prepare: deliver; with librdkafka register the partition and describe, too"
STEPS: Final = (
    "begin database, check the fence",
    "begin Kafka (local)",
    "user's statements: update, insert",
    "send (hand over)",
    FLUSH,
    "record the state (update)",
    "database commit",
    KAFKA_COMMIT,
    REST,
    WHOLE,
)


@dataclass(frozen=True)
class Step:
    """How long one step takes, in seconds; `share` is its share of the whole transaction."""

    name: str
    mean: float
    p50: float
    p99: float
    share: float


class Clock:
    """Records for every unit how long each step took."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    def timed(self, step: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """A wrapper of the call that records its time."""
        times, now = self.times[step], time.perf_counter

        def measured(*args: Any, **kwargs: Any) -> Any:
            began = now()
            try:
                return call(*args, **kwargs)
            finally:
                times.append(now() - began)

        return measured


class Timed:
    """Delegates to another object, and times some of its methods.

    Args:
        inner: The object.
        clock: Records the times.
        steps: The name of the step for each timed method.
    """

    def __init__(self, inner: Any, clock: Clock, steps: Mapping[str, str]) -> None:
        self._inner = inner
        for method, step in steps.items():
            setattr(self, method, clock.timed(step, getattr(inner, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class TimedStore(Timed):
    """A store whose transactions are timed as well."""

    def __init__(self, store: TxnStateStore, clock: Clock) -> None:
        super().__init__(store, clock, {})
        self._begin = clock.timed("begin database, check the fence", store.begin_soon)
        self._clock = clock

    def begin_soon(self, claim: Any, *, is_group: bool = False) -> Timed:
        """As TxnStateStore.begin_soon."""
        # under two-phase commit the record is sent to PostgreSQL with the COMMIT, and `record` only stores it
        record = "record the state (update)"
        steps = {"record": record, "record_at_commit": record, "commit": "database commit"}
        return Timed(self._begin(claim, is_group=is_group), self._clock, steps)


def take_apart(target: Target, seconds: float, *, warm_up: int) -> tuple[list[Step], int]:
    """Run one writer with timers.

    Returns:
        The steps, and how many units were done, including the warm-up.
    """
    clock = Clock()
    with_clocks = _writer(target, clock)
    done = 0
    try:
        with with_clocks as writer:
            until = None
            for unit in units(0):
                if done == warm_up:
                    for times in clock.times.values():
                        times.clear()
                    until = time.monotonic() + seconds
                if until is not None and time.monotonic() > until:
                    break
                began = time.perf_counter()
                with writer.transaction() as tx:
                    clock.timed("user's statements: update, insert", unit.apply)(tx.db)
                    tx.send(target.topic, unit.message, key=unit.key)
                clock.times[WHOLE].append(time.perf_counter() - began)
                done += 1
    finally:
        with_clocks.store.close()
    return _steps(clock.times), done


def _writer(target: Target, clock: Clock) -> DualWriter:
    config = KafkaConfig.of(target.kafka)
    coordinator = WireTransactionCoordinator(config)
    chosen = choose_producer(config, coordinator, Settings(producer=target.producer, transactional_id=_ID))  # type: ignore[arg-type]

    def producer(kafka_transactional_id: str) -> TransactionalProducer:
        made = chosen(kafka_transactional_id)
        steps = {
            "begin_transaction": "begin Kafka (local)",
            "send": "send (hand over)",
            "prepare_transaction": FLUSH,
            "commit_transaction": KAFKA_COMMIT,
        }
        return cast("TransactionalProducer", Timed(made, clock, steps))

    store = SqlStateStore(workload.engine(target.url), owns_engine=True)
    return DualWriter(
        cast("TxnStateStore", TimedStore(store, clock)),
        transactional_id=_ID,
        producers=replace(chosen, make=producer),
        coordinator=coordinator,
        lanes=chosen.lanes,
    )


def _steps(times: Mapping[str, list[float]]) -> list[Step]:
    found = dict(times)
    parts = [found[name] for name in STEPS if name not in (REST, WHOLE)]
    found[REST] = [whole - sum(each) for whole, *each in zip(found[WHOLE], *parts, strict=True)]
    total = sum(found[WHOLE])
    return [
        Step(
            name,
            mean=sum(found[name]) / len(found[name]),
            p50=percentile(found[name], 0.5) or 0.0,
            p99=percentile(found[name], 0.99) or 0.0,
            share=sum(found[name]) / total,
        )
        for name in STEPS
    ]
