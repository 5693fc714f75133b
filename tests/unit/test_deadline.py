"""Deadlines: made once, passed down, never restarted."""

from __future__ import annotations

from dualwrite.deadline import Deadline, Pauses


def test_a_deadline_passed_on_stays_the_same() -> None:
    deadline = Deadline.after(60)
    assert Deadline.of(deadline) is deadline
    assert Deadline.of(60).seconds == 60


def test_a_nested_deadline_never_ends_later() -> None:
    deadline = Deadline.after(60)
    assert deadline.within(600).left <= deadline.left + 0.001
    assert deadline.within(5).seconds == 5
    assert Deadline.after(0).within(600).expired


def test_a_deadline_is_shared_between_what_is_left() -> None:
    shares = [(round(share.seconds, -2), item) for share, item in Deadline.after(6000).shared("abc")]
    assert shares == [(2000, "a"), (3000, "b"), (6000, "c")], "none of them has used its share"
    assert [round(share.seconds, -2) for share, _ in Deadline.after(6000).shared("abc", least=4000)] == [4000, 4000, 6000]


def test_a_sleep_ends_with_the_deadline() -> None:
    for seconds in (0.01, 0, -1):
        deadline = Deadline.after(seconds)
        deadline.sleep(600)
        assert deadline.expired
        assert deadline.left == 0


def test_pauses_are_doubled_up_to_a_limit_until_a_success() -> None:
    pauses = Pauses(0.1, 0.3, spread=0.0)
    assert (pauses.taken, [next(pauses) for _ in range(4)], pauses.taken) == (0, [0.1, 0.2, 0.3, 0.3], 4)
    pauses.reset()
    assert (pauses.taken, pauses.upcoming, next(pauses)) == (0, 0.1, 0.1)


def test_pauses_are_spread() -> None:
    found = {next(Pauses(0.1)) for _ in range(100)}
    assert len(found) > 90
    assert 0.1 <= min(found) < 0.12
    assert 0.18 < max(found) <= 0.2


def test_no_attempt_but_the_first_begins_after_the_deadline() -> None:
    assert len(list(Deadline.after(0).attempts(Pauses(60)))) == 1
    assert not Deadline.after(0.001).pause(Pauses(60))
    assert 2 < len(list(Deadline.after(0.1).attempts(Pauses(0.0001, 0.01)))) < 200


def test_a_deadline_shows_remaining_and_total_time() -> None:
    assert repr(Deadline.after(0)) == "<Deadline: 0.000 of 0 s left>"
