"""Fixtures of the crash tests: databases, and the producers that a test asks for."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from crash.cases import PRODUCERS


@pytest.fixture(params=PRODUCERS)
def producer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The producer of every writer in the test, here and in other processes; native ones with two-phase commit and lanes.

    A test runs once with each producer, or with those in its `parametrize("producer", [...], indirect=True)`.
    """
    monkeypatch.setenv("DUALWRITE_PRODUCER", request.param)
    return str(request.param)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native producer: for tests of what is the same for all producers, or only for this one."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", "native")


@pytest.fixture
def librdkafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer that works with every broker."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", "librdkafka")


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one lane, a transaction's row and Kafka id and the contents of a recovery report are known."""
    monkeypatch.setenv("DUALWRITE_LANES", "1")


@pytest.fixture
def writer_thread() -> Iterator[ThreadPoolExecutor]:
    """Runs the writer: servers die with the thread that started them, so the test's main thread must start them."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
