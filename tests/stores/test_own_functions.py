"""Which functions of a statement users have made, as the database says: nobody knows what these leave behind in a session."""

from __future__ import annotations

import pytest
import sqlalchemy as sa

from dualwrite.stores.sql.engines import dialect_of
from dualwrite.stores.sql.isolation import Effect, SessionEffects
from dualwrite.testing.postgres import PostgresServer
from fixtures.tables import table

LONG = "log_in_" + "x" * 90
POSTGRESQL = f"""
CREATE SCHEMA elsewhere;
CREATE FUNCTION log_in(text) RETURNS text LANGUAGE sql AS 'SELECT set_config(''app.tenant'', $1, true)';
CREATE FUNCTION elsewhere.log_out() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION "Log In"() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION "LogIn"() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION {LONG}() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION set_it(text, text, bool) RETURNS text LANGUAGE internal AS 'set_config_by_name';
CREATE AGGREGATE gathered(int) (SFUNC = int4pl, STYPE = int);
CREATE FUNCTION in_c() RETURNS language_handler LANGUAGE c AS '$libdir/plpgsql', 'plpgsql_call_handler';
CREATE FUNCTION max(text, text) RETURNS text LANGUAGE sql AS 'SELECT $1';
ALTER EXTENSION plpgsql ADD FUNCTION max(text, text);
CREATE TABLE orders (id int, log_in text);
"""


@pytest.fixture(scope="module")
def engine(postgres_server: PostgresServer) -> sa.Engine:
    made = sa.create_engine(postgres_server.create_database("own_functions"), poolclass=sa.NullPool)
    with made.begin() as connection:
        connection.exec_driver_sql(POSTGRESQL)
    return made


@table(
    ("sql", "effect"),
    [
        ("SELECT log_in('a')", Effect.SESSION),
        ("SELECT public.LOG_IN ('a')", Effect.SESSION),
        ("SELECT elsewhere.log_out()", Effect.SESSION),
        ('SELECT "Log In"()', Effect.SESSION),
        ('SELECT "LogIn"()', Effect.SESSION),
        (f"SELECT {LONG}()", Effect.SESSION),
        ("SELECT set_it('a', 'b', true)", Effect.SESSION),
        ("SELECT in_c()", Effect.SESSION),
        ("SELECT gathered(id) FROM orders", Effect.SESSION),
        ("SELECT id, log_in FROM orders WHERE lower(log_in) IN ('a') AND now() > '2026-01-01'", Effect.NONE),
        ("INSERT INTO orders (id, log_in) VALUES (1, coalesce(NULL, gen_random_uuid()::text))", Effect.NONE),
        ("WITH orders(id) AS (SELECT 1) SELECT sum(id) OVER (PARTITION BY id) FROM orders", Effect.NONE),
        ("SELECT max(id) FROM orders", Effect.NONE),
    ],
)
def test_functions_of_postgresql(engine: sa.Engine, sql: str, effect: Effect) -> None:
    dialect = dialect_of(engine)
    with engine.connect() as connection:
        found = SessionEffects("postgresql").of(sql, (), lambda names: dialect.has_own_functions(connection, names))
    assert found is effect
