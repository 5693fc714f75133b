"""`dualwrite doctor` on real brokers and databases."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from kafka.protocol.producer import InitProducerIdRequest
from sqlalchemy import make_url

from dualwrite import migration
from dualwrite.devcluster import DevCluster
from dualwrite.diagnosis import examination
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.rights import BASIC
from dualwrite.testing.postgres import PostgresServer
from fixtures.broker import make_topic
from fixtures.capabilities import EVERYTHING
from fixtures.command import output_of
from fixtures.database import mariadb_with
from fixtures.mysql_server import MYSQLD
from fixtures.pace import until
from fixtures.tables import table
from fixtures.wire_server import WireServer

NewName = Callable[[str], str]


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS", "TRANSACTIONAL_ID", "PRODUCER"):
        monkeypatch.delenv(f"DUALWRITE_{name}", raising=False)


Examined = Callable[..., tuple[int, str, str]]


@pytest.fixture
def examined(capsys: pytest.CaptureFixture[str]) -> Examined:
    """Runs the command; returns exit code, stdout and stderr."""
    return partial(output_of, capsys, "doctor")


def as_json(examined: Examined, *arguments: str) -> tuple[int, Any]:
    code, out, _ = examined(*arguments, "--json")
    return code, json.loads(out)


@contextmanager
def altered(url: str, statements: Iterable[str], back: Iterable[str] = ()) -> Iterator[None]:
    """A PostgreSQL database after these statements; at the end, after others."""
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)
        try:
            yield
        finally:
            for statement in back:
                connection.execute(statement)


def found(report: Any, about: str) -> list[tuple[str, str]]:
    return [(one["severity"], one["what"]) for one in report["findings"] if one["about"] == about]


def test_findings_of_a_cluster_and_a_database(examined: Examined, broker: DevCluster, database_url: str) -> None:
    code, out, err = examined("--kafka", broker.bootstrap_servers, "--url", database_url)
    assert (code, err) == (0, "")
    assert f"Kafka at {broker.bootstrap_servers}" in out
    lines = [line.split() for line in out.splitlines()]
    assert ["two-phase", "commit", "yes"] in lines
    assert ["transaction.max.timeout.ms", "900000"] in lines
    assert ["table", "revision", migration.newest(), "(newest:", f"{migration.newest()})"] in lines
    assert "Nothing is lost." in out
    assert "BROKEN" not in out
    assert "\x1b" not in out  # no colours without a terminal


def test_settings_from_the_environment(
    examined: Examined, broker: DevCluster, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_DATABASE_URL", sqlite_url)
    monkeypatch.setenv("DUALWRITE_KAFKA_BOOTSTRAP_SERVERS", broker.bootstrap_servers)
    code, report = as_json(examined)
    assert (code, report["version"], report["command"], report["broken"]) == (0, 1, "doctor", False)
    assert report["kafka"]["native"] is report["kafka"]["two_phase"] is True
    assert report["guarantee"]["guarantee"] == "two_phase"
    assert report["database"]["settings"] == {"synchronous": "full", "journal_mode": "wal"}


def test_the_cluster_or_the_database_alone_is_examined(examined: Examined, broker: DevCluster, sqlite_url: str) -> None:
    code, report = as_json(examined, "--kafka", broker.bootstrap_servers)
    assert (code, report["database"]) == (0, None)
    code, report = as_json(examined, "--url", sqlite_url)
    assert (code, report["kafka"], report["guarantee"], report["topics"]) == (0, None, None, [])
    assert examined("--url", sqlite_url)[1].endswith("No problems found.\n")
    code, _, err = examined()
    assert (code, "--kafka" in err, "--url" in err) == (2, True, True)


@pytest.mark.soak
def test_an_older_feature_level_is_reported_with_the_command_that_raises_it(examined: Examined, broker_v4: DevCluster) -> None:
    code, out, _ = examined("--kafka", broker_v4.bootstrap_servers)
    out = " ".join(out.split())
    assert code == 0
    assert "bounded by transaction.timeout.ms, here 15 min (producer 'librdkafka')" in out
    assert "kafka-features.sh upgrade --feature transaction.version=2" in out


def test_the_configured_producer_is_examined(examined: Examined, broker: DevCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALWRITE_PRODUCER", "librdkafka")
    code, report = as_json(examined, "--kafka", broker.bootstrap_servers, "--kafka-config", "transaction.timeout.ms=300000")
    assert (code, report["guarantee"]["guarantee"], report["guarantee"]["budget_ms"]) == (0, "bounded", 300_000)


def test_topics_are_examined(examined: Examined, broker: DevCluster, new_name: NewName) -> None:
    name, missing = new_name("topic"), new_name("missing")
    make_topic(broker, name, max_message_bytes="2000", unclean_leader_election_enable="true")
    arguments = ("--kafka", broker.bootstrap_servers, "--topic", name, "--topic", missing)
    code, report = as_json(examined, *arguments)
    assert code == 0
    assert [topic["name"] for topic in report["topics"]] == ["__transaction_state", name, missing]
    assert {severity for severity, _ in found(report, f"topic {name}")} == {"weak", "note"}
    told = " ".join(what for _, what in found(report, f"topic {name}"))
    for words in ("one replica", "unclean.leader.election.enable", "max.message.bytes is 2000"):
        assert words in told
    assert [severity for severity, _ in found(report, f"topic {missing}")] == ["weak"]  # this broker creates topics
    out = examined(*arguments)[1]
    assert f"WEAK    topic {name}" in out
    assert "Change: unclean.leader.election.enable=false" in out


def test_how_long_the_records_of_a_topic_last_is_shown(
    examined: Examined, broker: DevCluster, new_name: NewName, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = new_name("topic")
    make_topic(broker, name, retention_ms="7200000", cleanup_policy="compact,delete")
    arguments = ("--kafka", broker.bootstrap_servers, "--topic", name)
    told = [what for _, what in found(as_json(examined, *arguments)[1], f"topic {name}")]
    assert not any("records last" in what for what in told)  # with two-phase commit, Kafka aborts nothing
    monkeypatch.setenv("DUALWRITE_TWO_PHASE", "false")
    report = as_json(examined, *arguments)[1]
    told = [what for severity, what in found(report, f"topic {name}") if severity == "weak"]
    assert any(what.startswith("Its records last 2 h: later,") for what in told)
    assert any(what.startswith("It is compacted: the cleaner removes") for what in told)
    assert report["topics"][1]["retention"]["retention_ms"] == 7_200_000
    out = examined(*arguments)[1]
    assert "records last" in " ".join(out.split())
    assert "retention.ms=604800000" in out


def test_a_missing_topic_is_broken_if_the_broker_does_not_create_topics(
    examined: Examined, strict_broker: DevCluster, new_name: NewName
) -> None:
    missing = new_name("missing")
    code, out, _ = examined("--kafka", strict_broker.bootstrap_servers, "--topic", missing)
    assert (code, f"BROKEN  topic {missing}" in out) == (1, True)


@pytest.mark.slow
def test_the_database_is_examined_while_the_cluster_is_unreachable(examined: Examined, sqlite_url: str) -> None:
    arguments = ("--kafka", "127.0.0.1:1", "--url", sqlite_url, "--timeout", "0.5")
    code, report = as_json(examined, *arguments)
    assert (code, report["kafka"], report["database"]["revision"]) == (1, None, migration.newest())
    ((severity, what),) = found(report, "kafka")
    assert (severity, "127.0.0.1:1" in what) == ("broken", True)
    assert "BROKEN  kafka" in examined(*arguments)[1]


def test_the_cluster_is_examined_while_the_database_is_unreachable(examined: Examined, broker: DevCluster) -> None:
    url = "postgresql://nobody:secret@127.0.0.1:1/nothing"
    code, report = as_json(examined, "--kafka", broker.bootstrap_servers, "--url", url)
    assert (code, report["kafka"]["brokers"]) == (1, 1)
    ((severity, what),) = found(report, "database")
    assert (severity, "127.0.0.1:1" in what, "secret" in json.dumps(report)) == ("broken", True, False)


def test_a_missing_table_is_reported_with_the_command_that_creates_it(examined: Examined, tmp_path: Path) -> None:
    code, out, _ = examined("--url", f"sqlite:///{tmp_path}/empty.db")
    assert (code, "BROKEN  database" in out, "dualwrite db upgrade --url" in out) == (1, True, True)


def test_a_database_that_may_lose_commits_is_reported(examined: Examined, postgres_url: str) -> None:
    name = postgres_url.rpartition("/")[2]
    with altered(postgres_url, [f"ALTER DATABASE {name} SET synchronous_commit = off"], [f"ALTER DATABASE {name} RESET ALL"]):
        code, report = as_json(examined, "--url", postgres_url)
    ((severity, what),) = found(report, "database")
    assert (code, severity, "synchronous_commit is off" in what) == (0, "weak", True)
    with altered(postgres_url, ["ALTER TABLE kafka_transaction_state SET UNLOGGED"]):
        code, report = as_json(examined, "--url", postgres_url)
    (severity, what), (other, _) = found(report, "database")
    assert (code, severity, "UNLOGGED" in what, other) == (1, "broken", True, "note")


def test_an_attached_standby_is_seen(examined: Examined, own_postgres_server: PostgresServer) -> None:
    """Also that none of the synchronous ones is there: then every COMMIT hangs."""
    url = own_postgres_server.url
    migration.upgrade(url)
    plain = url.replace("+psycopg", "")
    assert "None is attached at present" in found(as_json(examined, "--url", url)[1], "database")[0][1]
    with psycopg.connect(plain, autocommit=True, replication="true"):
        ((severity, what),) = found(as_json(examined, "--url", url)[1], "database")
        assert (severity, "an attached standby (1)" in what) == ("weak", True)
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = 'FIRST 1 (a, b)'")
            connection.execute("SELECT pg_reload_conf()")
        until(lambda: as_json(examined, "--url", url)[0] == 1, "the setting is in effect")
        (severity, what), *_ = found(as_json(examined, "--url", url)[1], "database")
        assert (severity, "0 of them are attached: every COMMIT hangs" in what) == ("broken", True)


@pytest.mark.soak
def test_a_mariadb_that_may_lose_commits_is_reported(examined: Examined) -> None:
    settings = {"log-bin": "binlog", "server-id": "1", "innodb-flush-log-at-trx-commit": "2", "innodb-doublewrite": "OFF"}
    semi_sync = {"sync-binlog": "0"} | ({"rpl-semi-sync-master-enabled": "ON"} if MYSQLD is None else {})  # MySQL: a plugin
    with mariadb_with(settings | semi_sync) as server:
        migration.upgrade(server.url)
        code, report = as_json(examined, "--url", server.url)
    assert code == 0
    told = found(report, "database")
    assert {severity for severity, _ in told} == ({"weak"} if MYSQLD is None else {"weak", "note"})  # no plugin: a note
    of_semi_sync = ("within 10 s (rpl_semi_sync_master_timeout)", "rpl_semi_sync_master_wait_point is AFTER_COMMIT")
    for words in (
        "innodb_flush_log_at_trx_commit is 2",
        "innodb_doublewrite is off",
        "sync_binlog is 0",
        *(of_semi_sync if MYSQLD is None else ()),
    ):
        assert any(words in what for _, what in told), words


def test_a_database_that_hides_its_identifier_is_reported(examined: Examined, postgres_url: str) -> None:
    blind = [
        "REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC",
        "CREATE ROLE blind LOGIN",
        "GRANT SELECT ON ALL TABLES IN SCHEMA public TO blind",
    ]
    back = ["DROP OWNED BY blind", "DROP ROLE blind", "GRANT EXECUTE ON FUNCTION pg_control_system() TO PUBLIC"]
    with altered(postgres_url, blind, back):
        code, report = as_json(examined, "--url", make_url(postgres_url).set(username="blind").render_as_string())
    (told,) = [what for _, what in found(report, "database") if "could not be recognised" in what]
    assert (code, "pg_control_system" in told) == (0, True)


def test_what_the_role_may_not_do_is_broken_only_where_it_is_used(examined: Examined, postgres_url: str) -> None:
    granted = migration.grants(postgres_url, "clerk", BASIC)
    with altered(postgres_url, ["CREATE ROLE clerk LOGIN", *granted], ["DROP OWNED BY clerk", "DROP ROLE clerk"]):
        url = make_url(postgres_url).set(username="clerk").render_as_string()
        code, report = as_json(examined, "--url", url)
        (told,) = [each for each in found(report, "database") if "lacks privileges for" in each[1]]
        assert (code, told[0]) == (0, "note")
        assert all(use in told[1] for use in ("journal", "processor", "relay", "jobs"))
        with altered(postgres_url, ["REVOKE INSERT, UPDATE ON kafka_transaction_state FROM clerk"], []):
            code, report = as_json(examined, "--url", url)
        (told,) = [each for each in found(report, "database") if "can't open a writer" in each[1]]
        assert (code, told[0], "INSERT, UPDATE on public.kafka_transaction_state" in told[1]) == (1, "broken", True)
        with SqlStateStore.from_url(postgres_url) as store:
            store.journal.prepare("shop")
        with altered(postgres_url, [*granted, "GRANT SELECT ON dualwrite_journal_gate TO clerk"], []):
            code, report = as_json(examined, "--url", url)
        (told,) = found(report, "journal")
        assert (code, told[0], "can't use the journal of shop: it needs" in told[1]) == (1, "broken", True)


@table(
    ("arguments", "code", "words"),
    [
        (("--kafka-config", "nonsense"), 2, "key=value"),
        (("--kafka-config", "security.protocol=TLS"), 1, "security.protocol"),
        (("--kafka-config", "message.max.bytes=many"), 1, "message.max.bytes"),
        (("--id", "orders#1"), 1, "'#'"),
    ],
)
def test_an_invalid_setting_is_refused(examined: Examined, arguments: tuple[str, str], code: int, words: str) -> None:
    done, _, err = examined("--kafka", "127.0.0.1:1", *arguments)
    assert (done, words in err) == (code, True)


def test_a_broker_with_keep_prepared_txn_is_probed_with_the_id_of_the_user(examined: Examined) -> None:
    with WireServer() as server:
        code, report = as_json(examined, "--kafka", server.bootstrap_servers, "--id", "orders")
        probed, registered = server.received(InitProducerIdRequest)
    assert (code, report["topics"], probed.transactional_id) == (0, [], "orders#probe")
    assert (registered.transactional_id, registered.keep_prepared_txn) == ("orders#probe", False)
    assert (report["kafka"]["keep_prepared_txn"], report["guarantee"]["guarantee"]) == (True, "two_phase")


def test_brokers_without_two_phase_commit_are_reported(
    examined: Examined, broker: DevCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guarantee is probed on one broker."""
    monkeypatch.setattr(examination, "probe", lambda *_, **__: replace(EVERYTHING, brokers=3))
    monkeypatch.setattr(examination, "two_phase_by_broker", lambda *_, **__: {1: True, 2: False, 3: True})
    code, report = as_json(examined, "--kafka", broker.bootstrap_servers)
    assert code == 0
    assert any(severity == "weak" and "off on broker 2" in what for severity, what in found(report, "kafka"))
