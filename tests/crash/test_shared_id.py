"""Two databases whose services use one transactional id on one cluster; copies of a database, with the same id at Kafka."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

import dualwrite
from crash.cases import crash_writer
from crash.databases import DATABASES, Databases, copied_file
from crash.events import events_at
from crash.scene import Scene
from dualwrite import migration
from dualwrite.cli import db, status
from dualwrite.devcluster import DevCluster
from dualwrite.diagnosis import Severity, examine
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.native.native_producer import NativeProducer
from dualwrite.recovery.clusters import keep_store_id, new_store_id
from dualwrite.state import TransactionStatus
from dualwrite.testing.postgres import PostgresServer
from fixtures.mariadb_server import MariaDBServer
from fixtures.pace import LIMIT, until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_lane")]

CASES = [*(("native", database) for database in DATABASES), ("librdkafka", "sqlite")]
"""Producer and database; what a store saves is the same for both producers."""

native = pytest.mark.usefixtures("native")


# --- one id in two databases --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("producer", "database"), CASES, indirect=["producer"])
def test_opening_an_id_in_another_database_aborts_nothing(
    producer: str, database: str, databases: Databases, broker: DevCluster
) -> None:
    """For example staging and production: one id, one topic, one cluster."""
    production = databases.scene(database, broker)
    staging = replace(databases.scene("sqlite", broker), transactional_id=production.transactional_id)
    crash_writer(production, "after_db_commit")
    with staging.connect() as writer:
        assert [found.outcome.value for found in writer.recovery_report] == []
    assert production.recover()["outcomes"] == ["COMMITTED"]
    assert production.agree() == [1, 2]


@native
def test_status_shows_what_another_database_has_open_under_the_id(databases: Databases, broker: DevCluster) -> None:
    production = databases.scene("sqlite", broker)
    staging = replace(databases.scene("sqlite", broker), transactional_id=production.transactional_id)
    crash_writer(production, "after_db_commit")
    staging.write_here(1)
    row = production.row()
    asked = ["--url", staging.url, "--kafka", staging.bootstrap, "--prefix", staging.transactional_id]
    shown = CliRunner().invoke(status.app, asked)
    assert shown.exit_code == 0, shown.output
    assert f"from other databases: {row.kafka_id(row.generation)}." in shown.output
    assert production.recover()["outcomes"] == ["COMMITTED"]


@native
def test_two_databases_write_under_one_id(databases: Databases, broker: DevCluster) -> None:
    one = databases.scene("sqlite", broker)
    other = replace(databases.scene("sqlite", broker), transactional_id=one.transactional_id)
    for number in range(1, 6, 2):
        one.write_here(number)
        other.write_here(number + 1)
    assert one.messages() == sorted([*one.rows(), *other.rows()]) == [1, 2, 3, 4, 5, 6]


_TENANT = """
CREATE SCHEMA tenant;
CREATE FUNCTION go_to_tenant() RETURNS trigger LANGUAGE plpgsql
AS $$ BEGIN PERFORM set_config('search_path', 'tenant', true); RETURN NEW; END $$;
CREATE TRIGGER go_to_tenant BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION go_to_tenant()
"""


@native
def test_a_block_that_changes_search_path_does_not_change_where_its_state_is_recorded(
    broker: DevCluster, postgres_server: PostgresServer
) -> None:
    """A schema for each tenant, each with our tables, and with the id at the same fencing token."""
    scene = Scene(events_at(postgres_server.create_database(f"tenants_{uuid4().hex}")), broker.bootstrap_servers)
    scene.events.create()
    with scene.engine.begin() as connection:
        connection.exec_driver_sql(_TENANT)
    migration.upgrade(scene.url, schema="tenant")
    scene.connect(scene.url, schema="tenant").close()
    with dualwrite.SqlStateStore.from_url(scene.url, schema="tenant") as store:
        before = store.read(scene.transactional_id)
        crash_writer(scene, "after_db_commit")
        assert store.read(scene.transactional_id) == before
    assert scene.recover()["outcomes"] == ["COMMITTED"]
    assert scene.agree() == [1, 2]


@native
def test_the_longest_id_has_room_for_the_store_at_kafka(databases: Databases, broker: DevCluster) -> None:
    scene = replace(databases.scene("sqlite", broker), transactional_id="w" * 255)
    with scene.connect() as writer:
        with writer.transaction() as tx:
            tx.send("longest", "1")
        row = scene.row()
        assert len(row.kafka_id(row.generation)) > 255
    assert scene.recover()["error"] is None


# --- copies -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def original(databases: Databases, broker: DevCluster) -> Scene:
    """The database of a crashed writer, with a prepared transaction."""
    scene = databases.scene("sqlite", broker)
    crash_writer(scene, "after_db_commit")
    return scene


@native
def test_a_copied_file_is_refused_and_can_become_its_own_store(original: Scene, tmp_path: Path) -> None:
    copy = copied_file(original, tmp_path / "copy.db")
    before = copy.row()
    with pytest.raises(dualwrite.StoreCopiedError, match="new-store-id") as caught:
        copy.write_here(9)
    assert caught.value.store_id == before.store_id
    assert "StoreCopiedError" in copy.recover()["error"] or "copy" in copy.recover()["error"]
    assert copy.row() == before
    (finding,) = (f for f in examine(dualwrite.Settings(database_url=copy.url)).findings if "new-store-id" in str(f.change))
    assert finding.severity is Severity.BROKEN

    made = CliRunner().invoke(db.app, ["new-store-id", "--url", copy.url, "--yes"])
    assert made.exit_code == 0, made.output
    assert str(before.prepared_state) in made.output
    copy.write_here(9)
    assert copy.row().store_id != before.store_id
    assert original.recover()["outcomes"] == ["COMMITTED"]
    original.write_here(3)
    assert (original.rows(), copy.rows()) == ([1, 2, 3], [1, 2, 9])
    assert original.messages() == [1, 2, 3, 9]


@native
def test_a_renamed_file_is_used_with_a_warning(original: Scene, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A copy under the same path on another machine looks just like it."""
    with original.engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    original.engine.dispose()
    source, target = Path(str(original.engine.url.database)), tmp_path / "renamed.db"
    source.rename(target)
    renamed = replace(original, events=events_at(f"sqlite:///{target}"))
    assert renamed.recover()["outcomes"] == ["COMMITTED"]
    renamed.write_here(3)
    assert_it_asks_what_it_is(renamed, caplog)
    backup = tmp_path / "backup.db"
    copied_file(renamed, backup)
    restored = tmp_path / "restored.db"
    shutil.copy(backup, restored)  # beside the old one: a file system may use the number of a removed file again at once
    restored.replace(target)
    renamed.write_here(4)
    assert_it_asks_what_it_is(renamed, caplog)
    assert renamed.agree() == [1, 2, 3, 4]


def assert_it_asks_what_it_is(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Check that every opening and doctor report it, until `keep-store-id`."""
    for _ in range(2):
        caplog.clear()
        scene.connect(lanes=2).close()
        assert caplog.text.count("keep-store-id") == 1, caplog.text
        (finding,) = (f for f in examine(dualwrite.Settings(database_url=scene.url)).findings if "store-id" in str(f.change))
        assert (finding.severity, "may be a copy" in finding.what) == (Severity.WEAK, True)
    kept = CliRunner().invoke(db.app, ["keep-store-id", "--url", scene.url, "--yes"])
    assert kept.exit_code == 0, kept.output
    caplog.clear()
    scene.connect(lanes=2).close()
    assert "store-id" not in caplog.text
    assert not [f for f in examine(dualwrite.Settings(database_url=scene.url)).findings if "store-id" in str(f.change)]


@native
def test_a_file_moved_to_another_disk_can_be_declared_the_original(original: Scene, tmp_path: Path) -> None:
    moved = copied_file(original, tmp_path / "moved.db")
    kept = CliRunner().invoke(db.app, ["keep-store-id", "--url", moved.url, "--yes"])
    assert kept.exit_code == 0, kept.output
    assert moved.recover()["outcomes"] == ["COMMITTED"]
    moved.write_here(3)
    assert moved.agree() == [1, 2, 3]


@native
def test_a_database_made_from_a_template_is_a_copy(broker: DevCluster, postgres_server: PostgresServer) -> None:
    """Like a restored dump: another database on the server. A physical replica would count as the same database."""
    original = Scene(events_at(postgres_server.create_database(f"original_{uuid4().hex}")), broker.bootstrap_servers)
    original.events.create()
    crash_writer(original, "after_db_commit")
    original.engine.dispose()
    name = f"copied_{uuid4().hex}"
    admin = sa.create_engine(original.engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with admin.connect() as server:
        _ended_sessions(server, original.engine.url.database)
        server.exec_driver_sql(f"CREATE DATABASE {name} TEMPLATE {original.engine.url.database}")
    copy = replace(original, events=events_at(original.engine.url.set(database=name).render_as_string(hide_password=False)))
    with pytest.raises(dualwrite.StoreCopiedError):
        copy.write_here(9)
    with dualwrite.store_from_url(copy.url) as store:
        identity, (left,) = new_store_id(store, timeout=LIMIT)
        assert (left.transactional_id, identity) == (original.transactional_id, store.identity())
        assert left.prepared is not None
    copy.write_here(9)
    assert original.recover()["outcomes"] == ["COMMITTED"]
    assert original.messages() == [1, 2, 9]


def _ended_sessions(server: sa.Connection, database: str | None) -> None:
    query = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = :name")
    until(lambda: server.scalar(query, {"name": database}) == 0, "a session of the original is still there")


@native
def test_a_replica_that_takes_over_is_used_with_a_warning(
    broker: DevCluster, mariadb_server: MariaDBServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A replica of MariaDB or MySQL has its own identifier, so it can't be distinguished from a copy."""
    scene = Scene(events_at(mariadb_server.create_database(f"replica_{uuid4().hex}")), broker.bootstrap_servers)
    scene.events.create()
    crash_writer(scene, "after_db_commit")
    with dualwrite.store_from_url(scene.url) as store:
        identity = store.identity()
        assert identity is not None
        assert store.set_identity(replace(identity, marks=frozenset({"server another, schema here"})), expected=identity)
        assert any(mark.startswith("server ") for mark in store.marks())
        with caplog.at_level(logging.WARNING):
            assert scene.recover()["outcomes"] == ["COMMITTED"]
        assert "keep-store-id" in caplog.text
        keep_store_id(store)
        caplog.clear()
        scene.write_here(3)
        assert "keep-store-id" not in caplog.text
    assert scene.agree() == [1, 2, 3]


@native
def test_a_copied_folder_is_refused(databases: Databases, broker: DevCluster, tmp_path: Path) -> None:
    scene = databases.scene("rocksdb", broker)
    crash_writer(scene, "after_db_commit")
    shutil.copytree(scene.url.removeprefix("rocksdb:///"), tmp_path / "copy")
    copy = replace(scene, events=events_at(f"rocksdb:///{tmp_path / 'copy'}"))
    with pytest.raises(dualwrite.StoreCopiedError):
        copy.write_here(9)
    assert scene.recover()["outcomes"] == ["COMMITTED"]
    with dualwrite.store_from_url(copy.url) as store:
        _, (left,) = new_store_id(store, timeout=LIMIT)
        assert left.transactional_id == scene.transactional_id
    copy.write_here(9)
    assert (scene.rows(), copy.rows(), scene.messages()) == ([1, 2], [1, 2, 9], [1, 2, 9])


# --- another process has a transaction open at Kafka, or takes the id over ----------------------------------------------------


@pytest.fixture
def foreign(databases: Databases, broker: DevCluster) -> Iterator[Callable[[Scene, str], NativeProducer]]:
    """Begins a transaction on an id at Kafka, as the writer of a copy would."""
    made = []

    def begin(scene: Scene, kafka_id: str) -> NativeProducer:
        producer = NativeProducer(KafkaConfig.of(scene.bootstrap), kafka_id, two_phase=True)
        made.append(producer)
        producer.init_transactions(timeout=LIMIT)
        producer.begin_transaction()
        producer.send(f"foreign-{scene.topic}", "foreign")
        producer.prepare_transaction(timeout=LIMIT)
        return producer

    yield begin
    for producer in made:
        producer.close()


def test_transactions_found_open_during_a_takeover_are_reported_aborted(
    databases: Databases, broker: DevCluster, producer: str, foreign: Callable[[Scene, str], NativeProducer]
) -> None:
    scene = databases.scene("sqlite", broker)
    scene.write_here(1)
    row = scene.row()
    assert not row.unresolved_generations
    kafka_id = row.kafka_id(row.generation + (producer == "librdkafka"))  # which it is about to acquire
    foreign(scene, kafka_id)
    with scene.connect() as writer:
        assert [found.outcome.value for found in writer.recovery_report] == ["ABORTED"]
        with scene.coordinator() as coordinator:
            described = coordinator.describe(kafka_id)
            assert described is not None
            assert described.status is not TransactionStatus.ONGOING
    scene.write_here(2)
    assert scene.agree() == [1, 2]


def test_a_writer_fenced_in_kafka_while_its_claim_holds_reports_a_possible_copy(
    databases: Databases, broker: DevCluster, producer: str, foreign: Callable[[Scene, str], NativeProducer]
) -> None:
    scene = databases.scene("sqlite", broker)
    with scene.connect() as writer:
        row = scene.row()
        foreign(scene, row.kafka_id(row.generation))
        with pytest.raises(dualwrite.ProducerFencedError, match=r"(?s)copy of the database.*new-store-id"):
            scene.event(writer, 1)
        scene.event(writer, 2)
    assert scene.agree() == [2]
