"""The benchmark of producers runs, and verifies what it measures."""

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import pytest

from benchmarks.benchmark_process import run_benchmark
from dualwrite.devcluster import DevCluster

Import = Callable[[str], ModuleType]

SHORT = (
    *("--seconds", "0.1", "--rounds", "1", "--ids", "2"),
    *("--bulk", "1000", "--bulk-transactions", "2", "--memory", "500"),
)


class FakePlace:
    """Stands for Kafka: its clients keep their messages, of which `damage` is what consumers get."""

    def __init__(self, damage: Callable[[list[bytes]], list[bytes]] = lambda sent: sent, fails_at: int | None = None) -> None:
        self._sent: list[bytes] = []
        self._damage = damage
        self._fails_at = fails_at

    def topic(self, partitions: int) -> str:
        del partitions
        self._sent.clear()
        return "topic"

    def client(self, name: str, **_: object) -> "FakePlace":
        del name
        return self

    def transaction(self, topic: str, values: Iterable[bytes]) -> None:
        del topic
        if self._fails_at is not None and len(self._sent) >= self._fails_at:
            raise ConnectionError("the broker is gone")
        self._sent.extend(values)

    def abort(self, topic: str, value: bytes) -> None:
        del topic, value

    def values(self, topic: str) -> Iterator[bytes]:
        del topic
        return iter(self._damage(self._sent))

    def close(self) -> None:
        pass


MEASUREMENTS = {
    "in turn": lambda producer, place: producer.in_turn(place, "x", 2, 0.01),
    "at once": lambda producer, place: producer.at_once(place, "x", 2, 0.01),
    "bulk": lambda producer, place: producer.bulk(place, "x", 100, 2),
    "aborts": lambda producer, place: producer.with_aborts(place, "x", 0.01, 0.5, 300),
    "memory": lambda producer, place: producer.memory(place, "x", 10, 2),
}
DAMAGES = {
    "lost": lambda sent: sent[:1] + sent[2:],
    "doubled": lambda sent: [*sent, sent[1]],
    "altered": lambda sent: [*sent[:-1], sent[-1][:-1] + b"?"],
}


@pytest.mark.soak  # in CI: the benchmarks of the pool and the processor
def test_every_producer_is_measured_and_verified(broker: DevCluster) -> None:
    done = run_benchmark("producer.py", *SHORT, "--kafka", broker.bootstrap_servers)
    assert done.returncode == 0, done.stderr
    for title in ("One message, one id", "2 ids in turn", "2 ids, a thread each", "2 transactions of 1,000", "Resident memory"):
        assert title in done.stdout
    for kind in ("value only", "a timestamp each, rising", "a header each", "a header and a rising timestamp each"):
        assert f"200 bytes: {kind}\n" in done.stdout
    for producer in (
        "confluent-kafka",
        "native, plain",
        "native, 2PC",
        "native, 2PC, send_many",
        "confluent-kafka, produce_batch",
    ):
        assert f"| {producer} |" in done.stdout
    for fact in ("date: ", "commit ", "release of metadata.version"):
        assert fact in done.stdout


@pytest.mark.soak  # as above
def test_a_share_of_the_transactions_is_aborted(broker: DevCluster) -> None:
    done = run_benchmark("producer.py", *SHORT, "--aborts", "0.25", "--kafka", broker.bootstrap_servers)
    assert done.returncode == 0, done.stderr
    assert "One message of 1,000 bytes, 25% aborted" in done.stdout


def test_an_aborted_message_that_is_visible_is_noticed(benchmark_module: Import) -> None:
    producer = benchmark_module("producer")

    class Leaking(FakePlace):
        def abort(self, topic: str, value: bytes) -> None:
            self.transaction(topic, [value])

    with pytest.raises(benchmark_module("records").VerificationError, match="was never written"):
        producer.with_aborts(Leaking(), "x", 0.01, 0.5, 300)


@pytest.mark.parametrize("measure", MEASUREMENTS.values(), ids=list(MEASUREMENTS))
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_damaged_message_is_noticed(
    benchmark_module: Import,
    measure: Callable[[ModuleType, FakePlace], object],
    damage: Callable[[list[bytes]], list[bytes]],
) -> None:
    producer = benchmark_module("producer")

    measure(producer, FakePlace())
    with pytest.raises(benchmark_module("records").VerificationError):
        measure(producer, FakePlace(damage))


def test_a_client_that_fails_in_its_thread_fails_the_measurement(benchmark_module: Import) -> None:
    with pytest.raises(ConnectionError, match="broker is gone"):  # both clients send their first messages before the threads
        MEASUREMENTS["at once"](benchmark_module("producer"), FakePlace(fails_at=2))


def test_a_measurement_without_time_makes_one_transaction_in_each_thread(benchmark_module: Import) -> None:
    measured = benchmark_module("producer").at_once(FakePlace(), "x", 2, 0.0)
    assert len(measured.each) == 2


def test_every_producer_is_first_in_some_round_and_the_first_round_is_discarded(
    benchmark_module: Import, capsys: pytest.CaptureFixture[str]
) -> None:
    producer = benchmark_module("producer")
    measured = []

    def measure(name: str, duration: float) -> object:
        measured.append((name, duration))
        return producer.Latencies([0.001 * len(measured)], 1.0)

    producer.table("title", measure, 5.0, 3)

    names = [name for name, _ in measured]
    assert {names[place] for place in (3, 6, 9)} == set(producer.PRODUCERS)
    assert [duration for _, duration in measured] == [1.0] * 3 + [5.0] * 9
    assert "| confluent-kafka | 1 | 8.00 | 8.00 | 1.00 (1.00 … 1.00) | 1.00 (1.00 … 1.00) |" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--rounds", "--ids", "--bulk"])
def test_no_rounds_are_refused(benchmark_module: Import, capsys: pytest.CaptureFixture[str], option: str) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        benchmark_module("producer").arguments([option, "0"])

    assert "must be at least 1" in capsys.readouterr().err
