"""A process with a writer that executes commands; each command and each answer is one line of JSON.

python -m crash.actor URL BOOTSTRAP

A command is `{"do": "open", "id": …}`, `{"do": "write", "number": …, "at": failpoint or null, "action": "kill" or "stop"}`,
`{"do": "close"}` or `{"do": "recover", "id": …}`. An answer is `{"ok": …}` or `{"error": name of the class, "text": …}`.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import dualwrite
from crash import worker
from dualwrite.testing import failpoints
from fixtures.pace import LIMIT

SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
TIMEOUTS = dualwrite.Timeouts(claim=2, kafka=LIMIT, delivery=LIMIT)  # other processes may be paused while they hold the lock


class Actor:
    """At most one writer."""

    def __init__(self, url: str, bootstrap: str) -> None:
        self._url = url
        self._bootstrap = bootstrap
        self._writer: dualwrite.DualWriter | None = None

    def do(self, command: dict[str, Any]) -> Any:
        match command:
            case {"do": "open", "id": name}:
                return self._open(name)
            case {"do": "write", "number": number, "at": at, "action": action}:
                assert self._writer is not None
                with _armed(at, action):
                    worker.write_event(self._writer, f"events-{self._writer.transactional_id}", number)
                return number
            case {"do": "close"}:
                assert self._writer is not None
                writer, self._writer = self._writer, None
                writer.close()
                return None
            case {"do": "recover", "id": name}:
                report = dualwrite.recover(self._url, kafka=self._bootstrap, ids=[name], timeouts=TIMEOUTS)
                return worker.as_json(report)
        raise ValueError(command)

    def _open(self, name: str) -> list[str]:
        if self._writer is not None:
            self._writer.reopen()
        else:
            self._writer = dualwrite.connect(self._url, kafka=self._bootstrap, transactional_id=name, timeouts=TIMEOUTS)
        return [o.outcome.value for o in self._writer.recovery_report]


def _armed(at: str | None, action: str) -> AbstractContextManager[None]:
    return nullcontext() if at is None else failpoints.armed(at, failpoints.sends_itself(SIGNALS[action]))


def main() -> None:
    actor = Actor(*sys.argv[1:3])
    for line in sys.stdin:
        try:
            worker.say(json.dumps({"ok": actor.do(json.loads(line))}))
        except dualwrite.DualWriteError as error:
            worker.say(json.dumps({"error": type(error).__name__, "text": str(error)}))


if __name__ == "__main__":
    main()
