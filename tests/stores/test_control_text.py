"""SQL that would end a transaction is recognized by its text."""

from __future__ import annotations

from dualwrite.stores.sql.guard import control_statement, implicit_commit
from fixtures.tables import table


@table(
    ("sql", "found"),
    [
        ("COMMIT", "COMMIT"),
        ("commit and chain", "COMMIT"),
        ("  \n\tEnd transaction", "END"),
        ("ABORT;", "ABORT"),
        ("BEGIN IMMEDIATE", "BEGIN"),
        ("START  TRANSACTION READ ONLY", "START TRANSACTION"),
        ("prepare transaction 'x'", "PREPARE TRANSACTION"),
        ("ROLLBACK", "ROLLBACK"),
        ("ROLLBACK WORK", "ROLLBACK"),
        ("rollback and chain", "ROLLBACK"),
        ("-- why\nCOMMIT", "COMMIT"),
        ("--COMMIT", None),
        ("/* COMMIT */ SELECT 1", None),
        ("/* a */ -- b\n ; COMMIT", "COMMIT"),
        ("SELECT 1; COMMIT", "COMMIT"),
        ("INSERT INTO t VALUES ('it''s'); ROLLBACK", "ROLLBACK"),
        ("SELECT ';COMMIT'", None),
        ("SELECT ';' , 1; COMMIT", "COMMIT"),
        ('SELECT "a;COMMIT"', None),
        ("SELECT 1 -- ; COMMIT", None),
        ("SELECT 1 /* ; COMMIT */; SELECT 2", None),
        ("DO $x$ BEGIN PERFORM 1; COMMIT; END $x$", None),
        ("SELECT $$;COMMIT$$; COMMIT", "COMMIT"),
        ("SELECT 1;", None),
        ("SAVEPOINT a", None),
        ("RELEASE SAVEPOINT a", None),
        ("ROLLBACK TO a", None),
        ("ROLLBACK TO SAVEPOINT a", None),
        ("ROLLBACK WORK TO SAVEPOINT a", None),
        ("ROLLBACK TRANSACTION TO a", None),
        ("PREPARE plan AS SELECT 1", None),
        ("COMMITTED", None),
        ("ENDPOINT", None),
        ("SELECT * FROM commit", None),
        ("CREATE TRIGGER t AFTER INSERT ON a BEGIN DELETE FROM b; END", None),
        ("CREATE FUNCTION f() RETURNS int BEGIN ATOMIC SELECT 1; END", None),
        ("SELECT 1; ROLLBACK TO a", None),
        ("", None),
        (" " * 100_000, None),
    ],
)
def test_statements_that_would_end_the_transaction(sql: str, found: str | None) -> None:
    assert control_statement(sql) == found


@table(
    ("sql", "found"),
    [
        ("CREATE TABLE a (id int)", "CREATE TABLE"),
        ("create  or replace view v AS SELECT 1", "create or"),
        ("# why\n/* so */ -- and\nTRUNCATE a", "TRUNCATE a"),
        ("DROP INDEX i ON a", "DROP INDEX"),
        ("ALTER TABLE a ADD b int", "ALTER TABLE"),
        ("RENAME TABLE a TO b", "RENAME TABLE"),
        ("LOCK TABLES a WRITE", "LOCK TABLES"),
        ("FLUSH TABLES", "FLUSH TABLES"),
        ("ANALYZE LOCAL TABLE a", "ANALYZE LOCAL TABLE"),
        ("GRANT SELECT ON a TO b", "GRANT SELECT"),
        ("START SLAVE", "START SLAVE"),
        ("SET autocommit = 1", "SET autocommit = 1"),
        ("SET SESSION x = 2, @@autocommit := ON", "SET SESSION x = 2, @@autocommit := ON"),
        ("SET autocommit = 0", None),
        ("SET SESSION autocommit=OFF", None),
        ("SET @a = 'autocommit = 1'", None),
        ("CREATE TEMPORARY TABLE a (id int)", None),
        ("CREATE OR REPLACE TEMPORARY TABLE a (id int)", None),
        ("DROP TEMPORARY TABLE a", None),
        ("DROP PREPARE p", None),
        ("ANALYZE SELECT 1", None),
        ("UNLOCK TABLES", None),
        ("SELECT * FROM a FOR UPDATE", None),
        ("INSERT INTO a VALUES ('CREATE TABLE')", None),
        ("REPLACE INTO a VALUES (1)", None),
        ("LOAD DATA INFILE 'f' INTO TABLE a", None),
        ("CALL p()", None),
        ("SET x = 1", None),
        ("", None),
        (" " * 100_000, None),
    ],
)
def test_statements_with_an_implicit_commit_on_mariadb(sql: str, found: str | None) -> None:
    assert (implicit_commit(sql) or "").startswith(found or "")
    assert (implicit_commit(sql) is None) == (found is None)
