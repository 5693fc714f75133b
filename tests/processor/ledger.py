"""How often each number was booked: the tests' own events in each kind of database, which show a second booking."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from crash.events import FAMILY, Events, RocksEvents, events_at


class CountedRocks(RocksEvents):
    """A key of RocksDB counts: a second one would replace the first."""

    @staticmethod
    def write(db: Any, writer: str, number: int) -> None:
        family, key = db.column_family(FAMILY), f"{writer}:{number}".encode()
        family.put(key, b"%d" % (int(family.get(key, b"0")) + 1))

    def numbers(self, writer: str) -> list[int]:
        from rocksdict import AccessType, Options, Rdict  # noqa: PLC0415  (one database, one import)

        families = {name: Options(raw_mode=True) for name in Rdict.list_cf(self._path)}
        only = AccessType.read_only()
        with closing(Rdict(self._path, Options(raw_mode=True), column_families=families, access_type=only)) as database:
            found = [
                (bytes(key).decode().partition(":"), int(bytes(n))) for key, n in database.get_column_family(FAMILY).items()
            ]
        return sorted(int(number) for (group, _, number), count in found if group == writer for _ in range(count))


def ledger(url: str) -> Events:
    """The bookings in the database at a URL."""
    return CountedRocks(url) if url.startswith("rocksdb") else events_at(url)
