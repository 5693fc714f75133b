"""What the crash tests share: databases, and the producers that a test asks for."""

from collections.abc import Iterator

import pytest

from crash.cases import PRODUCERS
from crash.databases import Databases


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    with Databases(tmp_path_factory.mktemp("crash")) as made:
        yield made


@pytest.fixture(params=PRODUCERS)
def producer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The producer of every writer in the test, here and in other processes; native ones with two-phase commit and lanes.

    A test runs once with each; or with those that it names by `parametrize("producer", [...], indirect=True)`.
    """
    monkeypatch.setenv("DUALWRITE_PRODUCER", request.param)
    return str(request.param)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own producer: for tests of what is the same for all producers, or only its own."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", "native")


@pytest.fixture
def librdkafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """The producer for every broker."""
    monkeypatch.setenv("DUALWRITE_PRODUCER", "librdkafka")


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is known which row and which Kafka id a transaction is on, and what a recovery report holds."""
    monkeypatch.setenv("DUALWRITE_LANES", "1")
