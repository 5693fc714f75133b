"""The process that the crash tests kill: it writes events to the database and to Kafka, according to its arguments.

python -m crash.worker write URL BOOTSTRAP ID TOPIC FIRST COUNT   write events FIRST … FIRST+COUNT-1, one per transaction
python -m crash.worker recover URL BOOTSTRAP ID                   recover the id, print the report as JSON

It prints a line before and after each step, so that a test can wait for it. Tests fork it with failpoints armed
(`fixtures.fork_server`).
"""

import json
import os
import signal
import sys
from typing import Any

import dualwrite
from crash import events
from dualwrite.kafka.native import native_producer as native
from dualwrite.recipe import idle
from dualwrite.state import MAX_EPOCH
from fixtures.pace import LIMIT


def timeouts() -> dualwrite.Timeouts:
    """Time limits that don't expire, unless a test sets the one for a claim."""
    claim = os.environ.get("CLAIM_TIMEOUT")
    return dualwrite.Timeouts(claim=float(claim) if claim else LIMIT, kafka=LIMIT, delivery=LIMIT)


def say(*words: object) -> None:
    # in one write, so that output of other threads does not mix with it
    sys.stdout.write(" ".join(f"{word}" for word in words) + "\n")
    sys.stdout.flush()


def write(url: str, bootstrap: str, transactional_id: str, topic: str, first: int, count: int) -> None:
    with dualwrite.connect(url, kafka=settings(bootstrap), transactional_id=transactional_id, timeouts=timeouts()) as writer:
        say("open", ",".join(o.outcome.value for o in writer.recovery_report))
        for number in range(first, first + count):
            say("begin", number)
            write_event(writer, topic, number)
            say("done", number)
        if "STAY_IDLE" in os.environ:
            say("idle")
            signal.pause()
    say("closed")


def recover(url: str, bootstrap: str, transactional_id: str) -> None:
    report = dualwrite.recover(url, kafka=settings(bootstrap), ids=[transactional_id], timeouts=timeouts())
    say(json.dumps(as_json(report)))


def write_event(writer: dualwrite.DualWriter, topic: str, number: int) -> None:
    with writer.transaction() as tx:
        events.write_event(writer.store.description, tx.db, writer.transactional_id, number)
        tx.send(topic, str(number), key=writer.transactional_id)


def as_json(report: dualwrite.RecoveryReport) -> dict[str, Any]:
    """The report on the id, over all its lanes."""
    return {
        "outcomes": [o.outcome.value for o in report],
        "unacknowledged": [[lost.kind.value, str(lost.state)] for _, lost in report.unacknowledged],
        "taken_over_by": next((lane.taken_over_by for lane in report.ids if lane.taken_over_by), None),
        "error": next((str(lane.error) for lane in report.failed), None),
    }


def settings(bootstrap: str) -> dict[str, Any]:
    more = json.loads(sys.argv[-1]) if sys.argv[-1].startswith("{") else {}
    return {"bootstrap.servers": bootstrap, **more}


def main() -> None:
    if "USE_LAST_EPOCH" in os.environ:
        native.LAST_EPOCH = MAX_EPOCH  # type: ignore[misc]  # like a client that changes the producer id later
    if "STAY_IDLE" in os.environ:
        idle.CLEAR_AFTER = 0.2  # type: ignore[misc]  # a minute is too long for a test
    try:
        if sys.argv[1] == "write":
            write(*sys.argv[2:6], int(sys.argv[6]), int(sys.argv[7]))
        else:
            recover(*sys.argv[2:5])
    except dualwrite.DualWriteError as error:
        say("error", type(error).__name__, getattr(error, "facts", {}).get("database_committed"), error)
        sys.exit(1)


if __name__ == "__main__":
    main()
