"""The pytest plugin, as pytest loads it for a service: by its entry point, in a process of its own."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
import sqlalchemy as sa

from dualwrite.devcluster import DevCluster
from fixtures.tiers import thinned

PLUGIN = {"dualwrite", "dualwrite.errors", "dualwrite.testing", "dualwrite.testing.pytest_plugin"}
"""All of dualwrite that a run without its fixtures may import."""

HOME = str(Path.home())
"""Where Kafka's programs are; `pytester` changes it."""


@pytest.fixture
def service(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A folder for a service's tests, outside of CI."""
    for variable in ("CI", "DUALWRITE_TEST_KAFKA", "DUALWRITE_TEST_POSTGRES", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", HOME)
    return pytester


def run(service: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return service.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:xdist", "-rs", *arguments)


def test_a_run_without_its_fixtures_imports_next_to_nothing(service: pytest.Pytester) -> None:
    service.makepyfile(
        """
        import json, pathlib, sys

        def test_nothing():
            pathlib.Path("loaded").write_text(json.dumps(sorted(sys.modules)))
        """
    )
    run(service).assert_outcomes(passed=1)
    loaded = set(json.loads((service.path / "loaded").read_text()))
    assert {name for name in loaded if name.partition(".")[0] == "dualwrite"} == PLUGIN
    assert not loaded & {"sqlalchemy", "alembic", "confluent_kafka", "psycopg"}


@pytest.mark.slow
def test_its_fixtures_are_documented(service: pytest.Pytester) -> None:
    listed = run(service, "--fixtures").stdout.str()
    for fixture in ("dualwrite_kafka [session scope]", "dualwrite_postgres --", "dualwrite_sqlite --", "sent --"):
        assert fixture in listed
    assert "DUALWRITE_TEST_POSTGRES" in run(service, "--help").stdout.str()


@pytest.mark.soak
def test_running_servers_may_be_given(service: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    service.makeini("[pytest]\ndualwrite_kafka = from.ini:9092")
    service.makepyfile("def test_kafka(dualwrite_kafka): assert dualwrite_kafka == 'from.ini:9092'")
    run(service).assert_outcomes(passed=1)
    monkeypatch.setenv("DUALWRITE_TEST_KAFKA", "from.environment:9092")
    service.makepyfile("def test_kafka(dualwrite_kafka): assert dualwrite_kafka == 'from.environment:9092'")
    run(service).assert_outcomes(passed=1)


@pytest.mark.soak
def test_each_test_has_an_sqlite_database_of_its_own(service: pytest.Pytester) -> None:
    service.makepyfile(
        """
        import pytest, sqlalchemy as sa
        from dualwrite.testing.fakes import FakeTransaction

        @pytest.mark.parametrize("number", [1, 2])
        def test_database(dualwrite_sqlite, number):
            engine = sa.create_engine(dualwrite_sqlite)
            assert "kafka_transaction_state" in sa.inspect(engine).get_table_names()
            with FakeTransaction(engine) as tx:
                tx.db.execute(sa.text("CREATE TABLE orders (item TEXT)"))
            engine.dispose()
        """
    )
    run(service).assert_outcomes(passed=2)


@pytest.mark.soak
def test_a_database_begins_each_test_as_the_session_has_set_it_up(
    service: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, postgres_url: str
) -> None:
    """Schemas, types and rows of earlier tests are gone; a schema that is named as the user does not attract our tables."""
    monkeypatch.setenv("DUALWRITE_TEST_POSTGRES", postgres_url)
    user = sa.make_url(postgres_url).username
    tests = f"""
        import pytest
        import sqlalchemy as sa

        @pytest.mark.parametrize("number", range(3))
        def test_database(dualwrite_postgres, number):
            engine = sa.create_engine(dualwrite_postgres)
            with engine.begin() as connection:
                found = sa.inspect(connection)
                assert {{name for name in found.get_schema_names() if name[0] != "i"}} == SCHEMAS
                assert "kafka_transaction_state" in found.get_table_names(schema=OURS)
                if "kept" in SCHEMAS:
                    assert connection.scalar(sa.text("select count(*) from kept.rows")) == 1
                    assert set(found.get_table_names(schema="kept")) == {{"rows"}}
                    connection.execute(sa.text("insert into kept.rows values (2); create table kept.more (n int)"))
                connection.execute(sa.text('create schema shop; create schema "{user}"; create table "{user}".rows (n int)'))
                connection.execute(sa.text("create type mood as enum ('ok'); create table public.rows (n int)"))
    """
    constants = 'SCHEMAS, OURS = {"public"}, "public"\n'
    service.makepyfile(constants + textwrap.dedent(tests))
    run(service).assert_outcomes(passed=3)

    service.makeconftest(
        """
        import pytest
        import sqlalchemy as sa
        from dualwrite import migration

        left_open = []

        @pytest.fixture(scope="session")
        def dualwrite_postgres_setup():
            def set_up(url):
                engine = sa.create_engine(url)
                with engine.begin() as connection:
                    connection.execute(sa.text("create schema ours; create schema kept; create table kept.rows (n int)"))
                    connection.execute(sa.text("insert into kept.rows values (1)"))
                left_open.append(engine.connect())
                migration.upgrade(url, schema="ours")

            return set_up
        """
    )
    constants = 'SCHEMAS, OURS = {"public", "kept", "ours"}, "ours"\n'
    service.makepyfile(constants + textwrap.dedent(tests))
    run(service).assert_outcomes(passed=3)


@pytest.mark.soak  # two runs of pytest beside each other, each of everything that a service tests
def test_tests_on_one_broker_run_one_after_another(
    service: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, broker: DevCluster, postgres_url: str
) -> None:
    """Two worker processes of xdist, whose tests use the same topic and prefix at the same time."""
    monkeypatch.setenv("DUALWRITE_TEST_KAFKA", broker.bootstrap_servers)
    monkeypatch.setenv("DUALWRITE_TEST_POSTGRES", postgres_url)
    files = {f"test_{name}": textwrap.dedent(SERVICE) for name in ("one", "two")}
    service.makepyfile(**files)
    service.runpytest_subprocess("-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile").assert_outcomes(passed=8)


@pytest.mark.slow
def test_a_coroutine_does_not_wait_for_what_its_own_loop_would_send(
    service: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, broker: DevCluster
) -> None:
    monkeypatch.setenv("DUALWRITE_TEST_KAFKA", broker.bootstrap_servers)
    service.makepyfile(
        """
        import asyncio
        import pytest
        from dualwrite.errors import UsageError

        def test_waiting(sent):
            async def wait():
                with pytest.raises(UsageError, match=r"(?s)sent.wait_for.*to_thread.sent.wait_for, 'orders', 0"):
                    sent.wait_for("orders", 0)
                assert await asyncio.to_thread(sent.wait_for, "orders", 0) == sent("orders") == []

            asyncio.run(wait())
        """
    )
    run(service).assert_outcomes(passed=1)


NEEDS = """
    import pytest

    def test_kafka(dualwrite_kafka): ...
    def test_sent(sent): ...
    def test_postgres(dualwrite_postgres): ...
"""


@pytest.mark.soak
def test_what_is_not_installed_skips_with_the_command_that_installs_it(service: pytest.Pytester) -> None:
    service.makeconftest("import sys; sys.modules['psutil'] = sys.modules['psycopg'] = None")
    service.makepyfile(NEEDS)
    result = run(service)
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(
        ["*psutil*pip install 'dualwrite[[]testing]'*", "*psycopg*pip install 'dualwrite[[]postgres]'*"]
    )


@pytest.mark.soak
def test_servers_that_do_not_start_skip_with_the_reason_and_fail_in_ci(
    service: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_JAVA_HOME", str(service.path / "no-java"))
    service.makeconftest(
        """
        import pytest
        from dualwrite.errors import MissingDependencyError
        from dualwrite.testing import postgres

        @pytest.fixture(scope="session", autouse=True)
        def no_server():
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(postgres, "installed_binaries", lambda: None)
                patched.setattr(postgres, "bundled_binaries", lambda: None)
                yield
        """
    )
    service.makepyfile(NEEDS)
    result = run(service)
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(["*No Kafka broker could be started*no-java*", "*No PostgreSQL server could be started*"])
    assert "Or set DUALWRITE_TEST_KAFKA, or dualwrite_kafka in pytest's configuration" in result.stdout.str()
    monkeypatch.setenv("CI", "true")
    result = run(service)
    result.assert_outcomes(errors=3)
    result.stdout.fnmatch_lines(["*No Kafka broker could be started*no-java*"])


SERVICE = """
    import dualwrite
    import pytest
    import sqlalchemy as sa
    from dualwrite.testing.crashes import crash_at

    def place(tx, item):
        tx.db.execute(sa.text("INSERT INTO orders VALUES (:item)"), {"item": item})
        tx.send("orders", item)

    def serve(database, kafka, *items):
        with dualwrite.create_pool(database, kafka=kafka, prefix="shop") as pool:
            for item in items:
                pool.run(place, item)

    @pytest.fixture
    def database(dualwrite_postgres):
        engine = sa.create_engine(dualwrite_postgres)
        sa.Table("orders", sa.MetaData(), sa.Column("item", sa.Text)).create(engine)
        yield dualwrite_postgres
        engine.dispose()

    @pytest.mark.parametrize("item", ["lamp", "chair"])
    def test_an_order(database, dualwrite_kafka, sent, item):
        serve(database, dualwrite_kafka, item)
        assert [message.text for message in sent("orders")] == [item]

    @pytest.mark.parametrize(("failpoint", "items"), [("before_db_commit", []), ("after_db_commit", ["sofa"])])
    def test_a_crash(database, dualwrite_kafka, sent, failpoint, items):
        crash_at(failpoint, serve, database, dualwrite_kafka, "sofa")
        serve(database, dualwrite_kafka, "bed")
        dualwrite.recover(database, kafka=dualwrite_kafka, prefix="shop")
        assert [message.text for message in sent("orders")] == [*items, "bed"]
"""
"""Its tests use one topic and one prefix; each sees only what is its own."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    thinned([True, False], kept=[False]),  # on running servers in CI: two processes, above
    ids=["on running servers", "on servers of its own"],
)
def test_a_service_is_tested_on_real_servers(
    service: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, broker: DevCluster, postgres_url: str, given: bool
) -> None:
    if given:
        monkeypatch.setenv("DUALWRITE_TEST_KAFKA", broker.bootstrap_servers)
        monkeypatch.setenv("DUALWRITE_TEST_POSTGRES", postgres_url)
    service.makepyfile(SERVICE)
    run(service, "-v").assert_outcomes(passed=4)


@pytest.mark.soak
def test_a_transaction_that_a_test_has_left_open_does_not_disturb_the_next_one(
    service: pytest.Pytester, broker: DevCluster, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALWRITE_TEST_POSTGRES", postgres_url)
    service.makepyfile(
        """
        import dualwrite
        import pytest
        from dualwrite.testing.crashes import crash_at

        def send(database, kafka, item):
            with dualwrite.connect(database, kafka=kafka, transactional_id=item) as writer, writer.transaction() as tx:
                tx.send("orders", item)

        @pytest.mark.parametrize("kind", ["postgres", "sqlite"])
        def test_a_crash_that_nobody_recovers(request, dualwrite_kafka, kind):
            crash_at("after_prepare", send, request.getfixturevalue(f"dualwrite_{kind}"), dualwrite_kafka, "left")

        @pytest.mark.parametrize("kind", ["postgres", "sqlite"])
        def test_the_next(request, dualwrite_kafka, kind, sent):
            database = request.getfixturevalue(f"dualwrite_{kind}")
            send(database, dualwrite_kafka, "lamp")
            assert [message.text for message in sent("orders")] == ["lamp"]
            crash_at("after_prepare", send, database, dualwrite_kafka, "left")
        """
    )
    run(service, "-v").assert_outcomes(passed=4)
