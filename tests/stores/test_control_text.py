from __future__ import annotations

import pytest

from dualwrite.stores.sql.control_text import control_statement


@pytest.mark.parametrize(
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
def test_what_would_end_the_transaction(sql: str, found: str | None) -> None:
    assert control_statement(sql) == found
