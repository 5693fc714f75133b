"""Pytest's fixtures `dualwrite_kafka`, `dualwrite_postgres`, `dualwrite_sqlite` and `sent`; see docs/guides/testing.md.

`dualwrite_postgres_setup` is there to be replaced.

Pytest loads this module wherever dualwrite is installed, so it imports what a fixture needs only when the fixture is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import pytest

from dualwrite.testing import TIMEOUT

if TYPE_CHECKING:
    from dualwrite.testing.databases import FreshDatabase
    from dualwrite.testing.topics import SentMessages

_GIVEN: Final = {
    "dualwrite_kafka": ("DUALWRITE_TEST_KAFKA", "host:port of the brokers for the fixture dualwrite_kafka, instead of its own"),
    "dualwrite_postgres": (
        "DUALWRITE_TEST_POSTGRES",
        "URL of a PostgreSQL server for the fixture dualwrite_postgres, instead of its own",
    ),
}
"""Each option of pytest's configuration: the environment variable that overrides it, and what it is."""

_OWN_BROKER: Final = pytest.StashKey[str]()
"""The broker that `dualwrite_kafka` has started."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options of pytest's configuration."""
    for name, (variable, text) in _GIVEN.items():
        parser.addini(name, f"{text}; the environment variable {variable} overrides it", default="")


@pytest.fixture(scope="session")
def dualwrite_kafka(request: pytest.FixtureRequest) -> Iterator[str]:
    """The `bootstrap.servers` of a real broker, with two-phase commit, for the whole run (of a worker process of xdist).

    A fixture of this name in your conftest.py replaces it; it may also return settings, as for `connect(kafka=…)`.
    """
    given = _given(request.config, "dualwrite_kafka")
    if given:
        yield given
        return
    try:
        from dualwrite.devcluster import DevCluster, DevClusterError  # noqa: PLC0415  (only if it is used)
    except ImportError as error:
        _missing(f"A broker needs more packages: {error}. Run: pip install 'dualwrite[testing]'", "dualwrite_kafka")
    with ExitStack() as opened:
        try:
            cluster = opened.enter_context(DevCluster.temporary(timeout=2 * TIMEOUT))
        except DevClusterError as error:
            _missing(f"No Kafka broker could be started: {error}", "dualwrite_kafka")
        request.config.stash[_OWN_BROKER] = cluster.bootstrap_servers
        yield cluster.bootstrap_servers


@pytest.fixture(autouse=True)
def _dualwrite_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test on a broker that others use, too, waits until theirs are over: `sent` could not tell whose messages it reads."""
    with ExitStack() as held:
        if "dualwrite_kafka" in request.fixturenames:
            kafka = request.getfixturevalue("dualwrite_kafka")
            if kafka != request.config.stash.get(_OWN_BROKER, None):
                from dualwrite.testing.topics import alone_on  # noqa: PLC0415  (only if it is used)

                held.enter_context(alone_on(kafka))
        yield


@pytest.fixture(scope="session")
def dualwrite_postgres_setup() -> Callable[[str], object]:
    """What sets up the database of `dualwrite_postgres`, once in a run: a function of its URL, which makes dualwrite's tables.

    A fixture of this name in your conftest.py replaces it: for a schema, your own tables, extensions, rows.
    """
    from dualwrite import migration  # noqa: PLC0415  (only if it is used)

    return migration.upgrade


@pytest.fixture(scope="session")
def _dualwrite_database(
    request: pytest.FixtureRequest, dualwrite_postgres_setup: Callable[[str], object]
) -> Iterator[FreshDatabase]:
    """The database of `dualwrite_postgres`, on a server for the whole run."""
    try:
        from dualwrite.testing.databases import FreshDatabase  # noqa: PLC0415  (only if it is used)
    except ImportError as error:
        _missing(f"PostgreSQL needs more packages: {error}. Run: pip install 'dualwrite[postgres]'", "dualwrite_postgres")
    server = _given(request.config, "dualwrite_postgres")
    with ExitStack() as opened:
        if not server:
            from dualwrite.errors import DualWriteError  # noqa: PLC0415  (as above)
            from dualwrite.testing.postgres import PostgresServer  # noqa: PLC0415  (as above)

            try:
                server = opened.enter_context(PostgresServer()).url
            except DualWriteError as error:
                _missing(f"No PostgreSQL server could be started: {error}", "dualwrite_postgres")
        yield opened.enter_context(FreshDatabase(server, dualwrite_postgres_setup))


@pytest.fixture
def dualwrite_postgres(_dualwrite_database: FreshDatabase, request: pytest.FixtureRequest) -> str:
    """The URL of a PostgreSQL database as `dualwrite_postgres_setup` has made it: by default with dualwrite's tables, empty."""
    url = _dualwrite_database.fresh()
    _abort_left_open(request.config)
    return url


@pytest.fixture
def dualwrite_sqlite(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """The URL of an SQLite database, a file, that has only dualwrite's tables, which are empty."""
    from dualwrite import migration  # noqa: PLC0415  (only if it is used)

    _abort_left_open(request.config)
    url = f"sqlite:///{tmp_path / 'dualwrite.db'}"
    migration.upgrade(url)
    return url


@pytest.fixture
def sent(dualwrite_kafka: Any) -> SentMessages:
    """What was committed to a topic since the test began: `sent("orders")`, `sent.wait_for("orders", 2)`."""
    from dualwrite.testing.topics import SentMessages  # noqa: PLC0415  (only if it is used)

    return SentMessages(dualwrite_kafka)


def _abort_left_open(config: pytest.Config) -> None:
    """Abort what earlier tests have left open on our own broker: their databases are gone, and it hides later messages."""
    broker = config.stash.get(_OWN_BROKER, None)
    if broker is not None:
        from dualwrite.testing.topics import abort_open_transactions  # noqa: PLC0415  (only if it is used)

        abort_open_transactions(broker)


def _given(config: pytest.Config, name: str) -> str:
    return os.environ.get(_GIVEN[name][0]) or str(config.getini(name))


def _missing(reason: str, name: str) -> NoReturn:
    """Skip the test; where `CI` is set, fail it."""
    text = f"{reason}\nOr set {_GIVEN[name][0]}, or {name} in pytest's configuration: {_GIVEN[name][1]}."
    if os.environ.get("CI"):
        pytest.fail(text, pytrace=False)
    pytest.skip(text)
