"""The state of a journal: what it waits for, and what `dualwrite doctor`, `stuck` and `status` say about it."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from dualwrite import JournalLimits
from dualwrite.cli.journal import next_command, say_what_waits
from dualwrite.cli.options import Given, Target
from dualwrite.diagnosis import Severity
from dualwrite.diagnosis.journals import judge_journal
from dualwrite.relay.journal_state import JournalState, PublishingState, Waits, state_of
from dualwrite.state import PreparedTxnState
from dualwrite.stores.base import LostKind, LostTransaction
from dualwrite.stores.journal import GateStatus
from dualwrite.stores.leases import Lease
from dualwrite.stores.rows import StateRow
from fixtures.tables import table

NOW = 1_700_000_000.0
BROKEN, WEAK, _, NOTE = Severity
GATE = GateStatus("shop", 3, datetime.fromtimestamp(NOW - 90, UTC), "pool host:1", 7, 700, JournalLimits())
FAILING = replace(GATE, failure="The database does not permit it.")
DRAINER, POOL, OTHER = "journal host:1", "pool host:2", "pool host:3"
ROW = StateRow("shop.journal", 1, 1, None, 0, 0, 0, (), DRAINER, datetime.fromtimestamp(NOW, UTC))
LOST = LostTransaction(LostKind.LOST, PreparedTxnState(1, 1), 1, datetime.fromtimestamp(NOW, UTC))
WAITING = JournalState(GATE, 90.0, 90.0, None, (), PublishingState.NONE, 0)


def printed(state: JournalState, given: Given, *, kafka_answers: bool | None) -> list[str]:
    """The lines of `dualwrite status` and `stuck`."""
    out = io.StringIO()
    with redirect_stdout(out):
        say_what_waits([state], given, kafka_answers=kafka_answers)
    return out.getvalue().splitlines()


def test_who_publishes_and_who_may_is_known_by_the_leases() -> None:
    leases = [
        Lease("shop.1", POOL, 5.0),
        Lease("shop.2", POOL, 5.0),
        Lease("shop.3", OTHER, -1.0),
        Lease("shop.journal", DRAINER, 5.0),
        Lease("shop.journal.1", OTHER, 5.0),
    ]
    found = state_of(replace(GATE, oldest=NOW - 60), leases, None, 0, NOW)
    assert (found.published_by, found.pools, found.age, found.since_change) == (DRAINER, (POOL,), 60.0, 90.0)
    assert state_of(GATE, [Lease("shop.journal", DRAINER, 0.0)], None, 0, NOW).published_by is None


@table(
    ("row", "leased", "batch"),
    [
        (None, False, PublishingState.NONE),
        (replace(ROW, resolved_generation=1), False, PublishingState.NONE),
        (ROW, True, PublishingState.OPEN),
        (ROW, False, PublishingState.LEFT),
        (replace(ROW, lost=(LOST,)), True, PublishingState.LOST),
        (replace(ROW, lost=(LOST, replace(LOST, kind=LostKind.UNVERIFIED))), False, PublishingState.UNVERIFIED),
    ],
)
def test_what_is_known_of_its_batches(row: StateRow | None, leased: bool, batch: PublishingState) -> None:
    leases = [Lease("shop.journal", DRAINER, 5.0)] if leased else []
    assert state_of(GATE, leases, row, 0, NOW).batch is batch


@table(
    ("changes", "kafka_answers", "waits", "severity", "command"),
    [
        ({}, True, Waits.PUBLISHER, WEAK, "journal drain --prefix shop"),
        ({}, False, Waits.KAFKA, NOTE, None),
        ({}, None, Waits.UNKNOWN, NOTE, None),
        ({"pools": (POOL,), "age": 3.0}, True, Waits.POOL, NOTE, None),
        ({"pools": (POOL,)}, True, Waits.POOL, WEAK, "journal drain --prefix shop"),
        ({"published_by": DRAINER}, True, Waits.PUBLISHING, NOTE, None),
        ({"published_by": DRAINER}, False, Waits.KAFKA, NOTE, None),
        ({"published_by": DRAINER, "gate": FAILING}, True, Waits.FAILURE, WEAK, "journal drain --prefix shop"),
        ({"published_by": DRAINER, "gate": FAILING}, False, Waits.KAFKA, NOTE, None),
        ({"batch": PublishingState.LOST}, False, Waits.LOST_BATCH, WEAK, "recover --id shop.journal --republish"),
        ({"batch": PublishingState.UNVERIFIED}, True, Waits.UNVERIFIED_BATCH, WEAK, "recover --id shop.journal --acknowledge"),
    ],
)
def test_what_an_open_journal_waits_for(
    changes: dict[str, object], kafka_answers: bool | None, waits: Waits, severity: Severity, command: str | None
) -> None:
    state = replace(WAITING, **changes)
    assert state.waits_for(kafka_answers=kafka_answers) is waits
    (finding,) = judge_journal(state, kafka_answers=kafka_answers)
    assert (finding.severity, finding.about) == (severity, "journal shop")
    assert "7 messages" in finding.what
    lines = printed(state, Target(url="sqlite:///x"), kafka_answers=kafka_answers)
    assert waits.value in lines[0]
    if command is None:
        assert (finding.change, lines[1:]) == (None, [])
    else:
        assert f"dualwrite {command}" in (finding.change or "")
        assert lines[1:] == [f"Next: dualwrite {command} --url sqlite:///x"]


@table(
    ("gate", "changes", "says"),
    [
        ({"epoch": 4, "entries": 0, "size": 0}, {}, "closed and empty: messages go to Kafka"),
        ({"entries": 0, "size": 0}, {}, "nothing to be published, and no pool of its prefix is running"),
        (
            {"entries": 0, "later": 2},
            {"kept_by": (POOL,), "age": 0.0},
            "into it always (pool host:2): 0 messages",
        ),
        ({"later": 2}, {"kept_by": (POOL,), "age": 9.0}, "the oldest has waited for 9 s; 2 for later"),
    ],
)
def test_a_journal_of_which_all_is_well(gate: dict[str, object], changes: dict[str, object], says: str) -> None:
    state = replace(WAITING, gate=replace(GATE, **gate), **changes)
    for answers in (None, True, False):
        assert state.waits_for(kafka_answers=answers) is None
        assert judge_journal(state, kafka_answers=answers) == []
        (line,) = printed(state, Target(), kafka_answers=answers)
        assert says in line


def test_a_journal_that_is_kept_open_waits_when_its_messages_do() -> None:
    """However long its gate has been open."""
    kept = replace(WAITING, kept_by=(POOL,), pools=(POOL,), published_by=DRAINER, age=61.0, since_change=1e6)
    for answers, waits in ((True, Waits.PUBLISHING), (False, Waits.KAFKA)):
        assert kept.waits_for(kafka_answers=answers) is waits
        (finding,) = judge_journal(kept, kafka_answers=answers)
        assert "Its pools write into it always, and it has 7 messages; the oldest has waited for 61 s." in finding.what
        assert "The oldest has waited for 61 s. It waits for" in printed(kept, Target(), kafka_answers=answers)[0]
    assert kept.used == ("age", 61 / 86_400)
    assert replace(kept, gate=FAILING, age=0.0).waits_for(kafka_answers=True) is Waits.FAILURE


def test_a_closed_journal_has_no_limits() -> None:
    assert replace(WAITING, gate=replace(GATE, epoch=4)).used is None


def test_messages_that_are_left_behind_a_closed_gate_are_reported() -> None:
    closed = replace(WAITING, gate=replace(GATE, epoch=4))
    (finding,) = judge_journal(closed, kafka_answers=True)
    assert (finding.severity, finding.change) == (BROKEN, "dualwrite journal drain --prefix shop")
    assert "although its gate is closed" in finding.what
    assert next_command(closed, Target(), kafka_answers=None) == "dualwrite journal drain --prefix shop"
    assert "7 messages are left" in printed(closed, Target(), kafka_answers=None)[0]


@table(
    ("limits", "severity", "words"),
    [
        (JournalLimits(entries=9), None, ""),
        (JournalLimits(entries=8), WEAK, "88% of a limit (8 messages)"),
        (JournalLimits(entries=7), BROKEN, "full (its limit is 7 messages)"),
        (JournalLimits(size=800), WEAK, "88% of a limit (800 bytes)"),
        (JournalLimits(age=100), WEAK, "90% of a limit (100 s)"),
        (JournalLimits(age=90), BROKEN, "full (its limit is 90 s)"),
        (None, None, ""),
    ],
)
def test_a_journal_near_its_limits_is_reported(limits: JournalLimits | None, severity: Severity | None, words: str) -> None:
    state = replace(WAITING, gate=replace(GATE, limits=limits))
    found = judge_journal(state, kafka_answers=False)[1:]
    assert [each.severity for each in found] == ([] if severity is None else [severity])
    assert all(words in each.what for each in found)


@pytest.mark.parametrize("count", [1, 2])
def test_dead_letters_are_reported(count: int) -> None:
    closed = replace(WAITING, gate=replace(GATE, epoch=4, entries=0, size=0), dead_letters=count)
    (finding,) = judge_journal(closed, kafka_answers=True)
    assert finding.severity is WEAK
    assert "shop.journal" in (finding.change or "")
