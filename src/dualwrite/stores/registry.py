"""Which store serves a URL; each backend is imported only when a URL needs it."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Final

from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.stores.base import TxnStateStore

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import SessionSource

ENTRY_POINT_GROUP: Final = "dualwrite.state_stores"
"""Where a third-party package registers its stores: `scheme = "package.module:function"`; the function gets the URL."""

_WITH_TABLE: Final = ("postgresql", "sqlite", "mysql", "mariadb")
_WITHOUT_TABLE: Final = {"rocksdb": ("RocksDBStore", "rocksdict"), "zookeeper": ("ZooKeeperStore", "kazoo")}
"""By the scheme, which is also the name of our package: the store, and its client library."""

URL_EXAMPLES: Final = (
    "postgresql+psycopg://user@host/database, mysql+pymysql://user@host/database, sqlite:////path/to/file.db, "
    "rocksdb:////path/to/folder or zookeeper://host:2181,host2:2181/chroot"
)
"""Example URLs, for errors and help texts."""


def store_from_url(
    url: str, *, schema: str | None = None, session: SessionSource | None = None, write_lock_timeout: float | None = None
) -> TxnStateStore:
    """The store for a URL, with connections of its own. Nothing connects yet (RocksDB: nothing is opened yet).

    Args:
        url: `postgresql+psycopg://user@host/database` (`postgresql://` means the same), `mysql+pymysql://…` or
            `mariadb+pymysql://…`, `sqlite:////path/to/file.db`, `rocksdb:////path/to/folder`,
            `zookeeper://host:port,host:port/chroot`; or a scheme that an installed package registers as an entry point in
            `dualwrite.state_stores`. The schemes above can't be overridden.
        schema: The schema in which a SQL database has our tables; see SqlStateStore.
        session: What makes a SQL database's sessions; see SqlStateStore.
        write_lock_timeout: Seconds that a transaction on SQLite waits for the write lock, of which a file has one; None: 30.
            Other databases have no such lock.

    Raises:
        ConfigurationError: There is no store for the URL, or it can't be parsed.
        MissingDependencyError: The backend's package is not installed.
    """
    backend = _backend(url)
    if "://" not in url:
        raise ConfigurationError("The database's address is not a URL.", next_step=f"use a URL such as {URL_EXAMPLES}")
    if backend in _WITH_TABLE:
        from dualwrite.stores.sql.sql_store import DEFAULT_LOCK_TIMEOUT, SqlStateStore  # noqa: PLC0415  (one backend, one import)

        lock_timeout = DEFAULT_LOCK_TIMEOUT if backend != "sqlite" or write_lock_timeout is None else write_lock_timeout
        return SqlStateStore.from_url(url, schema=schema, session=session, lock_timeout=lock_timeout)
    if session is not None:
        raise ConfigurationError("session is given, but the database is not a SQL database.", next_step="remove session")
    if schema is not None:
        raise ConfigurationError(
            f"schema is {schema!r}, but the database is not a SQL database.",
            next_step="leave it out (environment: DUALWRITE_SCHEMA)",
        )
    return _without_table(backend, url) if backend in _WITHOUT_TABLE else _third_party(backend, url)


def keeps_a_table(url: str) -> bool:
    """Whether the database is one that has our table, and so needs migrations.

    The other stores (RocksDB, ZooKeeper, those of third parties) create what they need themselves. True for a URL without a
    known store: the caller that opens it reports what is wrong.
    """
    backend = _backend(url)
    if backend in _WITHOUT_TABLE:
        return False
    return backend in _WITH_TABLE or not entry_points(group=ENTRY_POINT_GROUP, name=backend)


def _backend(url: str) -> str:
    return url.partition("://")[0].partition("+")[0].lower()


def _without_table(backend: str, url: str) -> TxnStateStore:
    name, package = _WITHOUT_TABLE[backend]
    try:
        module = import_module(f"dualwrite.stores.{backend}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingDependencyError(
            f"The Python package {package!r} is not installed; the store for {backend} needs it.",
            next_step=f'pip install "dualwrite[{backend}]"',
        ) from error
    store: TxnStateStore = getattr(module, name).from_url(url)
    return store


def _third_party(backend: str, url: str) -> TxnStateStore:
    found = list(entry_points(group=ENTRY_POINT_GROUP, name=backend))
    if not found:
        others = sorted({entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)} - {*_WITH_TABLE, *_WITHOUT_TABLE})
        more = f"; installed packages provide {', '.join(f'{name}://…' for name in others)}" if others else ""
        raise ConfigurationError(
            f"Unsupported database type {backend!r}: no installed package provides a store for it.",
            next_step=f"use a URL such as {URL_EXAMPLES}{more}",
        )
    if len({entry.value for entry in found}) > 1:
        raise ConfigurationError(
            f"More than one installed package provides a store for {backend}://: {', '.join(map(_described, found))}.",
            next_step="uninstall all but one, or pass the store itself to connect()",
        )
    try:
        factory = found[0].load()
    except (ImportError, AttributeError) as error:  # AttributeError: the module does not have the name
        raise MissingDependencyError(
            f"The store for {backend}:// can't be loaded from {_described(found[0])}.",
            cause=f"{type(error).__name__}: {error}",
            next_step="reinstall that package and its dependencies",
        ) from error
    store = factory(url)
    if not isinstance(store, TxnStateStore):
        raise ConfigurationError(
            f"{_described(found[0])} returned a {type(store).__name__} for {backend}://, not a TxnStateStore.",
            next_step="report this to the package's maintainers; dualwrite.stores.base.TxnStateStore is the contract",
        )
    return store


def _described(entry: EntryPoint) -> str:
    return entry.value if entry.dist is None else f"{entry.value} of the package {entry.dist.name}"
