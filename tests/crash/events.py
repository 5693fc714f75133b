"""The tests' own `events` in each kind of database: where they are, how a block writes one, how they are read back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import closing
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from dualwrite import migration
from fixtures.zookeeper_client import zookeeper_client

CREATE = "CREATE TABLE events (writer varchar(80), number integer)"
FAMILY = "events"
NODE = "/events"


class Events(ABC):
    """The events of one database.

    Args:
        url: The database, as for `dualwrite.connect`.
    """

    one_process = False
    """Whether only one process at a time can have the database open."""
    locks_rows = True
    """Whether a paused process blocks other processes only on its own id."""

    def __init__(self, url: str) -> None:
        self.url = url

    @property
    def database(self) -> Any:
        """What this process passes to `dualwrite.connect`."""
        return self.url

    @abstractmethod
    def create(self) -> None:
        """Create what the first event needs, and the store's table if it has one."""

    @staticmethod
    @abstractmethod
    def write(db: Any, writer: str, number: int) -> None:
        """Write an event in a transaction's block."""

    @abstractmethod
    def numbers(self, writer: str) -> list[int]:
        """The events of a writer, sorted."""


class SqlEvents(Events):
    """Rows of a table.

    Args:
        url: The database.
        pool: How this process connects.
    """

    def __init__(self, url: str, pool: type[sa.Pool] = sa.NullPool) -> None:
        super().__init__(url)
        self.engine = sa.create_engine(url, poolclass=pool)
        self.locks_rows = self.engine.dialect.name != "sqlite"

    @property
    def database(self) -> sa.Engine:
        return self.engine

    def create(self) -> None:
        migration.upgrade(self.engine)
        with self.engine.begin() as connection:
            connection.execute(sa.text(CREATE))

    @staticmethod
    def write(db: Any, writer: str, number: int) -> None:
        db.execute(sa.text("INSERT INTO events (writer, number) VALUES (:id, :n)"), {"id": writer, "n": number})

    def numbers(self, writer: str) -> list[int]:
        with self.engine.connect() as connection:
            found = connection.execute(sa.text("SELECT number FROM events WHERE writer = :w ORDER BY number"), {"w": writer})
            return [int(row[0]) for row in found]


class RocksEvents(Events):
    """Keys of a column family; each read opens and closes the database, since only one process can have it open."""

    one_process = True
    locks_rows = False

    def create(self) -> None:
        from rocksdict import Options, Rdict  # noqa: PLC0415  (one database, one import)

        options = Options(raw_mode=True)
        options.create_if_missing(True)
        with closing(Rdict(self._path, options)) as database:
            database.create_column_family(FAMILY, Options(raw_mode=True))

    @staticmethod
    def write(db: Any, writer: str, number: int) -> None:
        db.put(f"{writer}:{number}".encode(), b"", cf=FAMILY)

    def numbers(self, writer: str) -> list[int]:
        from rocksdict import AccessType, Options, Rdict  # noqa: PLC0415  (one database, one import)

        families = {name: Options(raw_mode=True) for name in Rdict.list_cf(self._path)}
        with closing(
            Rdict(self._path, Options(raw_mode=True), column_families=families, access_type=AccessType.read_only())
        ) as database:
            keys = [bytes(key).decode() for key in database.get_column_family(FAMILY).keys()]  # noqa: SIM118  (not a dict)
        return sorted(int(key.partition(":")[2]) for key in keys if key.partition(":")[0] == writer)

    @property
    def _path(self) -> str:
        return str(Path(self.url.removeprefix("rocksdb:///")))


class ZooKeeperEvents(Events):
    """Nodes below one."""

    def create(self) -> None:
        hosts, _, chroot = self.url.removeprefix("zookeeper://").partition("/")
        with zookeeper_client(hosts) as client:
            client.ensure_path(f"/{chroot}{NODE}")

    @staticmethod
    def write(db: Any, writer: str, number: int) -> None:
        db.create(f"{NODE}/{writer}:{number}", b"")

    def numbers(self, writer: str) -> list[int]:
        with zookeeper_client(self.url) as client:
            client.sync(NODE)
            names = client.get_children(NODE)
        return sorted(int(name.partition(":")[2]) for name in names if name.partition(":")[0] == writer)


def events_at(url: str) -> Events:
    """The events of the database at a URL, or at a store's description."""
    return _kind(url)(url)


def write_event(store_description: str, db: Any, writer: str, number: int) -> None:
    """Write an event, with the kind of `tx.db` that the block has."""
    _kind(store_description).write(db, writer, number)


def _kind(url: str) -> type[Events]:
    return {"rocksdb": RocksEvents, "zookeeper": ZooKeeperEvents}.get(url.partition("://")[0], SqlEvents)
