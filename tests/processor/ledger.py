"""The tests' own data: how often each number was booked, in each kind of database."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import sqlalchemy as sa
from kazoo.exceptions import NoNodeError
from rocksdict import AccessType, Options, Rdict

from dualwrite import migration
from fixtures.zookeeper_client import zookeeper_client

TABLE = "CREATE TABLE ledger (group_id varchar(80), number integer)"
FAMILY = "ledger"
NODE = "/ledger"


def make_ledger(url: str) -> None:
    """Create what the first booking needs."""
    if url.startswith("rocksdb"):
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        with closing(Rdict(_path(url), options)) as database:
            database.create_column_family(FAMILY, Options(raw_mode=True))
    elif url.startswith("zookeeper"):
        with zookeeper_client(url) as client:
            client.ensure_path(NODE)
    else:
        migration.upgrade(url)
        engine = sa.create_engine(url)
        with engine.begin() as connection:
            connection.execute(sa.text(TABLE))
        engine.dispose()


def book(db: Any, url: str, group: str, number: int) -> None:
    """Book a number once more, in a transaction's block."""
    if url.startswith("rocksdb"):
        family = db.column_family(FAMILY)
        key = f"{group}:{number}".encode()
        family.put(key, b"%d" % (int(family.get(key, b"0")) + 1))
    elif url.startswith("zookeeper"):
        path = f"{NODE}/{group}:{number}"
        try:
            data, stat = db.get(path)
        except NoNodeError:
            db.create(path, b"1")
        else:
            db.set_data(path, b"%d" % (int(data) + 1), stat.version)
    else:
        db.execute(sa.text("INSERT INTO ledger VALUES (:group_id, :number)"), {"group_id": group, "number": number})


def booked(url: str, group: str) -> list[int]:
    """Each number as often as it was booked, sorted."""
    if url.startswith("rocksdb"):
        return sorted(_rocksdb(url, group))
    if url.startswith("zookeeper"):
        with zookeeper_client(url) as client:
            client.sync(NODE)
            names = [name for name in client.get_children(NODE) if name.startswith(f"{group}:")]
            counts = {int(name.partition(":")[2]): int(client.get(f"{NODE}/{name}")[0]) for name in names}
        return sorted(number for number, count in counts.items() for _ in range(count))
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        found = connection.execute(sa.text("SELECT number FROM ledger WHERE group_id = :g ORDER BY number"), {"g": group})
        return [int(row[0]) for row in found]


def _rocksdb(url: str, group: str) -> list[int]:
    families = {name: Options(raw_mode=True) for name in Rdict.list_cf(_path(url))}
    only = AccessType.read_only()
    with closing(Rdict(_path(url), Options(raw_mode=True), column_families=families, access_type=only)) as database:
        items = list(database.get_column_family(FAMILY).items())
    counts = {bytes(key).decode(): int(bytes(value)) for key, value in items}
    return [int(key.partition(":")[2]) for key, count in counts.items() if key.startswith(f"{group}:") for _ in range(count)]


def _path(url: str) -> str:
    return url.removeprefix("rocksdb:///")
