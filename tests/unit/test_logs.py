"""What a record is about is a field of it, at every log call; errors that are not ours are logged with their traceback."""

from __future__ import annotations

import ast
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import dualwrite
from dualwrite.errors import StoreUnavailableError
from dualwrite.kafka.librdkafka import own_lines
from dualwrite.kafka.librdkafka.own_lines import OwnLines, with_own_lines
from dualwrite.logs import FIELDS, SUBJECTS, SubjectLogger, if_unexpected

SOURCE = Path(dualwrite.__file__).parent
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
ABOUT_NOTHING = {
    "aio/borrowed_thread.py",  # a coroutine
    "demo/worker.py",
    "devcluster/archive.py",
    "failpoints.py",
    "outages.py",  # Kafka or a database
    "pool/call.py",  # a unit
    "processor/runners.py",  # the transaction of a processor, which may have no id
    "recipe/idle.py",  # all writers
    "stores/base.py",  # a database
    "stores/sql/postgresql.py",
    "stores/sql/store.py",
}
"""The files with log calls that name no id, group or message."""


def log_calls() -> Iterator[tuple[str, ast.Call, ast.ExceptHandler | None]]:
    """Each log call with its file, and the handler that it is in."""
    for file in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        handlers = {
            id(child): node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler) for child in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                logger = node.func.value
                if isinstance(logger, ast.Name) and logger.id in ("log", "_log", "logger"):
                    yield file.relative_to(SOURCE).as_posix(), node, handlers.get(id(node))


def name_of(file: str, call: ast.Call) -> str:
    return f"{file}:{call.lineno}: {ast.unparse(call)}"


def test_every_record_has_what_it_is_about_as_a_field() -> None:
    seen = {file for file, _, _ in log_calls()}
    assert len(seen) > len(ABOUT_NOTHING) > 0
    assert seen >= ABOUT_NOTHING
    without = [
        name_of(file, call)
        for file, call, _ in log_calls()
        if file not in ABOUT_NOTHING and not any(keyword.arg is None or keyword.arg in FIELDS for keyword in call.keywords)
    ]
    assert not without, "\n".join(without)


def test_an_error_of_any_class_is_logged_with_its_traceback() -> None:
    """Our own errors say in their text what failed; other ones, such as a handler's, are only a name without a traceback."""
    broad = [
        (file, call)
        for file, call, handler in log_calls()
        if handler is not None and isinstance(handler.type, ast.Name) and handler.type.id in ("Exception", "BaseException")
    ]
    assert broad
    without = [
        name_of(file, call)
        for file, call in broad
        if isinstance(call.func, ast.Attribute)
        and call.func.attr not in ("exception", "debug")
        and not any(keyword.arg == "exc_info" for keyword in call.keywords)
    ]
    assert not without, "\n".join(without)


def test_no_field_is_an_attribute_that_every_record_has() -> None:
    record = logging.LogRecord("name", logging.INFO, "path", 1, "text", (), None)
    assert not set(FIELDS) & {*vars(record), "message", "asctime"}


def test_the_first_subject_begins_the_text_and_all_fields_are_attributes(caplog: pytest.LogCaptureFixture) -> None:
    log = SubjectLogger("dualwrite.test")
    with caplog.at_level(logging.INFO):
        log.info("%d%% of it", 5, group_id="100%", topic="orders", partition=0, offset=7)
        log.info("100% of it", prefix="shop")
        log.debug("nothing", prefix="shop")
    first, second = caplog.records
    assert first.getMessage() == "100%: 5% of it"
    assert {name: vars(first).get(name) for name in FIELDS} == {
        **dict.fromkeys(FIELDS),
        "group_id": "100%",
        "topic": "orders",
        "partition": 0,
        "offset": 7,
    }
    assert second.getMessage() == "shop: 100% of it"
    assert first.filename == Path(__file__).name
    assert json.dumps({name: vars(second)[name] for name in SUBJECTS if name in vars(second)}) == '{"prefix": "shop"}'


def test_only_errors_of_others_have_a_traceback() -> None:
    assert if_unexpected(StoreUnavailableError("The database can't be reached.")) is None
    bug = ValueError("a bug")
    assert if_unexpected(bug) is bug


# --- librdkafka's own lines ---------------------------------------------------------------------------------------------------


def test_a_line_that_repeats_is_counted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = OwnLines(group_id="billing")
    with caplog.at_level(logging.DEBUG):
        for port in (1, 2):
            for number in range(5):
                text = f"[thrd:127.0.0.1:{port}/bootstrap]: Connect failed (after {number}ms)"
                lines.log(logging.ERROR, "%s [%s] %s", "FAIL", "consumer-1", text)
        monkeypatch.setattr(own_lines, "INTERVAL", 0.0)
        lines.log(logging.ERROR, "%s [%s] %s", "FAIL", "consumer-1", "[thrd:127.0.0.1:1/bootstrap]: Connect failed")
        lines.log(logging.DEBUG, "%s [%s] %s", "FETCH", "consumer-1", "details")
        lines.log(logging.DEBUG, "%s [%s] %s", "FETCH", "consumer-1", "details")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("WARNING", "billing: librdkafka: FAIL: [thrd:127.0.0.1:1/bootstrap]: Connect failed (after 0ms)"),
        ("WARNING", "billing: librdkafka: FAIL: [thrd:127.0.0.1:2/bootstrap]: Connect failed (after 0ms)"),
        (
            "WARNING",
            "billing: librdkafka: FAIL: [thrd:127.0.0.1:1/bootstrap]: Connect failed (4 more since the last such line)",
        ),
        ("DEBUG", "billing: FETCH [consumer-1] details"),
        ("DEBUG", "billing: FETCH [consumer-1] details"),
    ]


def test_a_logger_of_the_user_is_kept() -> None:
    own = logging.getLogger("own")
    assert with_own_lines({"logger": own})["logger"] is own
    assert isinstance(with_own_lines({})["logger"], OwnLines)
