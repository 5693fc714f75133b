"""What a record is about is a field of it, at every log call; errors that are not ours are logged with their traceback."""

from __future__ import annotations

import ast
import json
import logging
from contextlib import closing
from functools import cache
from pathlib import Path

import pytest

import dualwrite
from dualwrite.errors import BrokerError, StoreUnavailableError
from dualwrite.kafka.librdkafka import librdkafka_errors
from dualwrite.kafka.librdkafka.client_settings import client_settings
from dualwrite.kafka.librdkafka.consumer import GroupConsumer, where
from dualwrite.kafka.librdkafka.librdkafka_errors import OwnLines
from dualwrite.kafka.librdkafka.topic_admin import create_topic
from dualwrite.observability.logs import FIELDS, SUBJECTS, SubjectLogger, if_unexpected
from fixtures.pace import until

SOURCE = Path(dualwrite.__file__).parent
NOWHERE = {"bootstrap.servers": "127.0.0.1:19", "group.id": "billing"}  # an outage of its own: outages are known by address
METHODS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
ABOUT_NOTHING = {
    "aio/coroutine_threads.py",  # a coroutine
    "console/actions.py",  # what somebody asks for, in words
    "console/shared_read.py",  # a section of the console
    "demo/worker.py",
    "devcluster/programs.py",
    "failpoints.py",
    "kafka/client/tokens.py",  # a source of tokens
    "observability/observers.py",  # an observer
    "observability/prometheus.py",
    "observability/tracing.py",  # the tracer
    "observability/outages.py",  # Kafka or a database
    "pool/calls.py",  # a unit
    "processor/processor.py",  # the transaction of a processor, which may have no id
    "recipe/idle.py",  # all writers
    "relay/notifier.py",  # a channel
    "spark/source.py",  # a function of the user
    "stores/base.py",  # a database
    "stores/sql/postgresql.py",
    "stores/sql/sql_store.py",
}
"""The files with log calls that name no id, group or message."""


class LogCalls(ast.NodeVisitor):
    """The log calls of a file, each with the handler that it is in."""

    def __init__(self, file: Path) -> None:
        self.found: list[tuple[str, ast.Call, ast.ExceptHandler | None]] = []
        self._name = file.relative_to(SOURCE).as_posix()
        self._handler: ast.ExceptHandler | None = None
        self.visit(ast.parse(file.read_text()))

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        before, self._handler = self._handler, node
        self.generic_visit(node)
        self._handler = before

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func
        is_method = isinstance(called, ast.Attribute) and called.attr in METHODS
        if is_method and isinstance(called.value, ast.Name) and called.value.id in ("log", "_log", "logger"):
            self.found.append((self._name, node, self._handler))
        self.generic_visit(node)


@cache
def log_calls() -> list[tuple[str, ast.Call, ast.ExceptHandler | None]]:
    files = [file for file in sorted(SOURCE.rglob("*.py")) if "log." in file.read_text()]
    return [found for file in files for found in LogCalls(file).found]


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
        monkeypatch.setattr(librdkafka_errors, "INTERVAL", 0.0)
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


def test_the_lines_of_a_consumer_go_through_logging(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), closing(GroupConsumer(NOWHERE, ["orders"], lambda _: {})) as consumer:
        until(lambda: consumer.poll(1, 0.05) and "Connection refused" in caplog.text, "librdkafka's line")
        until(lambda: consumer.poll(1, 0.05) and "Kafka at 127.0.0.1:19 does not answer" in caplog.text, "the outage")
    (line,) = [record for record in caplog.records if "Connection refused" in record.getMessage()]
    assert (line.levelname, line.__dict__["group_id"]) == ("WARNING", "billing")
    assert "%3|" not in capfd.readouterr().err


def test_the_lines_of_an_admin_client_go_through_logging(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(BrokerError):
        create_topic(NOWHERE, "orders", timeout=0.5)
    assert "Connection refused" in caplog.text
    assert "%3|" not in capfd.readouterr().err


def test_special_offsets_are_words() -> None:
    assert [where(offset) for offset in (17, -2, -1, -1001)] == [
        "at 17",
        "at the beginning",
        "at the end",
        "at the group's offset",
    ]


def test_a_logger_of_the_user_is_kept() -> None:
    own = logging.getLogger("own")
    assert client_settings({"logger": own})["logger"] is own
    assert isinstance(client_settings({})["logger"], OwnLines)


def test_an_error_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = StoreUnavailableError("It can't be reached.", cause="it is down", next_step="start it")
    SubjectLogger("dualwrite.tests").warning("trying again: %s", error, prefix="shop")
    (record,) = caplog.records
    assert record.getMessage() == "shop: trying again: It can't be reached. Cause: it is down Next step: start it"
    assert str(error).count("\n") == 2
