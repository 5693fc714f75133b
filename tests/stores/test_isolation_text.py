"""What a statement leaves behind in the session, by its text: statements, built-in functions, functions of users."""

from __future__ import annotations

from dualwrite.stores.sql.isolation import Effect, SessionEffects, any_is_false, text_effect
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
            "CREATE TABLE temporary_orders (temp int)",
            "TRUNCATE orders",
            "SET LOCAL search_path TO tenant",
            "set\nlocal role app",
            "SET CONSTRAINTS ALL DEFERRED",
            "SET TRANSACTION READ ONLY",
            "SELECT set_config('app.tenant', 'one', true)",
            "SELECT set_config('app.tenant', coalesce('a', 'b'), true::boolean), set_config('a', 'b', TRUE)",
            "INSERT INTO t VALUES (1); SET LOCAL a = 1",
            "CREATE TEMPORARY TABLE x (v int) ON COMMIT DROP",
            "DECLARE c CURSOR FOR SELECT 1",
            "SELECT set_config('app.tenant', concat(a, coalesce(b, c)), %s), set_config('a', (SELECT 'b'), true)",
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
            "SELECT set_config('a', set_config('b', 'c', false), true)",
            "SELECT set_config('a', 'b', false), coalesce(1, true)",
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
            "DO $$ BEGIN NULL; END $$",
            "SELECT $$a$$; DO $b$ BEGIN NULL; END $b$",
            "CALL refresh()",
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
        SESSION: (
            "CALL refresh()",
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
        NONE: ("SELECT [set] FROM t",),
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
    assert text_effect(sql, family).effect is effect


@table("parameter", ["%s", "%(is_local)s", "%(is_local)s::BOOLEAN", "$3", "%b"])
def test_a_parameter_of_set_config_decides_when_it_is_known(parameter: str) -> None:
    effects = SessionEffects("postgresql")
    sql = f"SELECT set_config('a', 'b', {parameter})"
    assert effects.of(sql, {"is_local": True}, lambda _: False) is TRANSACTION
    assert effects.of(sql, [("a", True)], lambda _: False) is TRANSACTION
    for false in (False, 0, "f", "FALSE", "off", " fal ", b"n", None, iter([True])):
        assert any_is_false({"x": false})
        assert effects.of(sql, ("a", false), lambda _: False) is SESSION
    assert all(any_is_false({"x": unread}) for unread in ([], [True], (True,), {"y": True}))


@table(
    "first",
    [
        "SELECT log_in('a')",
        "SET LOCAL a = 1; SELECT log_in('a')",
        "CREATE TEMPORARY TABLE x AS SELECT log_in('a')",
        "SELECT pg_advisory_lock(1), log_in('a')",
    ],
)
def test_a_function_is_not_taken_for_harmless_because_of_the_statement_that_called_it_first(first: str) -> None:
    def is_own(names: frozenset[str]) -> bool:
        return "log_in" in names

    effects = SessionEffects("postgresql")
    assert effects.of(first, (), is_own) >= TRANSACTION
    assert effects.of("SELECT log_in('b')", (), is_own) is SESSION


def test_a_text_is_known_to_be_harmless_until_a_statement_defines_something() -> None:
    effects = SessionEffects("postgresql")
    harmless, by_parameter = "SELECT log_in('a')", "SELECT set_config('a', 'b', %s)"
    assert not effects.is_harmless(harmless), "the database was not asked yet"
    assert effects.of(harmless, (), lambda _: False) is NONE
    assert effects.of(by_parameter, (True,), lambda _: False) is TRANSACTION
    assert effects.of(long := f"SELECT '{'x' * 4_000}'", (), lambda _: False) is NONE
    assert [effects.is_harmless(sql) for sql in (harmless, by_parameter, long)] == [True, False, False]
    assert effects.of("CREATE FUNCTION log_in(text) …", (), lambda _: False) is TRANSACTION
    assert not effects.is_harmless(harmless)


@table("defining", ["CREATE FUNCTION log_in(text) …", "DO $$ BEGIN CREATE FUNCTION log_in(text) …; END $$"])
def test_what_a_unit_defines_is_asked_for_again(defining: str) -> None:
    effects = SessionEffects("postgresql")
    assert effects.of("SELECT log_in('a')", (), lambda _: False) is NONE
    assert effects.of(defining, (), lambda _: False) is not NONE
    assert effects.of("SELECT log_in('a')", (), lambda _: True) is SESSION


def test_a_database_that_can_not_be_asked_is_asked_again() -> None:
    """An earlier statement has failed: this one will fail, too, and says nothing about the next transaction."""
    effects = SessionEffects("postgresql")
    assert effects.of("SELECT log_in('a')", (), lambda _: None) is NONE
    assert effects.of("SELECT log_in('a')", (), lambda _: True) is SESSION


@table(
    ("family", "sql", "name"),
    [
        ("postgresql", 'SELECT "log in"(1)', "log in"),
        ("postgresql", 'SELECT "say ""log"""(1)', 'say "log"'),
        ("postgresql", 'SELECT "Log_In" /* 1 */ (1)', "Log_In"),
        ("postgresql", "SELECT tenant.LOG_IN\n(1)", "log_in"),
        ("postgresql", "SELECT ÉLOG(1)", "Élog"),
        ("postgresql", "SELECT 🔑log_in(1)", "🔑log_in"),
        ("postgresql", "INSERT INTO t (a) SELECT 1 WHERE log_in(1)", "log_in"),
        ("postgresql", "COPY (SELECT log_in(1)) TO STDOUT", "log_in"),
        ("mysql", "SELECT 1log_in(1)", "1log_in"),
        ("mysql", "SELECT `a package` . log_in (1)", "a package"),
        ("mysql", "SELECT package.log_in(1)", "package"),
        ("mysql", 'SELECT "log_in"(1)', "log_in"),
        ("mysql", "SELECT 5--log_in(1)", "log_in"),
    ],
)
def test_each_name_that_may_be_a_function_is_asked_for(family: str, sql: str, name: str) -> None:
    assert name in text_effect(sql, family).called


def test_a_name_is_asked_for_once() -> None:
    asked: list[frozenset[str]] = []

    def is_own(names: frozenset[str]) -> bool:
        asked.append(names)
        return "log_in" in names

    effects = SessionEffects("postgresql")
    assert effects.of("SELECT log_in('one'), twice(1)", (), is_own) is SESSION
    assert effects.of("SELECT log_in('one'), twice(1)", (), is_own) is SESSION
    assert effects.of("INSERT INTO orders (item) VALUES (lower(twice))", (), is_own) is NONE
    assert effects.of("SELECT lower(item) AS twice FROM orders", (), is_own) is NONE
    assert asked == [{"log_in", "twice"}, {"orders", "VALUES", "values", "lower"}]
