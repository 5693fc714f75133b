"""What the crash tests share: every one runs with both producers, unless its module is about one of them."""

from collections.abc import Iterator

import pytest

from crash.databases import Databases


@pytest.fixture(scope="session")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    with Databases(tmp_path_factory.mktemp("crash")) as made:
        yield made


@pytest.fixture(params=["librdkafka", "native"])
def producer(request: pytest.FixtureRequest) -> str:
    """The producer of every writer in the test, here and in other processes; native ones with two-phase commit and lanes."""
    return str(request.param)


@pytest.fixture(autouse=True)
def environment(producer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_PRODUCER", producer)


@pytest.fixture
def one_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is known which row and which Kafka id a transaction is on, and what a recovery report holds."""
    monkeypatch.setenv("DUALWRITE_LANES", "1")
