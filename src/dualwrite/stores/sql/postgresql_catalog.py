"""What PostgreSQL's catalogs show: which functions a statement may call, by the names in it, and where our tables are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import Connection, text

from dualwrite.errors import ConfigurationError
from dualwrite.stores.sql.session_text import Routine
from dualwrite.stores.sql.tables import TABLE_NAME, decoded

# Sets of oids are arrays, as far as possible. PostgreSQL finds those in its catalogs' indexes, and does not overestimate how
# many there are: it compiles a query that looks expensive (`jit_above_cost`), which takes seconds.
ROUTINES: Final = text(
    r"""
    WITH RECURSIVE named(names) AS (SELECT CAST(:names AS text[])),
    cascades(written, also) AS MATERIALIZED (
        SELECT k.confrelid, k.conrelid FROM pg_catalog.pg_constraint k
        WHERE k.contype = 'f' AND NOT (k.confdeltype IN ('a', 'r') AND k.confupdtype IN ('a', 'r'))
    ),
    -- the tables and views, what is read through views, and what is written through partitions and foreign keys;
    -- objects of PostgreSQL itself have an oid below 16384
    reached(oid) AS (
        SELECT pg_catalog.unnest(ARRAY(
            SELECT c.oid FROM pg_catalog.pg_class c, named WHERE pg_catalog.lower(c.relname) = ANY(names) AND c.oid >= 16384))
        UNION
        SELECT n.oid FROM reached r CROSS JOIN LATERAL (
            SELECT i.inhrelid FROM pg_catalog.pg_inherits i WHERE i.inhparent = r.oid
            UNION ALL SELECT k.also FROM cascades k WHERE k.written = r.oid
            UNION ALL SELECT CAST(m.relation[1] AS oid) FROM pg_catalog.pg_rewrite w,
                pg_catalog.regexp_matches(CAST(w.ev_action AS text), '[:]relid (\d+)', 'g') m(relation)
                WHERE w.ev_class = r.oid
        ) n(oid) WHERE n.oid >= 16384
    ),
    -- expressions as PostgreSQL stores them
    expressions(tree) AS (
        SELECT pg_catalog.concat(w.ev_qual, w.ev_action) FROM pg_catalog.pg_rewrite w
            WHERE w.ev_class = ANY(ARRAY(SELECT oid FROM reached))
        UNION ALL SELECT CAST(d.adbin AS text) FROM pg_catalog.pg_attrdef d
            WHERE d.adrelid = ANY(ARRAY(SELECT oid FROM reached))
        UNION ALL SELECT pg_catalog.concat(o.polqual, o.polwithcheck) FROM pg_catalog.pg_policy o
            WHERE o.polrelid = ANY(ARRAY(SELECT oid FROM reached))
        UNION ALL SELECT pg_catalog.concat(x.indexprs, x.indpred) FROM pg_catalog.pg_index x
            WHERE x.indrelid = ANY(ARRAY(SELECT oid FROM reached))
        UNION ALL SELECT CAST(g.tgqual AS text) FROM pg_catalog.pg_trigger g
            WHERE g.tgrelid = ANY(ARRAY(SELECT oid FROM reached))
        UNION ALL SELECT CAST(k.conbin AS text) FROM pg_catalog.pg_constraint k WHERE k.contype = 'c' AND (
            k.conrelid = ANY(ARRAY(SELECT oid FROM reached))
            OR k.contypid = ANY(ARRAY(
                SELECT a.atttypid FROM pg_catalog.pg_attribute a WHERE a.attrelid = ANY(ARRAY(SELECT oid FROM reached))
                UNION
                SELECT t.oid FROM pg_catalog.pg_type t, named WHERE pg_catalog.lower(t.typname) = ANY(names))))
        UNION ALL SELECT CAST(p.proargdefaults AS text) FROM pg_catalog.pg_proc p, named
            WHERE pg_catalog.lower(p.proname) = ANY(names)
    ),
    called(oid) AS (
        SELECT CAST(m.function[2] AS oid) FROM expressions e,
            pg_catalog.regexp_matches(e.tree, '[:](funcid|opfuncid|aggfnoid|winfnoid) (\d+)', 'g') m(function)
        UNION SELECT p.oid FROM pg_catalog.pg_proc p, named WHERE pg_catalog.lower(p.proname) = ANY(names) AND p.oid >= 16384
        UNION SELECT g.tgfoid FROM pg_catalog.pg_trigger g
            WHERE g.tgrelid = ANY(ARRAY(SELECT oid FROM reached)) AND NOT g.tgisinternal
        UNION SELECT v.evtfoid FROM pg_catalog.pg_event_trigger v, named
            WHERE names && ARRAY['create', 'alter', 'drop', 'comment', 'grant', 'revoke', 'refresh', 'import', 'security',
                'into']
        -- the statement does not name these: few databases have one that is not written in C
        UNION SELECT s.castfunc FROM pg_catalog.pg_cast s WHERE s.castfunc >= 16384
        UNION SELECT CAST(o.oprcode AS oid) FROM pg_catalog.pg_operator o WHERE o.oprcode >= 16384
    ),
    and_aggregated(oid) AS (
        SELECT oid FROM called
        UNION SELECT f.oid FROM pg_catalog.pg_aggregate a,
            pg_catalog.unnest(ARRAY[CAST(a.aggtransfn AS oid), a.aggfinalfn, a.aggcombinefn]) f(oid)
            WHERE a.aggfnoid = ANY(ARRAY(SELECT oid FROM called))
    )
    -- functions written in C, and most of PostgreSQL's own, leave nothing behind; the other ones of PostgreSQL are calls
    -- of their names in SQL
    SELECT CASE l.lanname WHEN 'internal' THEN pg_catalog.regexp_replace(p.prosrc, '_by_name$|_int[48]+$', '') || '()'
        ELSE p.prosrc END,
        CASE l.lanname WHEN 'internal' THEN 'sql' ELSE l.lanname END, p.oid
    FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_language l ON l.oid = p.prolang
    WHERE p.oid = ANY(ARRAY(SELECT oid FROM and_aggregated)) AND (
        l.lanname NOT IN ('internal', 'c') OR (l.lanname = 'internal' AND p.prosrc ~
        '^(set_config_by_name$|setseed$|pg_(try_)?advisory_lock_|(query|cursor|table|schema|database)_to_xml|ts_(stat|rewrite))'))
    """
)
_BODY: Final = text("SELECT pg_catalog.pg_get_functiondef(CAST(:oid AS oid))")
_TABLES: Final = text(
    "SELECT c.relname, n.nspname, pg_catalog.pg_backend_pid() AS pid FROM pg_catalog.pg_class c "
    "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
    "WHERE c.relkind IN ('r', 'p', 'v', 'f') AND pg_catalog.left(c.relname::text, 6) = 'kafka_' "
    "AND n.nspname = ANY (pg_catalog.current_schemas(false)) AND pg_catalog.left(n.nspname::text, 8) <> 'pg_temp_' "
    "ORDER BY pg_catalog.array_position(pg_catalog.current_schemas(false), n.nspname) DESC"
)
"""The tables that unqualified names may mean, the first schema of the search_path last; no temporary ones."""
_PID: Final = text("SELECT pg_catalog.pg_backend_pid()")
_AS_CONNECTED: Final = text(
    "SELECT pg_catalog.set_config('search_path', reset_val, true) FROM pg_catalog.pg_settings WHERE name = 'search_path'"
)


def routines(connection: Connection, names: frozenset[str]) -> list[Routine]:
    """See StoreDialect.routines."""
    found = connection.execute(ROUTINES, {"names": list(names)}).all()
    return [
        # a body in standard SQL (`RETURN …`, `BEGIN ATOMIC …`) is stored as a tree
        Routine(decoded(source or connection.scalar(_BODY, {"oid": oid})), decoded(language))
        for source, language, oid in found
    ]


def schemas_as_connected(connection: Connection, *, pid_at_login: int) -> Mapping[str, str] | None:
    """The schema of each table whose name begins like ours, on a connection that nobody has used before.

    None if a pooler is in between, which another process id than at login shows: another client's `SET search_path` may still
    be in force on the connection to the server.
    """
    rows: Any = connection.execute(_TABLES).all()
    pid = rows[0].pid if rows else connection.scalar(_PID)
    return _schemas(rows) if pid == pid_at_login else None


def schemas_in_search_path(connection: Connection) -> Mapping[str, str]:
    """The schema of each table whose name begins like ours, as an unqualified name would be resolved.

    The connection may have been used before, and is in no transaction.

    Raises:
        ConfigurationError: Its search_path means another table than the one that it was made with.
    """
    found = _schemas(connection.execute(_TABLES))
    connection.execute(_AS_CONNECTED)
    as_connected = _schemas(connection.execute(_TABLES))
    connection.rollback()
    now, first = found.get(TABLE_NAME), as_connected.get(TABLE_NAME)
    if None not in (now, first) and now != first:
        raise ConfigurationError(
            f"There is a table {TABLE_NAME} in the schema {first!r} and one in {now!r}, and either may be meant.",
            cause="the connection comes from a pool or a pooler, and its search_path was changed after it was made",
            next_step=f"name the schema that recovery shall read, too: schema={first!r}, or DUALWRITE_SCHEMA",
        )
    return found if first is None else as_connected


def _schemas(rows: Any) -> dict[str, str]:
    return {decoded(row.relname): decoded(row.nspname) for row in rows}
