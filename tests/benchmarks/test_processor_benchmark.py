"""The processor's benchmark runs, and verifies what it measures."""

import threading
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster

Import = Callable[[str], ModuleType]

COMMITTED = {0: 3, 1: 2}
DAMAGES: dict[str, Callable[[list[Any], Any], list[Any]]] = {
    "lost": lambda found, _: [*found[:1], *found[2:]],
    "last one lost": lambda found, _: found[:-1],
    "doubled": lambda found, _: [*found, found[1]],
    "altered": lambda found, altered: [*found[:-1], altered],
}


@pytest.mark.slow
def test_every_alternative_is_measured_and_verified(broker: DevCluster, postgres_url: str) -> None:
    short = ("--messages", "200", "--batches", "100", "--members", "2", "--rounds", "1")
    done = run_benchmark("processor.py", *short, "--kafka", broker.bootstrap_servers, "--url", postgres_url)
    assert done.returncode == 0, done.stderr
    assert "'fsync': 'o" in done.stdout
    assert "Batches of 100: 200 messages, 2 members" in done.stdout
    for alternative in (
        "DualProcessor",
        "DualProcessor, decided",
        "DualProcessor on a pool, decided",
        "database, then offsets",
        "consume-transform-produce",
    ):
        assert done.stdout.count(f"| {alternative} |") == 1


def written(benchmark_module: Import) -> list[bytes]:
    record = benchmark_module("records").record
    return [record(partition, number) for partition, total in COMMITTED.items() for number in range(total)]


def as_rows(benchmark_module: Import, contents: list[bytes]) -> list[tuple[int, str]]:
    place_of = benchmark_module("records").place_of
    return [(place_of(content)[1], content.decode()) for content in contents]


def test_batches_that_are_committed_after_the_last_that_counts_may_be_there(benchmark_module: Import) -> None:
    processor, contents = benchmark_module("processor"), written(benchmark_module)

    processor.verify(processor.OURS, {0: 2, 1: 2}, as_rows(benchmark_module, contents), contents, messages=4)


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
@pytest.mark.parametrize(
    ("name", "what"), [("OURS", "rows"), ("OURS", "outputs"), ("POOL", "rows"), ("DATABASE", "rows"), ("KAFKA", "outputs")]
)
def test_a_damaged_row_or_message_is_noticed(benchmark_module: Import, name: str, what: str, damage: Any) -> None:
    processor, contents = benchmark_module("processor"), written(benchmark_module)
    damaged = damage(contents, contents[-1][:-1] + b"?")
    rows, outputs = (damaged if what == these else contents for these in ("rows", "outputs"))
    name = getattr(processor, name)
    if name == processor.DATABASE and len(damaged) > len(contents):
        processor.verify(name, COMMITTED, as_rows(benchmark_module, rows), (), messages=5)  # at least once: it may be doubled
        return

    with pytest.raises(benchmark_module("records").VerificationError):
        processor.verify(name, COMMITTED, as_rows(benchmark_module, rows), outputs, messages=5)


def test_a_row_with_the_number_of_another_is_noticed(benchmark_module: Import) -> None:
    processor, contents = benchmark_module("processor"), written(benchmark_module)
    (_, first), *others = as_rows(benchmark_module, contents)

    with pytest.raises(benchmark_module("records").VerificationError, match="has the number 7"):
        processor.verify(processor.OURS, COMMITTED, [(7, first), *others], contents, messages=5)


def test_the_clock_ends_with_the_commit_of_the_last_message(benchmark_module: Import) -> None:
    done = threading.Event()
    clock = benchmark_module("processor").Clock(4, done.set)
    messages = [SimpleNamespace(partition=lambda: 0, offset=lambda number=number: number) for number in range(6)]

    clock.start()
    began = clock.began
    time.sleep(0.01)
    clock.start()
    clock.count(messages[:3])
    assert not done.is_set()
    clock.count(messages[1:3])
    clock.count(messages[3:])

    assert done.is_set()
    assert (clock.began, clock.seen, clock.after) == (began, 6, {0: 6})
    assert clock.rate == 6 / (clock.ended - began)


def test_a_batch_of_a_processor_counts_once_it_has_been_committed(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler runs before the commit, and again if the transaction is repeated."""
    processor = benchmark_module("processor")
    messages = [SimpleNamespace(partition=lambda: 0, offset=lambda n=n: n, value=lambda: b"x") for n in range(8)]
    counted, stopped = [], threading.Event()
    monkeypatch.setattr(processor, "write", lambda *_: None)

    class FakeProcessor:
        def __init__(self, *_: object, handle_batch: Callable[..., None], **__: object) -> None:
            self._handle = handle_batch
            self.stop = stopped.set

        def run(self) -> None:
            tx = SimpleNamespace(db=None, send_many=lambda *_: None)
            for first in (0, 2, 2, 4, 6):
                self._handle(messages[first : first + 2], tx)
                counted.append(stopped.is_set())

    monkeypatch.setattr(processor, "DualProcessor", FakeProcessor)
    place = SimpleNamespace(topic=lambda: "target", servers="", source="source", batches=[])

    clock = processor.process(place, ["runner"], 2, 4)

    assert counted == [False, False, False, True, True], "four are committed when the fifth is handled"
    assert clock.after == {0: 6}, "whether the last batch was committed is unknown"


def test_a_member_that_fails_stops_the_others(benchmark_module: Import) -> None:
    stopped = threading.Event()

    def fail() -> None:
        raise ConnectionError("the broker is gone")

    with pytest.raises(ConnectionError, match="broker is gone"):
        benchmark_module("processor").together([lambda: assert_is_set(stopped), fail], stopped.set)


def assert_is_set(event: threading.Event) -> None:
    assert event.wait(60)


def test_an_error_of_the_consumer_is_not_ignored(benchmark_module: Import) -> None:
    error = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    consumer = SimpleNamespace(consume=lambda *_: [SimpleNamespace(error=lambda: None), SimpleNamespace(error=lambda: error)])

    with pytest.raises(KafkaException, match="TOPIC_AUTHORIZATION_FAILED"):
        benchmark_module("processor").polled(consumer, 10)
