"""Records what clients of dualwrite did and saw: the files that `check_history.py` judges (docs/how-it-works/histories.md).

It needs only the standard library, so a service can copy it. Each process has a file of its own, and a child of a fork begins
another one. Each line is one write to the end of the file, so it survives SIGKILL; the last line of a killed process may be
incomplete.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, Final

VERSION: Final = 1
"""The version of the format."""

_PER_LINE: Final = 1_000
"""How many messages or rows of a final read a line has."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")

Value = int | str
Messages = Mapping[str, Iterable[tuple[Any, Any]]]
"""Pairs of key and value for each topic, in the order in which they are sent."""
Moves = Iterable[tuple[str, str, int, int, int]]
"""Group, topic, partition, and the first and last offset that the operation consumed."""


class Recorder:
    """Writes one file of a history; all threads of the process may use it.

    Args:
        folder: Where the file is made; all files of a run are in one folder.
        name: What the process is, such as "writer"; a part of the file's name.
        versions: The versions of what took part, such as `{"kafka": "4.2.0"}`; those of Python and dualwrite are added.
    """

    def __init__(self, folder: Path | str, name: str, *, versions: Mapping[str, str] | None = None) -> None:
        self._folder, self._name = Path(folder), name
        self._versions = {"python": platform.python_version(), **_version_of("dualwrite"), **(versions or {})}
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_closed = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Begin a file; in the child of a fork the parent keeps its own."""
        if self._is_closed:
            return
        self._lock, self._numbers = threading.Lock(), count(1)
        self._clock = time.monotonic_ns() // 1_000
        path = self._folder / f"{self._name}-{os.getpid()}-{self._clock}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        boot = _BOOT.read_text(encoding="ascii").strip() if _BOOT.exists() else platform.node()
        header = {"history": VERSION, "name": self._name, "pid": os.getpid(), "boot": boot, "clock": self._clock}
        self._write({**header, "versions": self._versions})

    def now(self) -> int:
        """Microseconds since the file began; the clock is the machine's, and does not jump."""
        return time.monotonic_ns() // 1_000 - self._clock

    def _write(self, line: Any) -> None:
        text = json.dumps(line, separators=(",", ":"), default=_text).encode() + b"\n"
        with self._lock:  # so that a process that is killed can leave only its last line incomplete
            if os.write(self._file, text) != len(text):
                raise OSError(f"the history of process {os.getpid()} could not be written completely to {self._folder}")

    # --- operations -------------------------------------------------------------------------------------------------------

    def invoke(self, client: Value, rows: Sequence[Value] = (), messages: Messages | None = None, **more: Any) -> int:
        """A client begins an operation; return the operation's number.

        Args:
            client: The thread, caller or task; its operations are one after another.
            rows: A value for each row that it writes, which no other row of the history has.
            messages: What it sends; a message's value is unique in its topic.
            **more: `moves` and `seen`, see `wrote`.
        """
        number = next(self._numbers)
        self._write(["i", number, client, self.now(), *_content(rows, messages, **more)])
        return number

    def wrote(self, number: int, rows: Sequence[Value] = (), messages: Messages | None = None, **more: Any) -> None:
        """An attempt of an operation writes this, and nothing that was recorded of its earlier attempts.

        Call it in the unit, before the unit ends: for what is known only there.

        Args:
            number: The operation.
            rows: As for `invoke`.
            messages: As for `invoke`.
            **more: `moves`, the offsets that the unit consumed; `seen`, rows that the unit has read.
        """
        self._write(["w", number, self.now(), *_content(rows, messages, **more)])

    def ok(self, number: int) -> None:
        """The client knows that the operation is committed."""
        self._write(["o", number, self.now()])

    def fail(self, number: int, error: BaseException) -> None:
        """The client knows that neither side is committed, now or later."""
        self._write(["f", number, self.now(), type(error).__name__])

    def unknown(self, number: int, error: BaseException) -> None:
        """The client does not know the outcome."""
        self._write(["u", number, self.now(), type(error).__name__])

    def end(self, number: int, error: BaseException | None, *, fails: Callable[[BaseException], bool]) -> None:
        """The call of an operation has returned, or raised.

        Args:
            number: The operation.
            error: What it has raised.
            fails: Whether an exception says that nothing is committed.
        """
        if error is None:
            self.ok(number)
        elif fails(error):
            self.fail(number, error)
        else:
            self.unknown(number, error)

    @contextmanager
    def operation(self, client: Value, *content: Any, fails: Callable[[BaseException], bool], **more: Any) -> Iterator[int]:
        """An operation that is the block; the arguments are those of `invoke` and `end`."""
        number = self.invoke(client, *content, **more)
        try:
            yield number
        except BaseException as error:
            self.end(number, error, fails=fails)
            raise
        self.ok(number)

    # --- what was seen, and what was done to the system -------------------------------------------------------------------

    def consumed(self, topic: str, partition: int, messages: Iterable[tuple[int, Any, Any]]) -> None:
        """A `read_committed` consumer has got messages during the run: offset, key and value of each."""
        self._write(["c", self.now(), topic, partition, [part for message in messages for part in message]])

    def read(self, began: int, asked: Iterable[Value], found: Iterable[Value]) -> None:
        """The primary database was asked for rows during the run.

        Args:
            began: `now()` before the read.
            asked: The rows that it was asked for, by one statement.
            found: The rows that it has.
        """
        self._write(["r", began, self.now(), [*asked], [*found]])

    def fault(self, kind: str, detail: str = "") -> None:
        """Something was done to the system: a process killed, a broker paused, a connection cut."""
        self._write(["fault", self.now(), kind, detail])

    # --- both sides at the end, after recovery ----------------------------------------------------------------------------

    def final_rows(self, values: Iterable[Value]) -> None:
        """All rows that the database has at the end; of several tables one call for each."""
        for part in _parts(values):
            self._write(["rows", self.now(), part])

    def final_topic(self, topic: str, messages: Iterable[tuple[int, int, Any, Any]]) -> None:
        """All that a `read_committed` consumer gets of a topic at the end: partition, offset, key and value of each message."""
        partitions: dict[int, list[tuple[int, Any, Any]]] = {0: []}
        for partition, *message in messages:
            partitions.setdefault(partition, []).append(tuple(message))
        for partition, all_of_it in partitions.items():
            for part in _parts(all_of_it):
                self._write(["topic", self.now(), topic, partition, [each for message in part for each in message]])

    def final_position(self, group: str, topic: str, partition: int, offset: int, begin: int = 0) -> None:
        """The position of a consumer group at the end, and the first offset that it should have consumed."""
        self._write(["position", self.now(), group, topic, partition, offset, begin])

    def close(self) -> None:
        """End the file. One that was not closed is that of a killed process, whose open operations are unknown."""
        self._write(["end", self.now()])
        self._is_closed = True
        os.close(self._file)


def _content(rows: Sequence[Value], messages: Messages | None, moves: Moves = (), seen: Iterable[Value] = ()) -> list[Any]:
    """Rows, messages, moves and seen rows, without those at the end that are empty."""
    sent = {topic: [part for message in pairs for part in message] for topic, pairs in (messages or {}).items()}
    content: list[Any] = [[*rows], sent, [*moves], [*seen]]
    while content and not content[-1]:
        content.pop()
    return content


def _parts(values: Iterable[Any]) -> Iterator[list[Any]]:
    """Lists of at most `_PER_LINE`; one that is empty if there is nothing."""
    left = [*values]
    for begin in range(0, max(1, len(left)), _PER_LINE):
        yield left[begin : begin + _PER_LINE]


def _text(value: Any) -> str:
    """Keys and values of messages are bytes at Kafka, and text in a history."""
    if not isinstance(value, bytes):
        raise TypeError(f"a history has integers, text and bytes, not {type(value).__name__}")
    return value.decode("utf-8", "backslashreplace")


def _version_of(package: str) -> dict[str, str]:
    try:
        return {package: metadata.version(package)}
    except metadata.PackageNotFoundError:
        return {}
