"""A database that has gone back to before transactions that it had committed: who sees it, what is reported, what goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
import sqlalchemy as sa

import dualwrite
from crash.databases import Databases
from crash.events import SqlEvents
from crash.scene import Scene
from dualwrite.cli import main
from dualwrite.deadline import Deadline
from dualwrite.devcluster import DevCluster
from dualwrite.errors import CommittedTransactionsForgottenError, FencedError
from dualwrite.observability import TransactionsForgotten, add_observer, remove_observer
from dualwrite.recipe.ownership import Ownership
from dualwrite.recovery.report import Outcome
from dualwrite.stores.base import LostKind, LostTransaction
from dualwrite.stores.key_value_store import KeyValueStore
from dualwrite.stores.sql.tables import state_table
from dualwrite.testing import failpoints
from dualwrite.testing.postgres import PostgresServer, find_binaries
from dualwrite.testing.server_process import as_account
from dualwrite.testing.topics import read_committed
from fixtures.pace import limit, until
from fixtures.tiers import thinned
from pool.pool_scene import both, both_producers, open_pool

every_database = pytest.mark.parametrize(
    "database", thinned(["postgresql", "mariadb", "sqlite"], kept=["postgresql", "mariadb"], quick=["postgresql"])
)
NATIVE = pytest.mark.usefixtures("native")


@pytest.fixture
def scene(databases: Databases, broker: DevCluster, database: str, monkeypatch: pytest.MonkeyPatch) -> Scene:
    monkeypatch.setenv("DUALWRITE_LANES", "1")
    return databases.scene(database, broker)


EVENTS: Final = sa.table("events", sa.column("writer"), sa.column("number"))


class Past:
    """The rows of a scene's ids, and its events, as they are now: `restore` brings them back, as a failover may do."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._ids = state_table.c.transactional_id.startswith(scene.transactional_id)
        self._numbers = scene.rows()
        with scene.engine.connect() as connection:
            self._rows = [dict(row._mapping) for row in connection.execute(state_table.select().where(self._ids))]

    def restore(self) -> None:
        with self._scene.engine.begin() as connection:
            connection.execute(state_table.delete().where(self._ids))
            if self._rows:
                connection.execute(state_table.insert(), self._rows)
            later = EVENTS.c.number.not_in(self._numbers)
            connection.execute(EVENTS.delete().where(EVENTS.c.writer == self._scene.transactional_id, later))


@contextmanager
def observed() -> Iterator[list[TransactionsForgotten]]:
    seen: list[TransactionsForgotten] = []

    def note(event: object) -> None:
        if isinstance(event, TransactionsForgotten):
            seen.append(event)

    add_observer(note)
    try:
        yield seen
    finally:
        remove_observer(note)


def listed(scene: Scene) -> list[LostTransaction]:
    """What the rows of the scene's ids list, which must be forgotten transactions."""
    with dualwrite.store_from_url(scene.url) as store:
        rows = [store.read(name) for name in store.list(scene.transactional_id)]
    entries = [entry for row in rows if row is not None for entry in row.lost]
    assert all(entry.kind is LostKind.FORGOTTEN for entry in entries), entries
    return entries


def without_rows(scene: Scene) -> set[tuple[int, int]]:
    """Where the messages are whose rows are missing: partition and offset."""
    rows = scene.rows()
    found = read_committed(scene.settings, scene.topic)
    return {(one.partition, one.offset) for one in found if int(one.value or b"-1") not in rows}


def named(entries: list[LostTransaction]) -> set[tuple[int, int]]:
    """The places of the first message of each transaction: each has one message."""
    places = [place for entry in entries if entry.delivery is not None for place in entry.delivery.places]
    return {(place.partition, place.first_offset or 0) for place in places}


@both_producers
@every_database
def test_a_living_writer_reports_what_the_database_has_forgotten(
    scene: Scene, caplog: pytest.LogCaptureFixture, producer: str
) -> None:
    with observed() as events, scene.connect() as writer:
        scene.event(writer, 1)
        past = Past(scene)
        scene.event(writer, 2, 3)
        past.restore()
        with pytest.raises(CommittedTransactionsForgottenError) as raised:
            scene.event(writer, 4)
        assert raised.value.retriable
        assert raised.value.transactions == 2
        scene.event(writer, 5, 6)  # it goes on, and says nothing again
    assert scene.rows() == [1, 5, 6]
    assert scene.messages() == [1, 2, 3, 5, 6]
    (entry,) = listed(scene)
    assert named([entry]) == without_rows(scene)
    assert (entry.transactions, len(events), events[0].transactions, events[0].messages) == (2, 1, 2, 2)
    assert sum("transactions that it had committed" in each.message for each in caplog.records) == 1
    with scene.connect() as writer:  # the service starts again
        scene.event(writer, 7)
        assert scene.row().lost == (entry,)


@both_producers
def test_a_pool_reports_it_and_goes_on(scene: Scene, producer: str) -> None:
    with observed() as events, open_pool(scene, size=1) as pool:
        pool.run(both, scene, 1)
        past = Past(scene)
        for number in (2, 3, 4):
            pool.run(both, scene, number)
        past.restore()
        with pytest.raises(CommittedTransactionsForgottenError):
            pool.run(both, scene, 5)
        assert pool.run(both, scene, 6) == 6
    assert named(listed(scene)) == without_rows(scene)
    assert sum(each.transactions for each in events) == 3


@NATIVE
def test_status_doctor_and_the_metrics_show_it_until_it_is_acknowledged(
    scene: Scene, capsys: pytest.CaptureFixture[str]
) -> None:
    with scene.connect() as writer:
        scene.event(writer, 1)
        past = Past(scene)
        scene.event(writer, 2)
    past.restore()
    scene.recover()
    where = ["--url", scene.url, "--kafka", scene.bootstrap]
    ours = [*where, "--prefix", scene.transactional_id]

    def shown(*command: str) -> tuple[int, str]:
        code = main([*command])
        captured = capsys.readouterr()
        return code, " ".join((captured.out + captured.err).split())

    code, text = shown("status", *ours)
    assert (code, "the database has forgotten" in text, "--acknowledge" in text) == (3, True, True)
    code, text = shown("status", "--json", *ours)
    (entry,) = json.loads(text)["ids"][0]["lost"]
    assert (entry["kind"], entry["transactions"], entry["delivery"]["messages"]) == ("FORGOTTEN", 1, 1)
    assert "has forgotten committed transactions of" in shown("doctor", *where)[1]
    text = shown("metrics", "--once", *where)[1]
    assert f'dualwrite_lost_transactions{{kind="forgotten",prefix="{scene.transactional_id}"}} 1' in text
    assert shown("recover", "--id", scene.transactional_id, "--acknowledge", "--yes", *where)[0] == 0
    assert shown("status", *ours)[0] == 0


@both_producers
def test_recovery_and_a_new_writer_see_it_at_kafka(scene: Scene, producer: str) -> None:
    """The writers were stopped, as the page about failovers says."""
    with scene.connect() as writer:
        scene.event(writer, 1)
        past = Past(scene)
        scene.event(writer, 2, 8)
    past.restore()
    assert scene.recover()["outcomes"] == [Outcome.FORGOTTEN.value]
    (entry,) = listed(scene)
    assert named([entry]) == without_rows(scene)
    assert entry.transactions == 2
    with scene.connect() as writer:
        scene.event(writer, 3)
    assert listed(scene) == [entry]
    assert (scene.rows(), scene.messages()) == ([1, 3], [1, 2, 3, 8])


@NATIVE
def test_an_idle_writer_sees_it(scene: Scene) -> None:
    with observed() as events, scene.connect() as writer:
        scene.event(writer, 1)
        past = Past(scene)
        scene.event(writer, 2)
        past.restore()
        _is_idle(scene, writer)
        assert [each.transactions for each in events] == [1]
        with pytest.raises(CommittedTransactionsForgottenError):
            scene.event(writer, 3)
        scene.event(writer, 4)
    assert (named(listed(scene)), scene.rows()) == (without_rows(scene), [1, 4])


@both_producers
@pytest.mark.parametrize(("lanes", "before"), [(1, False), (2, True)])
def test_a_writer_that_is_closed_reports_it(scene: Scene, producer: str, lanes: int, before: bool) -> None:
    """Also if its last transaction was on the other lane, whose row is not behind."""
    with observed() as events, scene.connect(lanes=lanes) as writer:
        scene.event(writer, *(1, 2) * before)
        past = Past(scene)
        scene.event(writer, 3)
        past.restore()
        if lanes == 2:
            scene.event(writer, 4)
    assert [each.transactions for each in events] == [1]
    (entry,) = listed(scene)
    assert named([entry]) == without_rows(scene)
    assert scene.recover()["error"] is None
    assert listed(scene) == [entry]


@NATIVE
def test_a_writer_that_is_closed_leaves_the_evidence(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't read the row any more."""

    def fail(ownership: Ownership) -> None:
        raise dualwrite.StoreUnavailableError("simulated", transactional_id=ownership.transactional_id)

    with scene.connect() as writer:
        scene.event(writer, 1)
        past = Past(scene)
        scene.event(writer, 2)
        past.restore()
        monkeypatch.setattr(Ownership, "note_forgotten", fail)
    assert scene.recover()["outcomes"] == [Outcome.FORGOTTEN.value]


@NATIVE
@pytest.mark.parametrize("is_in_doubt", [False, True])
def test_a_writer_whose_claim_is_forgotten_reports_it_when_it_is_closed(scene: Scene, is_in_doubt: bool) -> None:
    scene.write_here(1)
    past = Past(scene)

    def fail() -> None:
        raise dualwrite.BrokerUnavailableError("simulated", transactional_id=scene.transactional_id)

    with observed() as events, scene.connect() as writer:
        scene.event(writer, 2)
        with ExitStack() as stack:
            if is_in_doubt:
                stack.enter_context(pytest.raises(dualwrite.InDoubtTransactionError))
                stack.enter_context(failpoints.armed("before_kafka_commit", fail))
                stack.enter_context(failpoints.armed("recover_after_claim", fail))
            scene.event(writer, 3)
        past.restore()
    assert len(events) == 1
    scene.write_here(4)  # its writer aborts what is open: the event in doubt, which was named as well
    assert named(listed(scene)) >= without_rows(scene) > set()


@NATIVE
def test_a_writer_whose_claim_is_forgotten_is_fenced_and_reports_what_it_knows(scene: Scene) -> None:
    scene.write_here(1)
    past = Past(scene)
    with observed() as events, scene.connect() as writer:
        scene.event(writer, 2, 3)
        past.restore()
        with pytest.raises(FencedError, match="has forgotten our claim"):
            scene.event(writer, 4)
        writer.reopen()
        with pytest.raises(CommittedTransactionsForgottenError):
            scene.event(writer, 5)
        scene.event(writer, 5)
    assert sum(each.transactions for each in events) == 2
    assert named(listed(scene)) == without_rows(scene)
    assert scene.rows() == [1, 5]


@both_producers
def test_what_is_forgotten_before_kafka_confirmed_it_is_not_called_rolled_back(scene: Scene, producer: str) -> None:
    """Kafka commits it, and the answer is lost."""
    with observed() as events, scene.connect() as writer:
        scene.event(writer, 1)
        past = Past(scene)

        def commit_without_an_answer() -> None:
            with scene.coordinator() as coordinator:
                kafka_id = scene.kafka_id(scene.row().generation)
                found = coordinator.describe(kafka_id)
                assert found is not None
                of = {"producer_id": found.producer_id, "epoch": found.epoch}
                assert coordinator.end_transaction(kafka_id, **of, commit=True).proven
            past.restore()
            raise dualwrite.BrokerUnavailableError("simulated", transactional_id=scene.transactional_id)

        with (
            failpoints.armed("before_kafka_commit", failpoints.only_at(1, commit_without_an_answer)),
            pytest.raises(dualwrite.InDoubtTransactionError, match="has forgotten"),
        ):
            scene.event(writer, 2)
        scene.event(writer, 3)
    assert len(events) == 1
    assert named(listed(scene)) == without_rows(scene)
    assert (scene.rows(), scene.messages()) == ([1, 3], [1, 2, 3])


def _nothing(scene: Scene, writer: Any) -> None:
    del scene, writer


def _fails(scene: Scene, writer: Any) -> None:
    with suppress(ZeroDivisionError), writer.transaction() as tx:
        tx.send(scene.topic, "0")
        raise ZeroDivisionError


def _sends_nothing(scene: Scene, writer: Any) -> None:
    with writer.transaction() as tx:
        tx.db.execute(sa.text("SELECT 1"))


def _does_nothing(scene: Scene, writer: Any) -> None:
    with writer.transaction():
        pass


def _is_reopened(scene: Scene, writer: Any) -> None:
    writer.reopen()


def _is_recovered(scene: Scene, writer: Any) -> None:
    scene.recover()
    writer.reopen()


def _is_idle(scene: Scene, writer: Any) -> None:
    for lane in writer._lanes:
        lane.ownership.clear_if_idle(0.0)


@NATIVE
@pytest.mark.parametrize(
    "what",
    [_nothing, _fails, _sends_nothing, _does_nothing, _is_reopened, _is_recovered, _is_idle],
    ids=lambda each: each.__name__,
)
def test_there_is_no_false_alarm(scene: Scene, what: Callable[[Scene, Any], None]) -> None:
    with observed() as events, scene.connect(lanes=2) as writer:
        scene.event(writer, 1, 2, 3)
        what(scene, writer)
        scene.event(writer, 4)
        what(scene, writer)
        what(scene, writer)
        scene.event(writer, 5, 6)
    scene.assert_resolved()
    with scene.connect(lanes=1) as writer:
        scene.event(writer, 7)
    assert (events, listed(scene), scene.agree()) == ([], [], [1, 2, 3, 4, 5, 6, 7])


@pytest.mark.slow
@NATIVE
@pytest.mark.parametrize("database", ["rocksdb", "zookeeper"])
def test_a_writer_on_another_database_sees_it(scene: Scene) -> None:
    with dualwrite.store_from_url(scene.url) as store, scene.connect() as writer:
        assert isinstance(store, KeyValueStore)
        scene.event(writer, 1)
        row = store.read(scene.transactional_id)
        scene.event(writer, 2)
        store._change(scene.transactional_id, lambda _: row, "going back")
        with pytest.raises(CommittedTransactionsForgottenError):
            scene.event(writer, 3)
        scene.event(writer, 4)
        found = store.read(scene.transactional_id)
    assert found is not None
    assert [(each.kind, each.transactions) for each in found.lost] == [(LostKind.FORGOTTEN, 1)]


# --- real servers -------------------------------------------------------------------------------------------------------------


def go_on(write: Callable[[int], object], numbers: Iterator[int]) -> None:
    """Write until three have succeeded, as a service does whose callers come again."""
    done, deadline = 0, Deadline.after(limit(60))
    while done < 3:
        assert not deadline.expired, "the service does not go on"
        try:
            write(next(numbers))
            done += 1
        except dualwrite.DualWriteError:
            time.sleep(0.05)


@NATIVE
@pytest.mark.soak
def test_what_a_server_forgets_in_a_crash_is_named_message_by_message(broker: DevCluster) -> None:
    """PostgreSQL with `synchronous_commit=off` acknowledges commits that it loses with its memory."""
    settings = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    with PostgresServer(settings=settings) as server, ExitStack() as stack:
        at = SqlEvents(server.create_database("crash"))
        at.create()
        scenes = [Scene(at, broker.bootstrap_servers) for _ in range(3)]
        writers = [stack.enter_context(scene.connect()) for scene in scenes[:2]]
        pool = stack.enter_context(open_pool(scenes[2], size=2))
        write: list[Callable[[int], object]] = [partial(scenes[0].event, writers[0]), partial(scenes[1].event, writers[1])]
        write.append(partial(pool.run, both, scenes[2]))
        numbers = count(1)
        for each in write:
            each(next(numbers))
        with at.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(sa.text("CHECKPOINT"))  # the claims are not forgotten
            wal_writer = connection.scalar(sa.text("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'"))
        os.kill(wal_writer, signal.SIGSTOP)  # on a slow machine it would write what is to be forgotten
        acknowledged = [(each, next(numbers)) for each in write * 10]
        for each, number in acknowledged:
            each(number)
        server.kill()
        with suppress(ProcessLookupError):
            os.kill(wal_writer, signal.SIGCONT)
        server.start()
        for each in write:
            go_on(each, numbers)
        stack.close()
        # what is not used again, of a pool's writers and of the lanes of a writer, leaves it to recovery
        dualwrite.recover(at.url, kafka=scenes[0].settings, prefix="w-")
        missing = [without_rows(scene) for scene in scenes]
        assert [named(listed(scene)) for scene in scenes] == missing
        assert all(missing), "the server has forgotten nothing"
        for scene in scenes:
            assert set(scene.rows()) <= set(scene.messages()), "a row without its message"


class Standby(PostgresServer):
    """A copy of a running server that follows it; no commit waits for it."""

    def __init__(self, primary: PostgresServer) -> None:
        super().__init__(settings={"hot_standby": "on"})
        self._primary = primary

    def _fill(self, folder: Path) -> None:
        super()._fill(folder)
        shutil.rmtree(folder / "data")
        source = f"host=127.0.0.1 port={self._primary.port} user=dualwrite"
        copy = [self._binaries / "pg_basebackup", "-d", source, "-D", folder / "data", "-X", "stream", "-c", "fast", "-R"]
        subprocess.run(copy, check=True, capture_output=True, **as_account(self._account))

    def follow_no_more(self) -> None:
        """Once it has all that the primary has."""
        (end,) = ask(self._primary.url, "SELECT pg_current_wal_lsn()")
        until(lambda: self._says(f"SELECT pg_last_wal_replay_lsn() >= '{end}'"), "the standby has everything")
        ask(self.url, "ALTER SYSTEM SET primary_conninfo = ''")
        ask(self.url, "SELECT pg_reload_conf()")
        until(lambda: not self._says("SELECT count(*) FROM pg_stat_wal_receiver"), "the standby does not follow any more")

    def _says(self, sql: str) -> Any:
        return ask(self.url, sql)[0]


def ask(url: str, sql: str) -> Any:
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        answer = connection.execute(sql)
        return answer.fetchone() if answer.description else None


@pytest.mark.slow
@NATIVE
@pytest.mark.skipif(not (find_binaries() / "pg_basebackup").exists(), reason="this PostgreSQL has no pg_basebackup")
def test_what_a_promoted_standby_lacks_is_named_message_by_message(broker: DevCluster) -> None:
    with PostgresServer(settings={"wal_level": "replica"}) as primary, ExitStack() as stack:
        SqlEvents(primary.create_database("crash")).create()
        standby = stack.enter_context(Standby(primary))
        hosts = f"host=127.0.0.1:{primary.port}&host=127.0.0.1:{standby.port}"
        at = SqlEvents(f"postgresql+psycopg://dualwrite@/crash?{hosts}&target_session_attrs=read-write")
        scenes = [Scene(at, broker.bootstrap_servers) for _ in range(2)]
        with scenes[0].connect() as writer, open_pool(scenes[1], size=1) as pool:
            write: list[Callable[[int], object]] = [partial(scenes[0].event, writer), partial(pool.run, both, scenes[1])]
            numbers = count(1)
            for each in write * 2:
                each(next(numbers))
            standby.follow_no_more()
            for each in write * 5:
                each(next(numbers))
            primary.kill()
            ask(standby.url, "SELECT pg_promote()")
            for each in write:
                go_on(each, numbers)
        dualwrite.recover(at.url, kafka=scenes[0].settings, prefix="w-")
        missing = [without_rows(scene) for scene in scenes]
        assert [named(listed(scene)) for scene in scenes] == missing
        assert [len(each) for each in missing] == [5, 5]
        assert all(set(scene.rows()) <= set(scene.messages()) for scene in scenes), "a row without its message"
