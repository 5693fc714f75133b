"""Moves rows through staging to the target, on each real database: every type, append and upsert, without committing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dualwrite.errors import BatchRefusedError, ConfigurationError, StoreError
from dualwrite.jobs.job_tables import StagedRows, quoted_name
from dualwrite.spark.columns import compare, table_columns
from dualwrite.spark.staging import StagingTable
from dualwrite.testing.postgres import PostgresServer
from fixtures.mysql_server import MYSQLD

MOMENT = datetime(2026, 1, 31, 12, 30, 15, 123456, UTC)
LOCAL = MOMENT.replace(tzinfo=None)
ID = "orders.0.0"


def staged_rows(table: StagingTable) -> StagedRows:
    return StagedRows(quoted_name(table.name, table.schema))


@pytest.fixture
def engine_of() -> Iterator[Callable[..., sa.Engine]]:
    with ExitStack() as made:

        def make(url: str, **options: Any) -> sa.Engine:
            engine = sa.create_engine(url, **options)
            made.callback(engine.dispose)
            return engine

        yield make


@pytest.fixture
def engine(database_url: str, engine_of: Callable[..., sa.Engine]) -> sa.Engine:
    return engine_of(database_url)


@pytest.fixture
def postgres(postgres_url: str, engine_of: Callable[..., sa.Engine]) -> sa.Engine:
    return engine_of(postgres_url)


@pytest.fixture
def mariadb(mariadb_url: str, engine_of: Callable[..., sa.Engine]) -> sa.Engine:
    return engine_of(mariadb_url)


@pytest.fixture
def sqlite(sqlite_url: str, engine_of: Callable[..., sa.Engine]) -> sa.Engine:
    return engine_of(sqlite_url)


def execute(engine: sa.Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(sa.text(statement))


def read(engine: sa.Engine, query: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(sa.text(query))]


def staging(
    engine: sa.Engine, schema: pa.Schema, keys: tuple[str, ...] = (), dbtable: str = "t", **options: Any
) -> StagingTable:
    with engine.connect() as connection:
        table = table_columns(connection, dbtable)
    compare(schema, table, keys)
    made = StagingTable(table, schema.names, **options)
    made.ensure(engine)
    return made


def load(engine: sa.Engine, table: StagingTable, *batches: pa.RecordBatch, key: tuple[str, int] = (ID, 1)) -> int:
    with engine.begin() as connection:
        return load_in(connection, table, *batches, key=key)


def load_in(connection: sa.Connection, table: StagingTable, *batches: pa.RecordBatch, key: tuple[str, int] = (ID, 1)) -> int:
    with table.writer(connection, *key) as writer:
        for batch in batches:
            writer.add(batch)
        return writer.finish()


def through(engine: sa.Engine, batch: pa.RecordBatch) -> None:
    """Move a batch to the target, in three transactions as in a job."""
    table = staging(engine, batch.schema)
    assert load(engine, table, batch) == len(batch)
    with engine.begin() as connection:
        assert table.move(connection, [(ID, 1)]) == len(batch)
    with engine.begin() as connection:
        assert staged_rows(table).delete(connection, {ID: 1}) == len(batch)


# --- types ------------------------------------------------------------------------------------------------------------


DAY, NOON = date(2026, 1, 31), time(12, 0, 0, 5)
SPAN = timedelta(days=1, microseconds=5)
ELSEWHERE = pa.timestamp("us", "America/New_York")


def check_types(engine: sa.Engine, *columns: tuple[str, Any, pa.DataType | None, Any]) -> None:
    """A value of each type and a NULL arrive: given are a column's type, the value, its type in Arrow, and what is stored."""
    execute(engine, f"CREATE TABLE t ({', '.join(f'c{n} {kind}' for n, (kind, *_) in enumerate(columns))})")
    arrays = {f"c{n}": pa.array([value, None], kind) for n, (_, value, kind, _) in enumerate(columns)}
    through(engine, pa.record_batch(arrays))
    reflected = sa.select(sa.Table("t", sa.MetaData(), autoload_with=engine))  # as SQLAlchemy's users read it
    with engine.connect() as connection:
        found = connection.execute(reflected if engine.dialect.name == "sqlite" else sa.text("SELECT * FROM t")).all()
    first, second = sorted((tuple(row) for row in found), key=lambda row: row[0] is None)
    assert first == tuple(stored for *_, stored in columns)
    assert set(second) == {None}


def test_every_type_on_postgresql(postgres: sa.Engine) -> None:
    execute(postgres, "CREATE TYPE mood AS ENUM ('good', 'bad')")
    uuid, number = UUID("7c9e6679-7425-40de-944b-e07fc1f90ae7"), Decimal("1234567890.123456789")
    check_types(
        postgres,
        ("smallint", 1, pa.int8(), 1),
        ("bigint", -(2**63), pa.int64(), -(2**63)),
        ("real", 0.1, pa.float32(), pytest.approx(0.1)),
        ("double precision", float("inf"), pa.float64(), float("inf")),
        ("numeric", number, pa.decimal128(38, 9), number),
        ("numeric(10,2)", Decimal("-1.50"), pa.decimal128(10, 2), Decimal("-1.50")),
        ("boolean", False, None, False),
        ("text", "", pa.large_string(), ""),
        ("bytea", b"\x00\xff", None, b"\x00\xff"),
        ("date", DAY, None, DAY),
        ("timestamp", LOCAL, None, LOCAL),
        ("timestamptz", MOMENT, ELSEWHERE, MOMENT),
        ("time", NOON, None, NOON),
        ("jsonb", '{"a":[1,null],"b":"x\\""}', None, {"a": [1, None], "b": 'x"'}),
        ("uuid", str(uuid), None, uuid),
        ("integer[]", "{1,2}", None, [1, 2]),
        ("interval", SPAN, None, SPAN),
        ("mood", "bad", pa.dictionary(pa.int32(), pa.string()), "bad"),
    )


def test_every_type_on_mariadb(mariadb: sa.Engine) -> None:
    """In a session with another time zone, in which TIMESTAMP is read."""
    long = Decimal("123456789012345678.90")

    @sa.event.listens_for(mariadb, "connect")
    def elsewhere(raw: Any, _: Any) -> None:
        with raw.cursor() as cursor:
            cursor.execute("SET SESSION time_zone = '+05:00'")

    check_types(
        mariadb,
        ("timestamp(6) NULL", MOMENT, pa.timestamp("us", "UTC"), LOCAL + timedelta(hours=5)),
        ("smallint", 1, pa.int8(), 1),
        ("bigint", -(2**63), pa.int64(), -(2**63)),
        ("double", 0.1, None, 0.1),
        ("decimal(20,2)", long, pa.decimal128(20, 2), long),
        ("bool", True, None, 1),
        ("text", "", None, ""),
        ("blob", b"\x00\xff'\\", None, b"\x00\xff'\\"),
        ("date", DAY, None, DAY),
        ("datetime", DAY, None, datetime(2026, 1, 31)),  # noqa: DTZ001
        ("datetime(6)", LOCAL, None, LOCAL),
        ("datetime(6)", MOMENT, ELSEWHERE, LOCAL),
        ("time(6)", NOON, None, timedelta(hours=12, microseconds=5)),
        ("json", '[{"b":"x\\""}]', None, '[{"b":"x\\""}]' if MYSQLD is None else '[{"b": "x\\""}]'),  # MySQL stores no text
    )
    stored = read(mariadb, "SELECT UNIX_TIMESTAMP(c0) FROM t WHERE c0 IS NOT NULL")
    assert stored == [(Decimal(str(MOMENT.timestamp())),)]
    assert read(mariadb, "SELECT @@session.time_zone") == [("+05:00",)]


def test_every_type_on_sqlite(sqlite: sa.Engine) -> None:
    check_types(
        sqlite,
        ("bigint", -(2**63), pa.int64(), -(2**63)),
        ("double", 0.1, None, 0.1),
        ("decimal(10,2)", Decimal("-1.50"), pa.decimal128(10, 2), Decimal("-1.50")),
        ("boolean", True, None, True),
        ("text", "", None, ""),
        ("blob", b"\x00\xff", None, b"\x00\xff"),
        ("date", DAY, None, DAY),
        ("datetime", DAY, None, datetime(2026, 1, 31)),  # noqa: DTZ001
        ("datetime", MOMENT, ELSEWHERE, LOCAL),
        ("json", '[{"b":"x\\""}]', None, [{"b": 'x"'}]),
        ("", "x", None, "x"),
    )


@pytest.mark.parametrize(
    ("database", "kind", "stored"),
    [
        ("postgres", "timestamp(0)", datetime(2026, 2, 1)),  # noqa: DTZ001
        ("mariadb", "datetime", datetime(2026, 1, 31, 23, 59, 59) if MYSQLD is None else datetime(2026, 2, 1)),  # noqa: DTZ001
    ],
)
def test_fractions_of_seconds_that_a_column_does_not_store(
    request: pytest.FixtureRequest, database: str, kind: str, stored: datetime
) -> None:
    """PostgreSQL and MySQL round them and MariaDB truncates them, as the guide says."""
    engine = request.getfixturevalue(database)
    execute(engine, f"CREATE TABLE t (moment {kind})")
    through(engine, pa.record_batch({"moment": [datetime(2026, 1, 31, 23, 59, 59, 700_000)]}))  # noqa: DTZ001
    assert read(engine, "SELECT moment FROM t") == [(stored,)]


AWKWARD = ["", " ", "\\N", "\\.", "a\n\\.\nb", '"', "'", ",", "\r\n", "\\", "NULL", "%s", ":x", "🐎", "\x01", "a\tb", "'; --"]


def test_awkward_texts_are_stored_unchanged(engine: sa.Engine) -> None:
    charset = "" if engine.dialect.name in ("postgresql", "sqlite") else " CHARACTER SET utf8mb4"  # the database has latin1
    execute(engine, f"CREATE TABLE t (a text, b text){charset}")
    through(engine, pa.record_batch({"a": pa.array([None, *AWKWARD]), "b": pa.array([*AWKWARD, None])}))
    assert sorted(read(engine, "SELECT a, b FROM t"), key=repr) == sorted(
        zip([None, *AWKWARD], [*AWKWARD, None], strict=True), key=repr
    )


def test_awkward_names(engine: sa.Engine) -> None:
    quote = engine.dialect.identifier_preparer.quote_identifier
    names = ["select", "Order Nr", "50 %", "a:b", "ž", 'say "x"', "x,y"]
    table = sa.Table("my table", sa.MetaData(), *(sa.Column(name, sa.Integer) for name in names))
    table.create(engine)
    batch = pa.record_batch({name: pa.array([number, None], pa.int32()) for number, name in enumerate(names)})
    made = staging(engine, batch.schema, dbtable='"my table"')
    load(engine, made, batch)
    with engine.begin() as connection:
        assert made.move(connection, [(ID, 1)]) == 2
    with engine.connect() as connection:
        assert tuple(connection.execute(sa.select(table).where(table.c["select"] == 0)).one()) == tuple(range(len(names)))
    assert quote("50 %") not in made.ddl(engine.dialect) or "%%" not in made.ddl(engine.dialect)


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
rows = st.tuples(st.none() | texts, st.none() | st.binary(max_size=30), st.none() | st.floats(allow_nan=False))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rows, min_size=1, max_size=20), st.integers(0, 5))
def test_any_rows_arrive_on_postgresql(postgres: sa.Engine, given_rows: list[Any], offset: int) -> None:
    execute(postgres, "DROP TABLE IF EXISTS t", "CREATE TABLE t (s text, b bytea, d double precision)")
    kinds = {"s": pa.string(), "b": pa.binary(), "d": pa.float64()}
    arrays = {name: pa.array([row[n] for row in given_rows], kind) for n, (name, kind) in enumerate(kinds.items())}
    part = pa.record_batch(arrays).slice(offset)
    if not len(part):
        return
    through(postgres, part)
    assert sorted(read(postgres, "SELECT s, b, d FROM t"), key=repr) == sorted(given_rows[offset:], key=repr)


def test_bytes_beneath_a_null_are_not_written(postgres: sa.Engine) -> None:
    execute(postgres, "CREATE TABLE t (b bytea)")
    hidden = pa.BinaryArray.from_buffers(
        pa.binary(), 3, [pa.py_buffer(b"\x05"), pa.array([0, 1, 3, 4], pa.int32()).buffers()[1], pa.py_buffer(b"abbc")]
    )
    through(postgres, pa.record_batch({"b": hidden}))
    assert sorted(read(postgres, "SELECT b FROM t"), key=repr) == [(None,), (b"a",), (b"c",)]


def test_a_number_unknown_to_the_database_is_refused(engine: sa.Engine) -> None:
    execute(engine, f"CREATE TABLE t (d {'double precision' if engine.dialect.name == 'postgresql' else 'double'})")
    batch = pa.record_batch({"d": pa.array([1.0, None, float("nan")])})
    if engine.dialect.name == "postgresql":
        through(engine, batch)
        assert len(read(engine, "SELECT d FROM t WHERE d = 'NaN'")) == 1
        return
    with pytest.raises(StoreError, match="Column d has NaN"):
        through(engine, batch)


def test_a_decimal_of_which_sqlite_would_keep_only_some_digits_is_refused(sqlite: sa.Engine) -> None:
    execute(sqlite, "CREATE TABLE t (price decimal(38,2), any)")
    prices = [Decimal("1234567890123.45"), Decimal("120000000000000000000.00"), None]
    through(sqlite, pa.record_batch({"price": pa.array(prices, pa.decimal128(38, 2))}))
    assert [row[0] for row in read(sqlite, "SELECT price FROM t WHERE price IS NOT NULL")] == [1234567890123.45, 1.2e20]
    long = pa.array([Decimal("12345678901234567890.12")], pa.decimal128(38, 2))
    with pytest.raises(
        StoreError, match=r"Column price has the number 12345678901234567890\.12, of which SQLite would keep 15"
    ):
        through(sqlite, pa.record_batch({"price": long}))
    through(sqlite, pa.record_batch({"any": long}))
    assert read(sqlite, "SELECT any FROM t WHERE any IS NOT NULL") == [("12345678901234567890.12",)]


@pytest.mark.parametrize(
    ("name", "value"), [("s", pa.array(["too long"])), ("n", pa.array([-1], pa.int32()))], ids=["a text", "a number"]
)
def test_a_server_without_strict_mode_alters_no_value(
    mariadb_url: str, engine_of: Callable[..., sa.Engine], name: str, value: pa.Array
) -> None:
    engine = engine_of(mariadb_url, connect_args={"sql_mode": ""})
    execute(engine, "CREATE TABLE t (s varchar(3), n int unsigned)")
    with pytest.raises(sa.exc.DBAPIError, match=r"Data too long|Out of range"):
        through(engine, pa.record_batch({name: value}))
    assert read(engine, "SELECT @@SESSION.sql_mode") == [("",)]
    assert read(engine, "SELECT * FROM t") == []


# --- keys and transactions ----------------------------------------------------------------------------------------------


def numbers(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(values, pa.int32())})


@pytest.fixture
def counted(engine: sa.Engine) -> StagingTable:
    execute(engine, "CREATE TABLE t (n integer)")
    return staging(engine, numbers().schema)


def test_exactly_the_given_keys_are_moved(engine: sa.Engine, counted: StagingTable) -> None:
    keys = [(ID, 1), (ID, 2), ("Orders.0.0", 1), ("orders.0.0 ", 1), ("orders.1.0", 2)]
    for number, key in enumerate(keys):
        assert load(engine, counted, numbers(number), numbers(number, number), key=key) == 3
    with engine.begin() as connection:
        assert counted.move(connection, [keys[1], keys[4], keys[1], ("none", 7)]) == 6
        assert counted.move(connection, []) == 0
    assert sorted(read(engine, "SELECT n FROM t")) == [(1,)] * 3 + [(4,)] * 3


def test_hundreds_of_keys_at_once(engine: sa.Engine, counted: StagingTable) -> None:
    with engine.begin() as connection:
        for number in range(500):
            load_in(connection, counted, numbers(number), key=(f"orders.{number}.0", number))
        assert counted.move(connection, [(f"orders.{number}.0", number) for number in range(0, 500, 2)]) == 250
    assert sorted(read(engine, "SELECT n FROM t")) == [(number,) for number in range(0, 500, 2)]


def test_rows_are_deleted_by_id_and_fence(engine: sa.Engine, counted: StagingTable) -> None:
    for key in [(ID, 1), (ID, 2), (ID, 3), ("Orders.0.0", 1)]:
        load(engine, counted, numbers(1), key=key)
    with engine.begin() as connection:
        assert staged_rows(counted).delete(connection, {ID: 2}) == 2
        assert staged_rows(counted).delete(connection, {ID: 2}) == 0
    assert sorted(read(engine, f"SELECT dualwrite_id, dualwrite_fence FROM {counted.name}")) == [("Orders.0.0", 1), (ID, 3)]


def test_nothing_is_committed_by_itself(engine: sa.Engine, counted: StagingTable) -> None:
    with engine.connect() as connection:
        connection.begin()
        assert load_in(connection, counted, numbers(1, 2)) == 2
        assert counted.move(connection, [(ID, 1)]) == 2
        assert staged_rows(counted).delete(connection, {ID: 1}) == 2
        connection.rollback()
    assert read(engine, "SELECT n FROM t") == []
    assert read(engine, f"SELECT n FROM {counted.name}") == []


@pytest.mark.parametrize("rows_before", [0, 2500])
def test_a_writer_that_ends_with_an_error_loads_nothing(engine: sa.Engine, counted: StagingTable, rows_before: int) -> None:
    def interrupted() -> None:
        with engine.begin() as connection, counted.writer(connection, ID, 1) as writer:
            writer.add(numbers(*range(rows_before)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert read(engine, f"SELECT n FROM {counted.name}") == []
    assert load(engine, counted, numbers(1)) == 1  # over the same pool


def test_a_finished_writer_frees_the_connection(engine: sa.Engine, counted: StagingTable) -> None:
    with engine.begin() as connection, counted.writer(connection, ID, 1) as writer:
        writer.add(numbers(*range(2500)))
        assert writer.finish() == 2500
        connection.execute(sa.text("SELECT 1"))
    assert read(engine, f"SELECT count(*) FROM {counted.name}") == [(2500,)]


def test_rows_dropped_by_a_trigger_are_not_counted(postgres: sa.Engine) -> None:
    execute(
        postgres,
        "CREATE TABLE t (n integer)",
        "CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF NEW.n % 2 = 0 THEN RETURN NULL; END IF; RETURN NEW; END'",
        "CREATE TRIGGER odd BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION odd()",
    )
    table = staging(postgres, numbers().schema)
    load(postgres, table, numbers(1, 2, 3))
    with postgres.begin() as connection:
        assert table.move(connection, [(ID, 1)]) == 2


# --- upsert -----------------------------------------------------------------------------------------------------------


def prices(*rows: tuple[int | None, str, int | None]) -> pa.RecordBatch:
    a, b, price = zip(*rows, strict=True)
    return pa.record_batch({"b": pa.array(b), "price": pa.array(price, pa.int32()), "a": pa.array(a, pa.int32())})


@pytest.fixture
def priced(engine: sa.Engine) -> StagingTable:
    execute(engine, "CREATE TABLE t (a integer, b varchar(20), price integer, note varchar(20) DEFAULT 'new', UNIQUE (a, b))")
    execute(engine, "INSERT INTO t VALUES (1, 'x', 10, 'old'), (2, 'x', 20, 'old'), (3, 'x', 30, 'old')")
    return staging(engine, prices((1, "x", 1)).schema, ("a", "b"))


def test_upsert_replaces_by_its_keys_and_counts_every_row(engine: sa.Engine, priced: StagingTable) -> None:
    load(engine, priced, prices((1, "x", 11), (2, "x", 20), (4, "x", None), (None, "x", 5), (None, "x", 6)))
    with engine.begin() as connection:  # one is replaced, one stays the same, three are new: two of them have no key
        assert priced.move(connection, [(ID, 1)], upsert_keys=["a", "b"]) == 5
    assert sorted(read(engine, "SELECT a, price, note FROM t"), key=repr) == sorted(
        [(1, 11, "old"), (2, 20, "old"), (3, 30, "old"), (4, None, "new"), (None, 5, "new"), (None, 6, "new")], key=repr
    )


def test_an_ambiguous_batch_is_refused_with_all_its_keys(engine: sa.Engine, priced: StagingTable) -> None:
    load(engine, priced, prices(*((number, "x", 1) for number in range(6))), key=("orders.0.0", 1))
    load(engine, priced, prices(*((number, "x", 2) for number in range(6))), key=("orders.1.0", 1))
    both = [("orders.0.0", 1), ("orders.1.0", 1)]
    with engine.begin() as connection, pytest.raises(BatchRefusedError, match="The batch is ambiguous") as raised:
        priced.move(connection, both, upsert_keys=["a", "b"])
    assert raised.value.what.count("(2 rows)") == 5
    assert "b='x' (2 rows)" in raised.value.what
    with engine.begin() as connection:
        assert priced.move(connection, both[1:], upsert_keys=["a", "b"]) == 6
    assert read(engine, "SELECT count(*) FROM t WHERE price = 2") == [(6,)]


def test_upsert_of_keys_alone(engine: sa.Engine) -> None:
    execute(engine, "CREATE TABLE t (n integer PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    table = staging(engine, numbers().schema, ("n",))
    load(engine, table, numbers(1, 2))
    with engine.begin() as connection:
        assert table.move(connection, [(ID, 1)], upsert_keys=["n"]) == 2
    assert sorted(read(engine, "SELECT n FROM t")) == [(1,), (2,)]


def test_keys_are_compared_by_the_collation_of_the_target(mariadb: sa.Engine) -> None:
    execute(
        mariadb,
        "CREATE TABLE t (a varchar(9) PRIMARY KEY, n integer) CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci",
        "ALTER DATABASE test COLLATE utf8mb4_bin",
    )
    rows = pa.record_batch({"a": ["é", "E"], "n": pa.array([1, 2], pa.int32())})
    table = staging(mariadb, rows.schema, ("a",))
    load(mariadb, table, rows)
    with mariadb.begin() as connection, pytest.raises(BatchRefusedError, match=r"a='(é|E)' \(2 rows\)"):
        table.move(connection, [(ID, 1)], upsert_keys=["a"])


# --- the table ----------------------------------------------------------------------------------------------------------


def test_threads_create_the_table_at_once(engine: sa.Engine) -> None:
    execute(engine, "CREATE TABLE t (n integer)")
    with engine.connect() as connection:
        table = StagingTable(table_columns(connection, "t"), ["n"])
    barrier, failed = threading.Barrier(8), []

    def make() -> None:
        barrier.wait()
        try:
            table.ensure(engine)
        except Exception as error:  # noqa: BLE001  (looked at below)
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert load(engine, table, numbers(1)) == 1


def test_a_half_created_table_is_completed(engine: sa.Engine, counted: StagingTable) -> None:
    with engine.connect() as connection:
        (index,) = sa.inspect(connection).get_indexes(counted.name)
    execute(
        engine, f"DROP INDEX {index['name']}" + (f" ON {counted.name}" if engine.dialect.name in ("mariadb", "mysql") else "")
    )
    counted.ensure(engine)
    counted.ensure(engine)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_indexes(counted.name) == [index]
    assert index["column_names"] == ["dualwrite_id", "dualwrite_fence"]


def test_other_columns_and_other_types_have_a_table_of_their_own(engine: sa.Engine) -> None:
    name = "a_table_with_a_name_that_is_rather_long_" + "ž" * 5
    quote = engine.dialect.identifier_preparer.quote_identifier
    execute(engine, f"CREATE TABLE {quote(name)} (a integer, b integer)", "CREATE TABLE t (a integer, b bigint)")
    with engine.connect() as connection:
        long, short = (table_columns(connection, dbtable) for dbtable in (f'"{name}"', "t"))
    names = {StagingTable(long, ["a"]).name, StagingTable(long, ["a", "b"]).name, StagingTable(short, ["a"]).name}
    assert len(names) == 3
    assert all(len(each.encode()) <= 63 for each in names)
    assert StagingTable(long, ["a"]).name.startswith("dualwrite_staging_a_table_with_a_name_that_is_rather_l")
    StagingTable(long, ["a"]).ensure(engine)


def test_columns_that_cannot_be_staged(engine: sa.Engine) -> None:
    execute(engine, "CREATE TABLE t (a integer, dualwrite_id integer)")
    with engine.connect() as connection:
        table = table_columns(connection, "t")
    for name in ("b", "dualwrite_id"):
        with pytest.raises(ConfigurationError, match=f"its column '{name}' is missing, or its name is reserved"):
            StagingTable(table, [name])


def test_a_table_that_was_altered_is_not_used(engine: sa.Engine, counted: StagingTable) -> None:
    execute(engine, f"ALTER TABLE {counted.name} ADD COLUMN more integer")
    with pytest.raises(ConfigurationError, match="has unexpected columns"):
        counted.ensure(engine)


def test_the_target_may_refuse_null_and_staging_does_not(engine: sa.Engine) -> None:
    execute(engine, "CREATE TABLE t (n integer NOT NULL)")
    table = staging(engine, numbers().schema)
    assert load(engine, table, pa.record_batch({"n": pa.array([None], pa.int32())})) == 1
    with engine.connect() as connection, pytest.raises(sa.exc.IntegrityError):
        table.move(connection, [(ID, 1)])


def test_staging_in_another_schema(postgres: sa.Engine) -> None:
    execute(postgres, "CREATE TABLE t (n integer)", 'CREATE SCHEMA IF NOT EXISTS "My staging"')
    with pytest.raises(ConfigurationError, match="schema 'nowhere' for the staging table does not exist"):
        staging(postgres, numbers().schema, staging_schema="nowhere")
    table = staging(postgres, numbers().schema, staging_schema="My staging")
    load(postgres, table, numbers(1))
    with postgres.begin() as connection:
        assert table.move(connection, [(ID, 1)]) == 1
        assert staged_rows(table).delete(connection, {ID: 1}) == 1
    with postgres.connect() as connection:
        assert sa.inspect(connection).get_table_names(schema="My staging") == [table.name]
    execute(postgres, 'DROP SCHEMA "My staging" CASCADE')


def test_a_missing_privilege_is_reported_with_the_sql_to_run(postgres: sa.Engine, engine_of: Callable[..., sa.Engine]) -> None:
    execute(
        postgres,
        "DROP ROLE IF EXISTS clerk",
        "CREATE ROLE clerk LOGIN",
        "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
        "CREATE TABLE t (n integer)",
        "GRANT INSERT ON t TO clerk",
    )
    clerk = engine_of(postgres.url.set(username="clerk"))
    try:
        with pytest.raises(ConfigurationError, match="no privilege to create it") as raised:
            staging(clerk, numbers().schema)
        sql = raised.value.next_step.partition("to clerk: ")[2]
        assert sql.startswith("CREATE UNLOGGED TABLE IF NOT EXISTS dualwrite_staging_t_")
        execute(postgres, *sql.split(";"))
        with clerk.connect() as connection:
            table = StagingTable(table_columns(connection, "t"), ["n"])
        execute(postgres, f"GRANT SELECT, INSERT, DELETE ON {table.name} TO clerk")
        table.ensure(clerk)
        load(clerk, table, numbers(1))
        with clerk.begin() as connection:
            assert table.move(connection, [(ID, 1)]) == 1
    finally:
        clerk.dispose()
        execute(postgres, "DROP OWNED BY clerk", "DROP ROLE clerk")


@pytest.mark.slow
def test_a_crash_of_postgresql_empties_it(own_postgres_server: PostgresServer) -> None:
    engine = sa.create_engine(own_postgres_server.url)
    execute(engine, "CREATE TABLE t (n integer)")
    table = staging(engine, numbers().schema)
    load(engine, table, numbers(1, 2))
    engine.dispose()
    own_postgres_server.kill()
    own_postgres_server.start()
    with engine.begin() as connection:
        assert table.move(connection, [(ID, 1)]) == 0
    engine.dispose()


def test_negative_zero_is_kept(engine: sa.Engine) -> None:
    """In an AUTO_INCREMENT column, MariaDB by default replaces 0 with the next number."""
    with engine.begin() as connection:
        made = sa.Table("numbered", sa.MetaData(), sa.Column("n", sa.Integer, primary_key=True, autoincrement=True))
        made.create(connection)
        target = table_columns(connection, "numbered")
    table = StagingTable(target, ["n"])
    table.ensure(engine)
    with engine.begin() as connection:
        load_in(connection, table, numbers(0, 5))
        assert table.move(connection, [(ID, 1)]) == 2
    assert sorted(read(engine, "SELECT n FROM numbered")) == [(0,), (5,)]
