"""Recovery checks Kafka before it claims an id from its owner; `--dry-run` says what it would do, and changes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest

import dualwrite
from cli.conftest import NOBODY, Scene
from dualwrite import Timeouts
from dualwrite.errors import BrokerUnavailableError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator
from dualwrite.recovery.decision import Decision
from dualwrite.recovery.plan import REASONS
from dualwrite.recovery.recoverer import Recoverer, ids_with_lanes
from dualwrite.state import TransactionDescription
from dualwrite.stores.base import StateRow, TxnStateStore
from dualwrite.stores.registry import store_from_url
from fixtures.pace import LIMIT
from fixtures.tables import table


@pytest.fixture
def scene(recovery_scene: Scene) -> Scene:
    return recovery_scene


@pytest.fixture
def store(scene: Scene) -> Iterator[TxnStateStore]:
    with store_from_url(scene.url) as made:
        yield made


@pytest.fixture
def live_writer(scene: Scene) -> Iterator[dualwrite.DualWriter]:
    with dualwrite.connect(transactional_id=scene.new_name("live"), lanes=2) as writer:
        yield writer


@pytest.fixture
def coordinator(scene: Scene) -> Iterator[WireTransactionCoordinator]:
    with closing(WireTransactionCoordinator(KafkaConfig.of(scene.servers))) as made:
        yield made


class AtOneBroker:
    """A coordinator that is unreachable for one id; for the others it is the real one.

    None of the real test clusters has two coordinators of which one is down and stays down.
    """

    def __init__(self, real: WireTransactionCoordinator, away: str) -> None:
        self._real, self._away = real, away

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def describe(self, kafka_transactional_id: str, **limit: Any) -> TransactionDescription | None:
        if kafka_transactional_id.startswith(self._away):
            raise BrokerUnavailableError("No answer.", transactional_id=kafka_transactional_id)
        return self._real.describe(kafka_transactional_id, **limit)


def rows_of(store: TxnStateStore) -> list[StateRow]:
    return [row for row in map(store.read, ids_with_lanes(store)) if row is not None]


def described(store: TxnStateStore, coordinator: WireTransactionCoordinator) -> list[TransactionDescription | None]:
    return [
        coordinator.describe(row.kafka_id(generation)) for row in rows_of(store) for generation in row.unresolved_generations
    ]


# --- a look before any claim --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_recover_with_kafka_unreachable_does_not_claim_the_id_of_a_live_writer(
    scene: Scene, live_writer: dualwrite.DualWriter, store: TxnStateStore
) -> None:
    before = rows_of(store)
    report = dualwrite.recover(kafka=NOBODY, timeouts=Timeouts(kafka=0.5))
    assert len(report.failed) == len(before) == 2
    assert all(isinstance(one.error, BrokerUnavailableError) for one in report.failed)
    assert rows_of(store) == before
    for _ in range(2):  # on each lane
        with live_writer.transaction() as tx:
            tx.send(scene.new_name("topic"), b"still mine")


@table(
    ("command", "code"),
    [("recover", 1), ("recover --dry-run", 1), ("db move-cluster", 1), ("transactions complete --timeout 0.5", 2)],
)
def test_a_command_with_kafka_unreachable_claims_no_id(
    scene: Scene,
    live_writer: dualwrite.DualWriter,
    store: TxnStateStore,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
) -> None:
    monkeypatch.setenv("DUALWRITE_TIMEOUT_KAFKA", "0.5")
    before = rows_of(store)
    words = [*command.split(), *([live_writer.transactional_id] if "complete" in command else [])]
    found, out, err = scene.call(*words, "--kafka", NOBODY, "--yes")
    assert (found, "NOT RECOVERED" in out) == (code, command == "recover")
    assert NOBODY in err
    assert rows_of(store) == before


def test_an_unreachable_cluster_is_waited_for_once_not_for_each_id(
    live_writer: dualwrite.DualWriter, store: TxnStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    check = WireTransactionCoordinator.cluster_id
    monkeypatch.setattr(WireTransactionCoordinator, "cluster_id", lambda self, **k: asked.append(1) or check(self, **k))
    monkeypatch.setattr(WireTransactionCoordinator, "describe_all", lambda *_, **__: pytest.fail("no broker answered"))
    report = dualwrite.recover(kafka=NOBODY, timeouts=Timeouts(kafka=0.2))
    assert len(report.failed) == 2
    assert asked == [1]


def test_an_id_whose_coordinator_does_not_answer_is_skipped_and_the_others_are_recovered(
    live_writer: dualwrite.DualWriter, store: TxnStateStore, coordinator: WireTransactionCoordinator
) -> None:
    away, reachable = ids_with_lanes(store, [live_writer.transactional_id])[::-1]
    before = store.read(away)
    report = Recoverer(store, AtOneBroker(coordinator, away)).recover()
    assert store.read(away) == before
    assert [one.transactional_id for one in report.failed] == [away]
    assert [one.transactional_id for one in report] == [reachable]


def test_opening_checks_every_lane_in_kafka_before_it_claims_one(
    live_writer: dualwrite.DualWriter, store: TxnStateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = f"{live_writer.transactional_id}~1"
    describe_all = WireTransactionCoordinator.describe_all
    asked = []

    def at_one_broker(
        self: WireTransactionCoordinator, kafka_ids: Sequence[str], **options: Any
    ) -> dict[str, TransactionDescription | None]:
        asked.extend(kafka_id for kafka_id in kafka_ids if kafka_id.startswith(away))
        if asked:
            raise BrokerUnavailableError("No answer.", transactional_id=asked[0])
        return describe_all(self, kafka_ids, **options)

    before = rows_of(store)
    with monkeypatch.context() as patched:
        patched.setattr(WireTransactionCoordinator, "describe_all", at_one_broker)
        with pytest.raises(BrokerUnavailableError):
            dualwrite.connect(transactional_id=live_writer.transactional_id, lanes=1)
    assert rows_of(store) == before
    with live_writer.transaction():
        pass


# --- --dry-run ----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("point", "decision"), [("after_db_commit", Decision.COMMIT), ("after_prepare", Decision.ABORT)])
def test_a_dry_run_shows_what_recovery_would_do_and_changes_nothing(
    scene: Scene, store: TxnStateStore, coordinator: WireTransactionCoordinator, point: str, decision: Decision
) -> None:
    name = scene.crash(point).name
    rows, seen = rows_of(store), described(store, coordinator)
    plan = dualwrite.plan_recovery()
    assert [(found.transactional_id, found.decision) for found in plan] == [(name, decision)]
    assert [found.described for found in plan] == seen
    assert plan.ids[0].owner == rows[0].owner
    code, out, _ = scene.call("recover", "--dry-run")
    assert code == 0
    assert all(words in out for words in (name, decision.value, REASONS[decision]))
    (found,) = plan
    assert found.kafka_transactional_id not in out
    assert found.kafka_transactional_id in scene.call("recover", "--dry-run", "--wide")[1]
    assert out.endswith("Nothing was changed.\n")
    code, document = scene.document("recover", "--dry-run")
    (one,) = document["ids"]
    assert (code, document["version"], document["command"]) == (0, 1, "recover")
    assert [found["decision"] for found in one["generations"]] == [decision.value]
    assert (rows_of(store), described(store, coordinator)) == (rows, seen)
    outcome = {Decision.COMMIT: dualwrite.Outcome.COMMITTED, Decision.ABORT: dualwrite.Outcome.ABORTED}[decision]
    assert [found.outcome for found in dualwrite.recover()] == [outcome]
    assert list(dualwrite.plan_recovery()) == []


def test_a_dry_run_does_not_fence_a_live_writer(scene: Scene, live_writer: dualwrite.DualWriter, store: TxnStateStore) -> None:
    before = rows_of(store)
    code, out, _ = scene.call("recover", "--dry-run")
    assert (code, before[0].owner in out) == (0, True)
    assert rows_of(store) == before
    with live_writer.transaction() as tx:
        tx.send(scene.new_name("topic"), b"mine")
    assert "--acknowledge" in scene.ends(2, "recover", "--dry-run", "--acknowledge")


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--dry-run",)])
def test_an_unknown_id_is_reported_without_a_traceback(scene: Scene, more: tuple[str, ...]) -> None:
    """In its own process, where logging is not configured."""
    command = [sys.executable, "-W", "ignore", "-c", "import sys; from dualwrite.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*command, "recover", "--id", "nosuch", *more], timeout=LIMIT, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "There is no such transactional id" in done.stderr
    assert "Traceback" not in done.stderr


def test_every_decision_has_its_reason() -> None:
    assert set(REASONS) == set(Decision)
