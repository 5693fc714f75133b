"""The query for the functions that a statement calls, in a PostgreSQL database with a schema for each of many tenants."""

from __future__ import annotations

import sqlalchemy as sa

from dualwrite.stores.sql.postgresql_catalog import ROUTINES, routines
from dualwrite.testing.postgres import PostgresServer

TENANTS = """
DO $$ DECLARE tenant text; BEGIN
    FOR number IN 1..50 LOOP
        tenant := 'tenant' || number;
        EXECUTE 'CREATE SCHEMA ' || tenant;
        EXECUTE 'SET LOCAL search_path TO ' || tenant;
        CREATE TABLE parents (id int PRIMARY KEY);
        CREATE TABLE orders (id int PRIMARY KEY REFERENCES parents ON DELETE CASCADE, who text DEFAULT current_user);
    END LOOP;
END $$;
CREATE FUNCTION public.noted() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM 50; RETURN NULL; END';
CREATE TRIGGER noted AFTER DELETE ON tenant50.orders FOR EACH STATEMENT EXECUTE FUNCTION public.noted();
ANALYZE;
"""


def test_it_finds_a_trigger_and_is_too_cheap_to_be_compiled(postgres_server: PostgresServer) -> None:
    """PostgreSQL compiles a query whose estimated costs are above a limit; this one would take seconds then."""
    engine = sa.create_engine(postgres_server.create_database("tenants"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(TENANTS)
        (trigger,) = routines(connection, frozenset({"delete", "from", "parents"}))
        explain = sa.text(f"EXPLAIN (FORMAT JSON) {ROUTINES.text}")
        plan = connection.execute(explain, {"names": ["delete", "from", "parents"]}).scalar_one()
        limit = connection.exec_driver_sql("SHOW jit_above_cost").scalar_one()
    assert "PERFORM 50" in (trigger.source or "")
    assert plan[0]["Plan"]["Total Cost"] < float(limit)
