"""What a statement leaves behind in the session, by its text: statements, built-in functions, bodies of routines."""

from __future__ import annotations

from dualwrite.stores.sql.session_text import Effect, Routine, SessionEffects, any_is_false, examined, examined_body
from fixtures.tables import table

NONE, TRANSACTION, SESSION = Effect

STATEMENTS = {
    "postgresql": {
        NONE: (
            "SELECT 1",
            "(SELECT 1) UNION (SELECT 2)",
            "/* SET a = 1 */ -- SET b = 2\n SELECT 'SET c = 3; SET d = 4'",
            "INSERT INTO orders (item) VALUES ('it''s; SET a = 1') RETURNING id",
            r"SELECT E'\'; SET a = 1; --'",
            "SELECT $a$; SET a = 1$a$",
            "UPDATE t SET a = 1",
            "WITH x AS (UPDATE t SET a = 1 RETURNING *) SELECT * FROM x",
            "SAVEPOINT sa_savepoint_1; RELEASE SAVEPOINT sa_savepoint_1; ROLLBACK TO SAVEPOINT x",
            "CREATE TABLE temporary_orders (temp int)",
            'SELECT "set_config" FROM t',
            "COPY t FROM STDIN",
            "SELECT pg_advisory_xact_lock(1)",
            "LOCK TABLE t",
            "",
            "SELECT 1;\n",
            "SELECT 1; -- the end",
            "INSERT INTO t (a) VALUES (%s) ON CONFLICT (a) DO UPDATE SET b = now(), c = nextval('s') RETURNING id",
            "WITH x AS (SELECT rank() OVER (ORDER BY a) FROM t) SELECT a ? 'k', a->>'b', a @> '{}' FROM x WHERE b LIKE 'a%'",
            "SELECT temp.value FROM readings temp",
            "SELECT uuid_generate_v4(), ST_SetSRID(ST_MakePoint(%s, %s), 4326)",
            "/* a /* SET b = 1 */ SET c = 2 */ SELECT 1",
            "SELECT * FROM pg_settings",
            "SELECT $1, $2::text",
        ),
        TRANSACTION: (
            "SET LOCAL search_path TO tenant",
            "set\nlocal role app",
            "SET CONSTRAINTS ALL DEFERRED",
            "SET TRANSACTION READ ONLY",
            "SELECT set_config('app.tenant', 'one', true)",
            "SELECT set_config('app.tenant', coalesce('a', 'b'), true::boolean), set_config('a', 'b', TRUE)",
            "INSERT INTO t VALUES (1); SET LOCAL a = 1",
            "CREATE TEMPORARY TABLE x (v int) ON COMMIT DROP",
            "DECLARE c CURSOR FOR SELECT 1",
            "DO $$ BEGIN PERFORM set_config('a', 'b', true); END $$",
            "CALL refresh()",
            "SAVEPOINT mine",
            "/* /* */ ' */ SET LOCAL a = 1; -- '",
            "SELECT a$$ FROM t; SET LOCAL a = 1; SELECT b$$",
            "SELECT $é$'$é$; SET LOCAL a = 1; --'",
        ),
        SESSION: (
            "SET search_path TO tenant",
            "SET SESSION AUTHORIZATION app",
            "SET ROLE app",
            "SET TIME ZONE 'Asia/Tokyo'",
            "RESET ALL",
            "DISCARD ALL",
            "SELECT set_config('a', 'b', false)",
            "SELECT \"pg_catalog\".\"set_config\"('a', 'b', false)",
            "SELECT set_config('a', 'b', 1 = 1)",
            "CREATE TEMP TABLE x (v int)",
            "CREATE TABLE pg_temp.x (v int)",
            "SELECT * INTO TEMPORARY x FROM t",
            "DECLARE c CURSOR WITH HOLD FOR SELECT 1",
            "PREPARE p AS SELECT 1",
            "EXECUTE p",
            "LISTEN orders",
            "LOAD 'auto_explain'",
            "SELECT pg_try_advisory_lock(1)",
            "SELECT setseed(0.5)",
            "SELECT query_to_xml('SELECT 1', true, true, '')",
            "SELECT ts_rewrite('a'::tsquery, 'SELECT 1')",
            "SELECT * FROM crosstab('SELECT 1, 2, 3') AS (a int, b int)",
            "UPDATE pg_settings SET setting = 'tenant' WHERE name = 'search_path'",
            "SELECT U&\"set\\005fconfig\"('a', 'b', true)",
            "SELECT U&\"set!005fconfig\"('a', 'b', true) UESCAPE '!'",
            "SELECT lo_open(1, 262144)",
            "DO $$ BEGIN SET a = 1; END $$",
            "SELECT $$a$$; DO $b$ BEGIN SET a = 1; END $b$",
            "DO LANGUAGE plpython3u $$ import os $$",
            "DO LANGUAGE plpython3u 'import os'",
            "A NEW STATEMENT",
        ),
    },
    "mysql": {
        NONE: (
            "SELECT 'a\\'; SET b = 1'",
            'SELECT "; SET a = 1"',
            "SELECT `set` FROM t # SET a = 1",
            "LOAD DATA LOCAL INFILE 'x' INTO TABLE t",
            "SELECT @rows",
            "SELECT `a\"b` FROM t WHERE c = 'd'",
        ),
        TRANSACTION: ("CALL refresh()",),
        SESSION: (
            "SET @tenant = 1",
            "SET SESSION sql_mode = ''",
            "SET NAMES latin1",
            "USE tenant",
            "SELECT @tenant := 1",
            "SELECT 1 INTO @tenant",
            "/*!50000 SET sql_mode = '' */",
            "CREATE TEMPORARY TABLE x (v int)",
            "SELECT GET_LOCK('a', 1)",
            "HANDLER t OPEN",
        ),
    },
    "sqlite": {
        NONE: ("SELECT [set] FROM t", 'PRAGMA main.table_info("x")', "PRAGMA foreign_keys"),
        SESSION: (
            "PRAGMA case_sensitive_like = ON",
            "PRAGMA case_sensitive_like(1)",
            "CREATE TEMP VIEW x AS SELECT 1",
            "INSERT INTO temp.x VALUES (1)",
            "ATTACH 'x' AS y",
            "SELECT load_extension('x')",
        ),
    },
}


@table(
    ("family", "effect", "sql"),
    [(family, effect, sql) for family, effects in STATEMENTS.items() for effect, texts in effects.items() for sql in texts],
)
def test_a_statement_leaves_behind_what_its_text_shows(family: str, effect: Effect, sql: str) -> None:
    assert examined(sql, family).effect is effect


@table("parameter", ["%s", "%(is_local)s", "%(is_local)s::BOOLEAN", "$3", "%b"])
def test_a_parameter_of_set_config_decides_when_it_is_known(parameter: str) -> None:
    effects = SessionEffects("postgresql")
    sql = f"SELECT set_config('a', 'b', {parameter})"
    assert effects.of(sql, {"is_local": True}, lambda _: ()) is TRANSACTION
    assert effects.of(sql, [("a", True)], lambda _: ()) is TRANSACTION
    for false in (False, 0, "f", "FALSE", "off", " fal ", b"n", None, iter([True])):
        assert any_is_false({"x": false})
        assert effects.of(sql, ("a", false), lambda _: ()) is SESSION


BODIES = {
    "postgresql": {
        NONE: (
            ("plpgsql", "DECLARE n int; BEGIN UPDATE t SET a = 1; NEW.b := 2; RETURN NEW; END"),
            ("sql", "SELECT current_setting('app.tenant')"),
        ),
        TRANSACTION: (
            ("plpgsql", "BEGIN IF x THEN SET LOCAL a = 1; END IF; END"),
            ("sql", "SELECT set_config('app.tenant', $1, true)"),
            ("plpgsql", "BEGIN EXECUTE 'SET LOCAL a = ' || x; END"),
            ("plpgsql", "BEGIN EXECUTE format('INSERT INTO %I VALUES ($1)', x) USING y; END"),
            ("plpgsql", "BEGIN OPEN c FOR SELECT 1; RETURN c; END"),
        ),
        SESSION: (
            ("plpgsql", "BEGIN PERFORM set_config('a', x, local); END"),
            ("plpgsql", "BEGIN EXECUTE 'set role ' || x; END"),
            ("plpgsql", "BEGIN EXECUTE x; END"),
            ("plpgsql", "BEGIN EXECUTE 'SELECT set_config($1, $2, false)'; END"),
            ("plpgsql", "DECLARE n int; BEGIN CREATE TEMP TABLE x AS SELECT 1; END"),
            ("sql", "SET a = 1"),
            ("plpython3u", "plpy.execute('SELECT 1')"),
            ("plpgsql", None),
        ),
    },
    "mysql": {
        NONE: (
            ("SQL", "BEGIN DECLARE y, z INT DEFAULT 1; SET y = 2; UPDATE t SET a = y; RETURN z; END"),
            ("SQL", "SET NEW.a = 1, NEW.b = 2"),
        ),
        SESSION: (
            ("SQL", "BEGIN SET @tenant = x; RETURN 1; END"),
            ("SQL", "BEGIN DECLARE y INT; SET sql_mode = ''; RETURN y; END"),
            ("SQL", "BEGIN SELECT 1 INTO @tenant; RETURN 1; END"),
            ("SQL", None),
        ),
    },
}


@table(
    ("family", "effect", "language", "source"),
    [(family, effect, *body) for family, effects in BODIES.items() for effect, bodies in effects.items() for body in bodies],
)
def test_a_routine_leaves_behind_what_its_body_shows(family: str, effect: Effect, language: str, source: str | None) -> None:
    assert examined_body(source, language, family).effect is effect


@table(
    "first",
    [
        "SELECT log_in('a')",
        "SET LOCAL a = 1; SELECT log_in('a')",
        "CREATE TEMPORARY TABLE x AS SELECT log_in('a')",
        "SELECT pg_advisory_lock(1), log_in('a')",
        "DO $$ BEGIN PERFORM log_in('a'); END $$",
    ],
)
def test_a_function_is_not_taken_for_harmless_because_of_the_statement_that_called_it_first(first: str) -> None:
    def routines(names: frozenset[str]) -> list[Routine]:
        return [Routine("SELECT set_config('app.tenant', $1, true)", "sql")] if "log_in" in names else []

    effects = SessionEffects("postgresql")
    assert effects.of(first, (), routines) >= TRANSACTION
    assert effects.of("SELECT log_in('b')", (), routines) is TRANSACTION


def test_a_text_is_known_to_be_harmless_until_a_statement_defines_something() -> None:
    effects = SessionEffects("postgresql")
    harmless, by_parameter = "SELECT log_in('a')", "SELECT set_config('a', 'b', %s)"
    assert not effects.is_harmless(harmless), "the database was not asked yet"
    assert effects.of(harmless, (), lambda _: ()) is NONE
    assert effects.of(by_parameter, (True,), lambda _: ()) is TRANSACTION
    assert effects.of(long := f"SELECT '{'x' * 4_000}'", (), lambda _: ()) is NONE
    assert [effects.is_harmless(sql) for sql in (harmless, by_parameter, long)] == [True, False, False]
    assert effects.of("CREATE FUNCTION log_in(text) …", (), lambda _: ()) is NONE
    assert not effects.is_harmless(harmless)


def test_what_a_unit_defines_is_asked_for_again() -> None:
    bodies: list[Routine] = []
    effects = SessionEffects("postgresql")
    assert effects.of("SELECT log_in('a')", (), lambda _: bodies) is NONE
    bodies.append(Routine("SELECT set_config('app.tenant', $1, true)", "sql"))
    assert effects.of("CREATE FUNCTION log_in(text) …", (), lambda _: ()) is NONE
    assert effects.of("SELECT log_in('a')", (), lambda _: bodies) is TRANSACTION


@table(
    ("family", "sql", "name"),
    [
        ("postgresql", 'SELECT "log in"(1)', "log in"),
        ("postgresql", 'SELECT "say ""log"""(1)', 'say "log"'),
        ("postgresql", "DO $$ BEGIN PERFORM log_in(1); END $$", "log_in"),
        ("mysql", 'SELECT "log_in"(1)', "log_in"),
        ("mysql", "SELECT 5--log_in(1)", "log_in"),
    ],
)
def test_each_name_that_may_be_a_function_is_asked_for(family: str, sql: str, name: str) -> None:
    assert name in examined(sql, family).names


def test_calls_are_followed_and_asked_for_once() -> None:
    asked: list[frozenset[str]] = []
    bodies = {
        "log_in": Routine("SELECT enter($1), twice($1)", "sql"),
        "enter": Routine("SELECT set_config('app.tenant', $1, true), log_in($1)", "sql"),
        "twice": Routine("SELECT 2 * $1", "sql"),
    }

    def routines(names: frozenset[str]) -> list[Routine]:
        asked.append(names)
        return [body for name, body in bodies.items() if name in names]

    effects = SessionEffects("postgresql")
    assert effects.of("SELECT log_in('one')", (), routines) is TRANSACTION
    assert effects.of("SELECT log_in('one')", (), routines) is TRANSACTION
    assert [len(names & bodies.keys()) for names in asked] == [1, 2, 0]
    assert effects.of("SELECT twice(1)", (), routines) is NONE
    assert effects.of("SELECT twice(1) AS select_twice", (), routines) is NONE
    assert asked[-1] == {"as", "select_twice"}, "the other names are known"
