"""`dualwrite metrics` on a real broker and SQLite: what it shows of a crash, and of a side that does not answer."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

import dualwrite
from cli.conftest import Scene
from dualwrite import JournalLimits
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction, Resolution
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.registry import store_from_url
from dualwrite.stores.sql.tables import dead_letter_table
from fixtures.pace import LIMIT, until

ROOT = Path(__file__).parents[2]
LOST = LostTransaction(LostKind.LOST, PreparedTxnState(7, 5, 1000), 0, datetime(2026, 1, 1, tzinfo=UTC))


@pytest.fixture
def scene(recovery_scene: Scene) -> Scene:
    return recovery_scene


def values(text: str) -> dict[str, float]:
    """The samples, by name with labels, without the prefix of the names."""
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("dualwrite_"): float(value) for name, _, value in lines}


def once(scene: Scene, *arguments: str, code: int = 0) -> dict[str, float]:
    """What `dualwrite metrics --once` prints."""
    found, out, err = scene.call("metrics", "--once", *arguments)
    assert found == code, err
    return values(out)


def test_a_transaction_that_the_database_has_committed_is_shown_with_its_decision(scene: Scene) -> None:
    crashed = scene.crash("after_db_commit", "shop.1")
    scene.crash("after_record", "shop.2")
    found = once(scene, "--limit", str(LIMIT))
    assert found['up{side="database"}'] == found['up{side="kafka"}'] == 1
    assert found['ids{prefix="shop",state="open"}'] == 2
    assert found['open_transactions{decision="commit",prefix="shop"}'] == 1
    assert found['open_transactions{decision="abort",prefix="shop"}'] == 1
    assert found['open_transaction_seconds{decision="commit",prefix="shop"}'] > 0
    assert found['kafka_active_transactions{state="Ongoing"}'] >= 2
    assert found["kafka_active_transaction_open_time_max_seconds"] > 0
    assert found["kafka_stuck_seconds"] > 0
    assert found["kafka_partitions_with_late_transactions"] == 0
    assert once(scene, "--limit", str(LIMIT), "--late", "0")["kafka_partitions_with_late_transactions"] >= 1
    dualwrite.recover(ids=["shop.1", "shop.2"]).raise_for_problems()
    with store_from_url(scene.url) as store:
        assert store.positions is not None
        store.positions.reset("billing", [Move(None, Position(crashed.topic, 0, 0))])
    found = once(scene, "--limit", str(LIMIT))
    of_partition = f'{{group="billing",partition="0",topic="{crashed.topic}"}}'
    assert found[f"group_behind_messages{of_partition}"] >= 1
    assert found[f"group_held_back_messages{of_partition}"] == 0
    assert found[f"group_position_age_seconds{of_partition}"] >= 0
    assert found['ids{prefix="shop",state="idle"}'] == 2
    assert not [name for name in found if name.startswith("open_transactions")]


def test_what_waits_for_somebody_is_shown_without_kafka(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
    with store_from_url(scene.url) as store:
        claim = store.claim("shop.1", "test", timeout=LIMIT)
        store.record_resolution(claim, Resolution(lost=LOST, resolved_generation=0))
        assert store.leases is not None
        store.leases.acquire(["shop.2"], "somebody", seconds=LIMIT)
        assert store.journal is not None
        store.journal.prepare("shop")
        store.journal.open("shop", "somebody", JournalLimits())
    with sa.create_engine(scene.url).begin() as connection:
        row = {"source_table": "outbox", "source_id": "1", "error_kind": "E", "error": "", "attempts": 1, "source_row": "{}"}
        connection.execute(sa.insert(dead_letter_table), {"relay": "relay.outbox", "failed_at": datetime.now(UTC), **row})
    found = once(scene, "--limit", str(LIMIT))
    assert found['lost_transactions{kind="lost",prefix="shop"}'] == 1
    assert found['to_do{need="publish"}'] == 1
    assert found['to_do{need="recover"}'] == 0
    assert found['ids{prefix="shop",state="leased"}'] == 1
    assert found['journal_gate_open{prefix="shop"}'] == 1
    names = ("gate_kept_open", "entries", "entries_bytes", "entries_age_seconds", "later_entries")
    assert [found[f'journal_{name}{{prefix="shop"}}'] for name in names] == [0] * 5
    assert found['journal_limit_used_ratio{limit="size",prefix="shop"}'] == 0
    assert found['stored_dead_letters{relay="relay.outbox"}'] == 1
    assert 'up{side="kafka"}' not in found
    assert not [name for name in found if name.startswith("kafka_")]


def test_a_side_that_does_not_answer_is_down_and_the_scrape_is_answered(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del capsys
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, and never answers
        monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", f"127.0.0.1:{silent.getsockname()[1]}")
        code, out, err = scene.call("metrics", "--once", "--limit", "1")
    found = values(out)
    assert code == 1
    assert "kafka" in err.lower()
    assert (found['up{side="database"}'], found['up{side="kafka"}']) == (1, 0)
    assert found['to_do{need="recover"}'] == 0
    assert not [name for name in found if name.startswith(("kafka_", "open_transactions"))]


@pytest.mark.slow
def test_it_serves_until_sigterm(scene: Scene) -> None:
    del scene
    command = [sys.executable, "-m", "dualwrite", "metrics", "--listen", "127.0.0.1:0", "--limit", str(LIMIT)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = until(process.stderr.readline)
            address = re.fullmatch(r"Serving (http://127\.0\.0\.1:\d+/metrics)\n", line)
            assert address is not None, line
            with urllib.request.urlopen(address[1], timeout=LIMIT) as answer:
                assert 'dualwrite_up{side="kafka"} 1.0' in answer.read().decode()
        finally:
            process.terminate()
        assert process.wait(LIMIT) == 0


def test_without_any_side_it_refuses(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS")
    monkeypatch.delenv("DUALWRITE_DATABASE_URL")
    assert "Neither a database nor Kafka is given" in scene.ends(2, "metrics", "--once")


@pytest.mark.parametrize("listen", ["9464", "127.0.0.1:", "127.0.0.1:x", "127.0.0.1:99999"])
def test_an_address_needs_host_and_port(scene: Scene, listen: str) -> None:
    assert "HOST:PORT" in scene.ends(2, "metrics", "--listen", listen)
