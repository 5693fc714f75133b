"""What a role needs is one table: its GRANT statements are enough, and each privilege that is missing is named at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa

import dualwrite
from dualwrite import cli, migration
from dualwrite.devcluster import DevCluster
from dualwrite.errors import StoreError
from dualwrite.jobs.ledger import jobs_of
from dualwrite.relay import Relay, create_table
from dualwrite.relay.journal_keeper import drain_journal
from dualwrite.relay.journal_state import read_journals
from dualwrite.settings import Settings
from dualwrite.stores.positions import Move, Position
from dualwrite.stores.sql import SqlStateStore
from dualwrite.stores.sql.rights import BASIC, IMPLIED, OUTBOX, RIGHTS, rights_for
from dualwrite.stores.sql.tables import VERSION_TABLE_NAME, metadata
from fixtures.broker import make_topic
from fixtures.rules_page import ROOT

ROLE = "clerk"
NewName = Callable[[str], str]
NOWHERE = "127.0.0.1:9"  # nothing listens there
IN_JOURNAL = dualwrite.PoolOptions(when_kafka_is_down="journal")


class Clerk:
    """A role without privileges, and the owner of the tables, who grants and revokes them."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        address = sa.make_url(owner)
        self._is_mysql = address.get_backend_name() != "postgresql"
        self.url = address.set(username=ROLE).render_as_string(hide_password=False)
        self.name = f"{ROLE}@127.0.0.1" if self._is_mysql else ROLE
        self._quoted = f"'{ROLE}'@'127.0.0.1'" if self._is_mysql else ROLE

    @contextmanager
    def made(self) -> Iterator[Clerk]:
        user = "USER" if self._is_mysql else "ROLE"
        self.execute(f"CREATE {user} {self._quoted}" + ("" if self._is_mysql else " LOGIN"))
        try:
            yield self
        finally:
            if not self._is_mysql:
                self.execute(f"DROP OWNED BY {self._quoted}")
            self.execute(f"DROP {user} {self._quoted}")

    def execute(self, *statements: str) -> None:
        engine = sa.create_engine(self.owner)
        with engine.begin() as connection:
            for statement in statements:
                connection.exec_driver_sql(statement.replace("%", "%%"))
        engine.dispose()

    def grant_of(self, privilege: str, table: str) -> str:
        return f"GRANT {privilege} ON {table} TO {self._quoted}"

    def grant(self, *uses: str) -> list[str]:
        statements = migration.grants(self.owner, self.name, uses)
        self.execute(*statements)
        return statements


@pytest.fixture(params=["postgresql", pytest.param("mariadb", marks=pytest.mark.slow)])
def clerk(request: pytest.FixtureRequest, new_database: Callable[[str], str]) -> Iterator[Clerk]:
    url = new_database(request.param)
    migration.upgrade(url)
    create_table(url)
    with Clerk(url).made() as clerk:
        yield clerk


def test_every_table_is_in_the_table_of_rights() -> None:
    named = {table for use in RIGHTS.values() for table in use}
    assert named == {*metadata.tables, VERSION_TABLE_NAME, OUTBOX}
    assert set(RIGHTS["operator"]) == named - {OUTBOX}


def test_what_is_missing_is_named_at_once_before_anything_is_opened(clerk: Clerk) -> None:
    clerk.execute(clerk.grant_of("SELECT", "kafka_transaction_state"))
    with pytest.raises(StoreError, match="lacks privileges") as raised:
        dualwrite.create_pool(clerk.url, kafka=NOWHERE, prefix="shop", options=IN_JOURNAL)
    for words in ("INSERT, UPDATE on ", "DELETE on ", "dualwrite_journal_gate", "kafka_transaction_lease"):
        assert words in str(raised.value.cause)
    assert raised.value.next_step is not None
    assert f"dualwrite db grants --role {clerk.name} --journal --url" in raised.value.next_step


def test_a_relay_and_a_processor_check_their_rights_when_they_begin(clerk: Clerk) -> None:
    clerk.grant("writer", "pool")
    clerk.execute(*(clerk.grant_of("SELECT", table) for table in ("outbox", "dualwrite_dead_letter")))
    with Relay(clerk.url, kafka=NOWHERE) as relay, pytest.raises(StoreError, match="lacks privileges") as raised:
        relay.run_once()
    assert "DELETE on outbox" in str(raised.value.cause)
    assert "--relay --table outbox" in str(raised.value.next_step)
    with SqlStateStore.from_url(clerk.url) as store, pytest.raises(StoreError, match="kafka_consumed_offset"):
        store.positions.prepare()


def test_each_privilege_that_is_missing_is_named(clerk: Clerk) -> None:
    uses = ("writer", "pool", "journal", "processor", "relay", "deletes", "jobs")
    statements = clerk.grant(*uses)
    with SqlStateStore.from_url(clerk.url) as store:
        store.check_rights(*uses)
        for statement in statements:
            privileges, _, rest = statement.removeprefix("GRANT ").partition(" ON ")
            place, _, role = rest.partition(" TO ")
            for privilege in privileges.split(", "):
                clerk.execute(f"REVOKE {privilege} ON {place} FROM {role}")
                with pytest.raises(StoreError) as raised:
                    store.check_rights(*uses)
                assert raised.value.cause is not None
                assert raised.value.cause.startswith(f"it needs {privilege} on ")
                assert place.split()[-1].rpartition(".")[2] in raised.value.cause
                clerk.execute(f"GRANT {privilege} ON {place} TO {role}")
        store.check_rights(*uses)


@pytest.mark.slow
def test_what_is_granted_is_enough(clerk: Clerk, broker: DevCluster, new_name: NewName) -> None:
    topic = new_name("topic")
    make_topic(broker, topic)
    clerk.execute(f"INSERT INTO outbox (topic, value) VALUES ('{topic}', 'row')")
    clerk.grant("writer", "pool", "journal", "relay", "deletes", "processor", "recover")
    kafka, prefix = broker.bootstrap_servers, new_name("shop")
    with dualwrite.create_pool(clerk.url, kafka=NOWHERE, prefix=prefix, options=IN_JOURNAL) as pool:
        pool.run(lambda tx: tx.send(topic, "journaled"))
    settings = Settings(kafka={"bootstrap.servers": kafka})
    with SqlStateStore.from_url(clerk.url) as store:
        assert drain_journal(store, settings, prefix) == 1
        store.positions.prepare()
        store.positions.reset("billing", [Move(None, Position("orders", 0, 1))])
    with dualwrite.create_pool(clerk.url, kafka=kafka, prefix=prefix) as pool:
        pool.run(lambda tx: tx.send(topic, "sent"))
    with Relay(clerk.url, kafka=kafka, name=new_name("relay")) as relay:
        assert relay.run_once() == 1
    dualwrite.recover(clerk.url, kafka=kafka).raise_for_problems()


def test_an_operator_who_may_only_read_sees_everything_and_changes_nothing(clerk: Clerk) -> None:
    clerk.grant("operator")
    with SqlStateStore.from_url(clerk.url) as store:
        store.check()
        assert (store.list(), read_journals(store), jobs_of(store)) == ([], [], [])
        with pytest.raises(StoreError, match="lacks privileges"):
            store.check_rights(*BASIC)
        assert store.leases.entries() == []


def test_an_error_while_reading_asks_for_select_only_and_names_its_table(clerk: Clerk) -> None:
    clerk.grant("writer", "pool")
    with SqlStateStore.from_url(clerk.url) as store:
        for call, table in ((lambda: jobs_of(store), "kafka_job"), (lambda: store.journal.gates(counts=False), "journal_gate")):
            with pytest.raises(StoreError, match="does not permit") as raised:
                call()
            assert raised.value.next_step is not None
            assert f"grant SELECT on {'dualwrite_' if 'gate' in table else ''}{table} to" in raised.value.next_step


def test_on_sqlite_there_is_nothing_to_grant() -> None:
    assert migration.grants("sqlite:///shop.db", ROLE, BASIC) == []
    assert rights_for(["writer"], lambda _: "main", "sqlite")


def test_the_guide_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "guides" / "migrations.md").read_text(encoding="utf-8")
    (command,) = [line for line in page.splitlines() if line.startswith("dualwrite db grants")]
    assert cli.main(command.split()[1:]) == 0
    assert f"```sql\n{capsys.readouterr().out}```\n" in page
    options = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `--")}
    assert {option.removeprefix("--") for option in options} == RIGHTS.keys() - IMPLIED
