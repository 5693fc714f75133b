"""The benchmarks notice a record that is lost, doubled or altered, or that nobody has written."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from sqlalchemy import StaticPool, create_engine, text

Import = Callable[[str], ModuleType]
INSERT = text("INSERT INTO benchmark_pool_orders (id, body) VALUES (:id, :body)")

Damage = Callable[[list[Any], Any], list[Any]]

DAMAGES: dict[str, Damage] = {
    "lost": lambda found, _: found[:3] + found[4:],
    "last one lost": lambda found, _: found[:-1],
    "doubled": lambda found, _: [*found, found[3]],
    "altered": lambda found, altered: [*found[:3], altered, *found[4:]],
    "exchanged for another": lambda found, _: [*found[:3], found[2], *found[4:]],
    "added": lambda found, altered: [*found, altered],
    "all lost": lambda _found, _altered: [],
}

each_damage = pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))


# --- numbered records: producer.py, processor.py, direct.py -------------------------------------------------------------------

WRITTEN = {0: 5, 7: 3}


def all_of(records: ModuleType) -> list[bytes]:
    return [records.record(writer, number) for writer, total in WRITTEN.items() for number in range(total)]


def test_records_may_come_in_any_order(benchmark_module: Import) -> None:
    records = benchmark_module("records")

    assert records.check_records("x", "rows", WRITTEN, reversed(all_of(records))) == 8


@each_damage
@pytest.mark.parametrize("altered", ["in its padding", "unknown writer", "never reached", "another size", "text"])
def test_damage_of_numbered_records_is_noticed(benchmark_module: Import, damage: Damage, altered: str) -> None:
    records = benchmark_module("records")
    content = {
        "in its padding": records.record(0, 3)[:-1] + b"y",
        "unknown writer": records.record(3, 0),
        "never reached": records.record(7, 3),
        "another size": records.record(0, 3)[:-1],
        "text": b"x" * 200,
    }[altered]

    with pytest.raises(records.VerificationError):
        records.check_records("x", "rows", WRITTEN, damage(all_of(records), content))


def test_records_have_200_bytes(benchmark_module: Import) -> None:
    records = benchmark_module("records")

    assert {len(content) for content in all_of(records)} == {200}
    assert records.place_of(records.record(7, 2)) == (7, 2)


# --- units of work: recipe.py, tuning.py, pool.py -----------------------------------------------------------------------------


@pytest.fixture
def stored(benchmark_module: Import, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The rows and messages that the verification of recipe.py finds; at first those of two writers' units."""
    verification, workload = benchmark_module("verification"), benchmark_module("workload")
    units = [unit for writer, total in WRITTEN.items() for unit, _ in zip(workload.units(writer), range(total), strict=False)]
    found = SimpleNamespace(rows=list(units), messages=[unit.message for unit in units], spent=sum(u.amount for u in units))
    monkeypatch.setattr(verification, "rows", lambda _: found.rows)
    monkeypatch.setattr(verification, "spent", lambda _: found.spent)
    monkeypatch.setattr(verification, "waiting_rows", lambda _: 0)
    monkeypatch.setattr(
        verification, "read_committed", lambda *_: [SimpleNamespace(value=message) for message in found.messages]
    )
    found.verify = lambda: verification.verify("recipe", None, {}, "topic", done=WRITTEN)
    found.altered = next(workload.units(3))
    return found


def test_undamaged_units_are_counted(stored: SimpleNamespace) -> None:
    assert stored.verify() == 8


@each_damage
@pytest.mark.parametrize("where", ["rows", "messages", "both"])
def test_damage_of_units_is_noticed(benchmark_module: Import, stored: SimpleNamespace, damage: Damage, where: str) -> None:
    """Also if rows and messages agree with each other."""
    if where in ("rows", "both"):
        stored.rows = damage(stored.rows, stored.altered)
        stored.spent = sum(unit.amount for unit in stored.rows)
    if where in ("messages", "both"):
        stored.messages = damage(stored.messages, stored.altered.message)

    with pytest.raises(benchmark_module("records").VerificationError):
        stored.verify()


@each_damage
@pytest.mark.parametrize("where", ["rows", "messages", "both"])
def test_damage_of_the_pools_orders_is_noticed(
    benchmark_module: Import, monkeypatch: pytest.MonkeyPatch, damage: Damage, where: str
) -> None:
    records, orders = benchmark_module("records"), benchmark_module("orders")
    cases = benchmark_module("pool_cases")
    case = cases.PoolCase.of(cases.Point("threads", "core", 2), "pool", pool_size=1)
    bodies = [orders.Order(caller, number).body for caller, total in WRITTEN.items() for number in range(total)]
    damaged = damage(bodies, bodies[3][:-3] + "!" + bodies[3][-2:])
    rows, messages = (damaged if where in (what, "both") else bodies for what in ("rows", "messages"))
    monkeypatch.setattr(orders, "read_committed", lambda *_: [SimpleNamespace(value=body.encode()) for body in messages])
    database = create_engine("sqlite://", poolclass=StaticPool)
    orders.WORK.prepare(database)

    def verify(rows: list[str]) -> int:
        with database.begin() as connection:
            connection.execute(text("DELETE FROM benchmark_pool_orders"))
            for number, body in enumerate(rows):
                connection.execute(INSERT, {"id": number, "body": body})
        found: int = orders.WORK.verify(case, database, {}, "topic", WRITTEN)
        return found

    with pytest.raises(records.VerificationError):
        verify(rows)
    messages = bodies
    assert verify(bodies) == 8
    database.dispose()


# --- flights: spark.py --------------------------------------------------------------------------------------------------------

FLIGHTS = {
    "day": (pa.int32(), [1, 2, None]),
    "carrier": (pa.string(), ["UA", None, ""]),
    "time_hour": (pa.timestamp("us", "UTC"), [datetime(2013, 1, 1, hour, tzinfo=UTC) for hour in (10, 11, 12)]),
}
ROWS = 8


@pytest.fixture
def frame(benchmark_module: Import, tmp_path: Path) -> Any:
    """Three flights, repeated up to eight rows."""
    flights = pa.table({name: pa.array(values, kind) for name, (kind, values) in FLIGHTS.items()})
    return benchmark_module("spark_flights").Frame(tmp_path, ROWS, flights)


def message(number: int, **other: object) -> tuple[bytes, bytes]:
    """Key and value as Spark writes them: without columns that are null."""
    row: dict[str, Any] = {"id": number, **{name: values[number % 3] for name, (_, values) in FLIGHTS.items()}, **other}
    content = {name: value.isoformat() if isinstance(value, datetime) else value for name, value in row.items()}
    return str(number).encode(), json.dumps({name: value for name, value in content.items() if value is not None}).encode()


def test_the_messages_of_all_flights_are_right_in_any_order(benchmark_module: Import, frame: Any) -> None:
    flights = benchmark_module("spark_flights")

    flights.check("x", flights.parsed(iter([message(number) for number in reversed(range(ROWS))]), frame), frame)


@each_damage
@pytest.mark.parametrize(
    "altered",
    [
        message(3, time_hour=datetime(2013, 1, 1, 10, 0, 1, tzinfo=UTC)),
        message(3, time_hour=None),
        message(3, carrier="UB"),
        message(3, carrier=""),
        message(3, day=None),
        message(3, more="x"),
        message(ROWS),
        message(-1),
        (b"4", message(3)[1]),
        (b"3", b""),
        (b"3", message(3)[1] + b"\n" + message(3)[1]),
        (b"3", message(3)[1][:-1]),
    ],
)
def test_damage_of_flights_is_noticed(
    benchmark_module: Import, frame: Any, damage: Damage, altered: tuple[bytes, bytes]
) -> None:
    flights = benchmark_module("spark_flights")
    messages = damage([message(number) for number in range(ROWS)], altered)

    with pytest.raises(benchmark_module("records").VerificationError):
        flights.check("x", flights.parsed(iter(messages), frame), frame)


def test_the_files_for_spark_have_the_rows(benchmark_module: Import, tmp_path: Path) -> None:
    flights = benchmark_module("spark_flights")

    frame = flights.write_frame(tmp_path, times=3, partitions=2, limit=5)

    read = [parquet.read_table(tmp_path / f"{number}.parquet") for number in range(2)]
    assert (frame.rows, [len(each) for each in read]) == (15, [8, 7])
    flights.check("x", read, frame)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE {} SET time_hour = time_hour + interval '1 ms' WHERE id = 7",
        "UPDATE {} SET carrier = '' WHERE id = 1",
        "DELETE FROM {} WHERE id = 7",
        "INSERT INTO {} SELECT 8, day, carrier, time_hour FROM {} WHERE id = 2",
    ],
)
def test_damage_of_a_table_of_flights_is_noticed(benchmark_module: Import, frame: Any, postgres_url: str, damage: str) -> None:
    flights = benchmark_module("spark_flights")
    database = create_engine(postgres_url)
    flights.make_table(database, frame)
    with database.begin() as connection:
        connection.execute(
            text(f"INSERT INTO {flights.TABLE} VALUES (:id, :day, :carrier, :time_hour)"),
            frame.rows_of(range(ROWS)).to_pylist(),
        )
    flights.check("x", flights.stored(database, frame), frame)

    with database.begin() as connection:
        connection.execute(text(damage.replace("{}", flights.TABLE)))

    with pytest.raises(benchmark_module("records").VerificationError):
        flights.check("x", flights.stored(database, frame), frame)
    flights.remove(database)
    database.dispose()
