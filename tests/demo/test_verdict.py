"""The verdict of the demo: when both sides agree, and how it is shown."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from dualwrite.demo.screen import Screen, show_verdict
from dualwrite.demo.supervisor import Tally
from dualwrite.demo.verdict import DemoVerdict, Findings
from dualwrite.demo.worker import Options
from fixtures.tables import table

NAIVE = Options(naive=True)


@pytest.fixture
def good() -> DemoVerdict:
    tally = Tally(
        done={0: 60, 1: 44},
        kills=3,
        kills_while_opening=1,
        openings=[0.2, 0.7],
        outcomes=Counter(COMMITTED=1, ABORTED=1, ALREADY_COMMITTED=1),
        took=list(range(1000, 2000)),
        commits=1000,
        seconds=2.0,
    )
    return DemoVerdict(
        options=Options(departures=100, kills=3),
        rows=100,
        messages=100,
        tally=tally,
        findings=Findings(),
        unresolved=(),
        places={"topic": "t"},
    )


def printed(verdict: DemoVerdict) -> str:
    out = StringIO()
    show_verdict(Console(file=out, width=100), verdict)
    return out.getvalue()


def test_all_agree(good: DemoVerdict) -> None:
    assert good.all_agree
    assert (
        good.summary()
        == "All agree: each of 100 departures is exactly once in the database and in the topic, after 3 kills of workers."
    )
    assert good.per_second == 52
    assert good.milliseconds == pytest.approx((1.5, 1.99), abs=0.01)
    assert "recoveries: ABORTED" in printed(good)


def test_a_pool_counts_flights_and_their_commits(good: DemoVerdict) -> None:
    pooled = replace(good, options=Options(pool=True), tally=replace(good.tally, commits=50, outcomes=Counter(ABORTED=1)))
    shown = " ".join(printed(pooled).split())
    assert "flights 104 " in shown
    assert "flights per commit 20.0" in shown
    assert "recovered at the end: ABORTED 1" in shown
    assert "transaction" not in shown
    assert (pooled.to_json()["pool"], pooled.to_json()["flights_per_commit"]) == (True, 20)
    assert (good.to_json()["pool"], good.to_json()["flights_per_commit"]) == (False, 1)


@table("finding", list(Findings().counts()))
def test_any_finding_is_a_disagreement(good: DemoVerdict, finding: str) -> None:
    bad = replace(good, findings=Findings(**{finding: [7]}))
    assert not bad.all_agree
    assert "DISAGREEMENT: 1 " in bad.summary()
    assert f"{finding.replace('_', ' ')}: 7" in printed(bad)


@table(
    "changes, tally, summary",
    [
        ({}, {"outcomes": Counter(LOST=1)}, "NOT RESOLVED"),
        ({}, {"outcomes": Counter(UNVERIFIED=1)}, "NOT RESOLVED"),
        ({}, {"unacknowledged": 1}, "NOT RESOLVED"),
        ({"unresolved": ("demo-0",)}, {}, "NOT RESOLVED"),
        ({"options": Options(kills=4)}, {}, "INCOMPLETE"),
        ({"rows": 0}, {}, "INCOMPLETE"),
        ({}, {"errors": ["worker 0: FencedError"]}, "INCOMPLETE"),
    ],
)
def test_what_is_not_resolved_or_not_complete_is_a_disagreement(
    good: DemoVerdict, changes: dict[str, Any], tally: dict[str, Any], summary: str
) -> None:
    bad = replace(good, tally=replace(good.tally, **tally), **changes)
    assert not bad.all_agree
    assert bad.summary().startswith(summary)
    assert all(error in printed(bad) for error in bad.tally.errors)


def test_naive_reports_what_went_wrong_or_that_nothing_did(good: DemoVerdict) -> None:
    unlucky = replace(good, options=NAIVE, findings=Findings(lost=[1, 2], duplicated=[3]))
    assert unlucky.summary().endswith("permanently disagree after 3 kills: 2 lost, 1 duplicated.")
    assert "only by luck" in replace(good, options=NAIVE).summary()


def test_json_has_every_figure(good: DemoVerdict) -> None:
    data = json.loads(json.dumps(replace(good, findings=Findings(lost=list(range(9)))).to_json()))
    assert data["findings"]["lost"] == 9
    assert data["examples"] == {"lost": [0, 1, 2, 3, 4]}
    assert data["recoveries"] == {"COMMITTED": 1, "ABORTED": 1, "ALREADY_COMMITTED": 1}
    assert data["kills_while_opening"] == 1


def test_figures_of_an_empty_run(good: DemoVerdict) -> None:
    nothing = replace(good, tally=Tally())
    assert nothing.milliseconds == (0, 0)
    assert nothing.per_second == 0
    assert printed(nothing)


def test_a_line_is_shown_every_few_seconds(monkeypatch: pytest.MonkeyPatch, good: DemoVerdict) -> None:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    out = StringIO()
    lines = Screen(Console(file=out, width=100))
    for second in range(11):
        now[0] = float(second)
        lines.show(good.tally, 208)
    assert out.getvalue() == "104 of 208 flights, 3 killed, 3 recovered\n" * 2


def test_a_quiet_screen_shows_only_what_stays_behind() -> None:
    out = StringIO()
    screen = Screen(Console(file=out), quiet=True)
    screen.say("hello")
    screen.remind("the broker keeps running")
    assert out.getvalue() == "the broker keeps running\n"
