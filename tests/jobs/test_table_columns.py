"""Compares frames with their tables: reflection in a real database, and one error with all mismatches."""

from __future__ import annotations

import pyarrow as pa
import pytest
import sqlalchemy as sa

from dualwrite.errors import ConfigurationError
from dualwrite.spark.columns import TargetTable, compare, split_name, table_columns
from fixtures.mysql_server import MYSQLD
from fixtures.tables import table as cases

UTC = pa.timestamp("us", "UTC")
LOCAL = pa.timestamp("us")


def look_up(url: str, dbtable: str, *ddl: str, schema: str | None = None) -> TargetTable:
    engine = sa.create_engine(url)
    try:
        with engine.begin() as connection:
            for statement in ddl:
                connection.exec_driver_sql(statement)
            return table_columns(connection, dbtable, schema)
    finally:
        engine.dispose()


def problems(table: TargetTable, frame: dict[str, pa.DataType], keys: tuple[str, ...] = ()) -> list[str]:
    try:
        compare(pa.schema(list(frame.items())), table, keys)
    except ConfigurationError as error:
        found: list[str] = error.problems
        return found if all(problem in str(error) for problem in found) else [str(error)]
    return []


def taken(table: TargetTable, kind: pa.DataType) -> set[str]:
    """The columns that accept a type of the frame."""
    return {column.name for column in table.columns if not problems(table, {column.name: kind})}


POSTGRESQL = """CREATE TABLE t (
    small smallint, int integer, big bigint, real real, double double precision, number numeric, price
    numeric(10,2), whole numeric(20), bool boolean, text text, varchar varchar(20), char char(3), bytes bytea,
    date date, local timestamp, moment timestamptz, time time, json json, jsonb jsonb, uuid uuid, inet inet,
    ints integer[], span interval, mood mood, post post
)"""
STRINGS = {"text", "varchar", "char"}
READ_FROM_TEXT = {"json", "jsonb", "uuid", "inet", "ints", "span", "mood"}


@pytest.fixture
def postgres_types(postgres_url: str) -> TargetTable:
    return look_up(
        postgres_url,
        "t",
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE DOMAIN post AS text CHECK (length(VALUE) = 5)",
        POSTGRESQL,
    )


@cases(
    "kind, expected",
    [
        (pa.int8(), {"small", "int", "big", "real", "double", "number", "price", "whole"}),
        (pa.int16(), {"small", "int", "big", "real", "double", "number", "price", "whole"}),
        (pa.int32(), {"int", "big", "double", "number", "whole"}),
        (pa.int64(), {"big", "number", "whole"}),
        (pa.float32(), {"real", "double", "number"}),
        (pa.float64(), {"double", "number"}),
        (pa.decimal128(10, 2), {"number", "price"}),
        (pa.decimal128(8, 1), {"number", "price"}),
        (pa.decimal128(9, 0), {"int", "big", "number", "whole"}),
        (pa.decimal128(10, 3), {"number"}),
        (pa.decimal128(38, 18), {"number"}),
        (pa.bool_(), {"bool"}),
        (pa.string(), STRINGS | READ_FROM_TEXT | {"post"}),
        (pa.large_string(), STRINGS | READ_FROM_TEXT | {"post"}),
        (pa.binary(), {"bytes"}),
        (pa.date32(), {"date", "local"}),
        (LOCAL, {"local"}),
        (UTC, {"moment"}),
        (pa.time64("us"), {"time"}),
        (pa.duration("us"), {"span"}),
    ],
)
def test_types_that_fit_on_postgresql(postgres_types: TargetTable, kind: pa.DataType, expected: set[str]) -> None:
    assert taken(postgres_types, kind) == expected


def test_types_are_shown_as_the_server_names_them(postgres_types: TargetTable) -> None:
    written = {column.name: column.ddl for column in postgres_types.columns}
    assert (written["price"], written["varchar"], written["ints"]) == ("numeric(10,2)", "character varying(20)", "integer[]")
    assert (written["mood"], written["post"], written["moment"]) == ("mood", "post", "timestamp with time zone")


MARIADB = f"""CREATE TABLE t (
    tiny tinyint, small smallint, medium mediumint, `int` int, big bigint, counter bigint unsigned, bool bool,
    `float` float, `double` double, price decimal(10,2), `text` longtext, `varchar` varchar(20), bytes blob,
    fixed binary(4), `date` date, `local` datetime(6), moment timestamp(6) NULL, `time` time(6), json json,
    mood enum('good', 'bad'), uuid {"uuid" if MYSQLD is None else "char(36)"}
)"""


@pytest.fixture
def mariadb_types(mariadb_url: str) -> TargetTable:
    return look_up(mariadb_url, "t", MARIADB)


@cases(
    "kind, expected",
    [
        (pa.int8(), {"tiny", "small", "medium", "int", "big", "counter", "bool", "float", "double", "price"}),
        (pa.int32(), {"int", "big", "counter", "double"}),
        (pa.int64(), {"big", "counter"}),
        (pa.float32(), {"float", "double"}),
        (pa.float64(), {"double"}),
        (pa.decimal128(10, 2), {"price"}),
        (pa.bool_(), {"tiny", "bool", "small", "medium", "int", "big", "counter"}),
        (pa.string(), {"text", "varchar", "json", "mood", "uuid"}),
        (pa.binary(), {"bytes", "fixed"}),
        (pa.date32(), {"date", "local"}),
        (LOCAL, {"local"}),
        (UTC, {"local", "moment"}),
        (pa.time64("us"), {"time"}),
        (pa.duration("us"), set()),
    ],
)
def test_types_that_fit_on_mariadb(mariadb_types: TargetTable, kind: pa.DataType, expected: set[str]) -> None:
    assert taken(mariadb_types, kind) == expected


SQLITE = """CREATE TABLE t (
    "int" int, "integer" integer, "real" real, "float" float, price decimal(10,2), bool boolean, "text" text,
    bytes blob, "date" date, "local" datetime, json json, any)"""


@pytest.fixture
def sqlite_types(sqlite_url: str) -> TargetTable:
    return look_up(sqlite_url, "t", SQLITE)


@cases(
    "kind, expected",
    [
        (pa.int64(), {"int", "integer", "any"}),
        (pa.float64(), {"real", "float", "any"}),
        (pa.bool_(), {"bool", "int", "integer", "any"}),
        (pa.string(), {"text", "json", "any"}),
        (pa.binary(), {"bytes", "any"}),
        (UTC, {"local", "any"}),
        (pa.date32(), {"date", "local", "any"}),
    ],
)
def test_types_that_fit_on_sqlite(sqlite_types: TargetTable, kind: pa.DataType, expected: set[str]) -> None:
    assert taken(sqlite_types, kind) == expected


# --- one error --------------------------------------------------------------------------------------------------------


def test_every_mismatch_is_in_one_error(postgres_url: str) -> None:
    table = look_up(
        postgres_url,
        "orders",
        "CREATE TABLE orders (id bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY, customer text NOT NULL, amount integer, "
        "twice integer GENERATED ALWAYS AS (amount * 2) STORED, seen boolean NOT NULL DEFAULT false, number bigint GENERATED "
        "ALWAYS AS IDENTITY)",
    )
    found = problems(
        table,
        {"amount": pa.int64(), "twice": pa.int32(), "Seen": pa.bool_(), "extra": pa.string(), "number": pa.int64()},
        ("nr",),
    )
    assert found == [
        "column amount: int64 does not fit integer; cast it to int",
        "column twice: the database generates it; leave it out",
        "column Seen: the table has no column with this name (rename it to 'seen', as in the table)",
        "column extra: the table has no column with this name",
        "column number: the database generates it; leave it out",
        "column customer of the table is NOT NULL and has no default, but the frame has no such column",
        "upsertKeys: the frame has no column nr",
        "upsertKeys: the table has no primary key, unique constraint or unique index over exactly (nr); it has (id)",
    ]
    assert problems(table, {"customer": pa.string()}) == []


def test_nested_types_are_refused(database_url: str) -> None:
    table = look_up(database_url, "t", "CREATE TABLE t (text varchar(100), doc json)")
    for kind in (pa.list_(pa.string()), pa.map_(pa.string(), pa.int8()), pa.struct([("a", pa.int8())])):
        found = problems(table, {"text": kind, "doc": kind})
        assert found == [
            f"column {name}: a table can't store {kind}; convert it in Spark, for instance by to_json"
            for name in ("text", "doc")
        ]


@pytest.mark.parametrize(
    "ddl",
    [
        "CREATE TABLE t (a integer, b integer, c integer, PRIMARY KEY (b, a))",
        "CREATE TABLE t (a integer NOT NULL, b integer NOT NULL, c integer, UNIQUE (a, b))",
        "CREATE TABLE t (a integer, b integer, c integer); CREATE UNIQUE INDEX by_both ON t (a, b)",
    ],
)
def test_upsert_keys_need_a_unique_key_over_them(database_url: str, ddl: str) -> None:
    table = look_up(database_url, "t", *ddl.split(";"))
    frame = {name: pa.int32() for name in "abc"}
    assert problems(table, frame, ("a", "b")) == []
    (problem,) = problems(table, frame, ("a",))[:1]
    assert "over exactly (a); it has (a, b)" in problem


def test_partial_and_expression_indexes_are_not_unique_keys(postgres_url: str) -> None:
    table = look_up(
        postgres_url,
        "t",
        "CREATE TABLE t (a text, b text)",
        "CREATE UNIQUE INDEX i ON t (a) WHERE b IS NULL",
        "CREATE UNIQUE INDEX j ON t (lower(b))",
    )
    assert table.unique_keys == ()


def test_on_mariadb_upsert_refuses_other_unique_keys(mariadb_url: str) -> None:
    table = look_up(
        mariadb_url, "t", "CREATE TABLE t (nr int AUTO_INCREMENT PRIMARY KEY, a int, b int, UNIQUE (a), UNIQUE (b))"
    )
    (problem,) = problems(table, {"a": pa.int32(), "b": pa.int32()}, ("a",))
    assert "also has a unique key over (b)" in problem
    assert problems(table, {"a": pa.int32()}, ("a",)) == []


def test_columns_that_may_be_left_out(database_url: str) -> None:
    table = look_up(
        database_url,
        "t",
        "CREATE TABLE t (id integer NOT NULL PRIMARY KEY, a integer NOT NULL DEFAULT 7, b integer, c integer NOT NULL)",
    )
    assert [name for name in "abc" if any(f"column {name} " in p for p in problems(table, {"id": pa.int32()}))] == ["c"]


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_schema_and_quoted_names(postgres_url: str) -> None:
    made = ('CREATE SCHEMA "My shop"', 'CREATE TABLE "My shop"."Order ""x""" ("Nr %%" integer)')
    table = look_up(postgres_url, '"My shop"."Order ""x"""', *made)
    assert (table.schema, table.name, [column.name for column in table.columns]) == ("My shop", 'Order "x"', ["Nr %"])
    assert look_up(postgres_url, '"Order ""x"""', schema="My shop").full_name == 'My shop.Order "x"'
    assert look_up(postgres_url, "Public.Orders", "CREATE TABLE orders (n integer)").full_name == "public.orders"


def test_a_missing_target_table(database_url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)no table 'orders'.*kafka_transaction_lease"):
        look_up(database_url, "orders")


@cases(
    "text, expected",
    [
        ("a", (None, "a")),
        ("A.b_1", ("a", "b_1")),
        ('"A b".`c``d`', ("A b", "c`d")),
        ('s."x.y"', ("s", "x.y")),
        *((invalid, None) for invalid in ("", ".", "a.", ".a", "a.b.c", "a b", "(SELECT 1) AS t", '"a', 'a"b')),
    ],
)
def test_table_names_are_parsed_as_in_sql(text: str, expected: tuple[str | None, str] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigurationError, match="is not a table name"):
            split_name(text, "postgresql")
    else:
        assert split_name(text, "postgresql") == expected
