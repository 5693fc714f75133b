"""TransactionAdmin: listing and describing transactions on real brokers, by each version of the broker's filters."""

from __future__ import annotations

import gc
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka import Producer
from kafka.protocol.admin import ListTransactionsRequest

from dualwrite.admin import TransactionAdmin, listing
from dualwrite.admin.listing import Filter
from dualwrite.devcluster import DevCluster
from dualwrite.errors import ConfigurationError
from dualwrite.kafka.client.broker_connection import Connection
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.state import TransactionStatus
from fixtures.broker import wait_for_markers
from fixtures.pace import LIMIT
from fixtures.tables import table

NewName = Callable[[str], str]
NO_TIMEOUT_MS = 2**31 - 1


@dataclass
class Scene:
    """Ids with a common prefix: one ongoing, one prepared under two-phase commit, one committed, one aborted."""

    prefix: str
    topic: str
    producers: list[Any]  # they stay open

    def name(self, kind: str) -> str:
        return f"{self.prefix}.{kind}"

    def names(self, *kinds: str) -> list[str]:
        return sorted(map(self.name, kinds))


@pytest.fixture(scope="module")
def admin(broker: DevCluster) -> Iterator[TransactionAdmin]:
    with TransactionAdmin(broker.bootstrap_servers, timeout=LIMIT) as made:
        yield made


@pytest.fixture
def scene(
    broker: DevCluster, ongoing: Callable[..., Producer], new_native: Callable[..., NativeProducer], new_name: NewName
) -> Scene:
    made = Scene(new_name("id"), new_name("topic"), [])
    made.producers.append(ongoing(made.name("open"), made.topic))
    for kind in ("committed", "aborted"):
        producer = ongoing(made.name(kind), made.topic)
        (producer.commit_transaction if kind == "committed" else producer.abort_transaction)(LIMIT)
        made.producers.append(producer)
    native = new_native(made.name("prepared"), two_phase=True)
    native.init_transactions(timeout=LIMIT)
    native.begin_transaction()
    native.send(made.topic, b"v")
    native.prepare_transaction(timeout=LIMIT)
    made.producers.append(native)
    wait_for_markers(broker.bootstrap_servers)
    return made


@pytest.fixture(params=[0, 1, 2])
def with_version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Connections that know ListTransactions up to this version only, as those to brokers before 3.8, before 4.1, and since."""
    ask = Connection._ask_versions

    def capped(connection: Connection, *arguments: Any) -> None:
        ask(connection, *arguments)
        connection.api_versions = {**connection.api_versions, ListTransactionsRequest.API_KEY: (0, request.param)}

    monkeypatch.setattr(Connection, "_ask_versions", capped)
    version: int = request.param
    return version


# --- list -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_filters_give_the_same_result_with_and_without_broker_support(
    broker: DevCluster, scene: Scene, with_version: int
) -> None:
    pattern = f"{scene.prefix}\\..*"

    def listed(**filters: Any) -> list[str]:
        answer = admin.list(**filters)
        assert answer.complete
        return [found.transactional_id for found in answer if found.transactional_id.startswith(scene.prefix)]

    with TransactionAdmin(broker.bootstrap_servers, timeout=LIMIT) as admin:
        assert listed() == scene.names("open", "prepared", "committed", "aborted")
        assert listed(pattern=pattern, states=["ongoing"]) == scene.names("open", "prepared")
        assert listed(states=[TransactionStatus.COMPLETE_COMMIT, "CompleteAbort"]) == scene.names("committed", "aborted")
        assert listed(pattern=scene.name("open").replace(".", "[.]")) == scene.names("open")
        assert listed(pattern=scene.prefix) == []  # the whole id must match
        assert listed(pattern=f"(?={scene.prefix}).*open") == scene.names("open")  # no lookahead in the broker's dialect
        (found,) = [one for one in admin.list() if one.transactional_id == scene.name("open")]
        assert (found.state, found.coordinator) == ("Ongoing", 1)
        assert listed(producer_ids=[found.producer_id]) == scene.names("open")
        time.sleep(0.01)
        assert listed(running_longer_than=0) == scene.names("open", "prepared")
        assert listed(running_longer_than=0, states=["CompleteCommit"]) == []
        assert listed(running_longer_than=3600) == []


def test_a_broker_that_supports_filters_applies_them(
    broker: DevCluster, with_version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand ids are not sent to be thrown away."""
    sent = []
    real = listing._request

    def recorded(*arguments: Any, **options: Any) -> Any:
        sent.append(real(*arguments, **options))
        return sent[-1]

    monkeypatch.setattr(listing, "_request", recorded)
    with TransactionAdmin(broker.bootstrap_servers, timeout=LIMIT) as admin:
        admin.list(states=["ongoing"], producer_ids=[7], pattern="shop-.*", running_longer_than=90)
    (request,) = sent
    assert (list(request.state_filters), list(request.producer_id_filters)) == (["Ongoing"], [7])
    assert request.duration_filter == (90_000 if with_version >= 1 else -1)
    assert request.transactional_id_pattern == ("shop-.*" if with_version >= 2 else None)


@table(
    ("pattern", "is_sent"),
    [
        ("shop-.*", True),
        ("shop\\..*", True),
        ("(a|b)?[a-z0-9_.-]{1,3}(?:c+d*?)$", True),
        ("größe[^x]{2,}", True),
        ("\\w+", False),
        ("a\\d", False),
        ("[a\\s]", False),
        ("\\ba", False),
        ("a{,3}", False),
        ("(?i)a", False),
        ("(?=a)a", False),
        ("[[:alpha:]]", False),
    ],
)
@pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")
def test_a_pattern_is_sent_only_if_it_means_the_same_to_a_broker(pattern: str, is_sent: bool) -> None:
    assert Filter(pattern=re.compile(pattern)).requested_pattern == (pattern if is_sent else None)


def test_classes_of_a_pattern_are_those_of_python(
    broker: DevCluster, with_version: int, ongoing: Callable[..., Producer], new_name: NewName
) -> None:
    """They are ASCII in the broker's dialect."""
    prefix = new_name("id")
    name = f"{prefix}größe"
    ongoing(name, new_name("topic")).abort_transaction(LIMIT)
    with TransactionAdmin(broker.bootstrap_servers, timeout=LIMIT) as admin:
        for pattern in (f"{prefix}gr\\w{{2}}e", f"{prefix}g.{{,5}}"):
            assert [found.transactional_id for found in admin.list(pattern=pattern)] == [name]


def test_invalid_filters_are_refused(admin: TransactionAdmin) -> None:
    with pytest.raises(ConfigurationError, match="'Opened' is not a transaction state"):
        admin.list(states=["Opened"])
    with pytest.raises(ConfigurationError, match="not a regular expression"):
        admin.list(pattern="(")


# --- describe -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ids_are_described_in_their_order(admin: TransactionAdmin, scene: Scene, new_name: NewName) -> None:
    unknown = new_name("unknown")
    names = [scene.name("prepared"), unknown, scene.name("open"), scene.name("committed"), scene.name("open")]
    prepared, nobody, opened, committed, again = admin.describe(iter(names))
    assert (nobody.transactional_id, nobody.is_unknown, nobody.coordinator) == (unknown, True, 1)
    assert opened == again
    assert all(found.description is not None and found.coordinator == 1 for found in (prepared, opened, committed))
    assert prepared.description.status is opened.description.status is TransactionStatus.ONGOING
    assert (prepared.description.timeout_ms, opened.description.timeout_ms) == (NO_TIMEOUT_MS, 60_000)
    assert opened.description.partitions == {(scene.topic, 0)}
    assert committed.description.status is TransactionStatus.COMPLETE_COMMIT
    assert committed.description.partitions == frozenset()


@pytest.mark.slow
def test_more_ids_than_fit_into_a_request(admin: TransactionAdmin, scene: Scene) -> None:
    names = [f"{scene.prefix}.no{number}" for number in range(1_200)]
    names[600] = scene.name("open")
    found = list(admin.describe(names))
    assert [one.transactional_id for one in found] == names
    assert [one.transactional_id for one in found if not one.is_unknown] == [scene.name("open")]


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_ids(admin: TransactionAdmin, new_name: NewName) -> None:
    prefix = new_name("many")

    def peak(number: int) -> int:
        gc.collect()
        tracemalloc.start()
        try:
            for _ in admin.describe(f"{prefix}.{each}" for each in range(number)):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1_000)  # what is loaded and cached once
    few, many = peak(1_000), peak(4_000)
    assert many < few * 1.25 + 50_000, f"{few} bytes for 1,000 ids, {many} for 4,000"
