"""Deadlines: made once, passed down, never restarted."""

from __future__ import annotations

from dualwrite.deadline import Deadline


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


def test_a_deadline_shows_remaining_and_total_time() -> None:
    assert repr(Deadline.after(0)) == "<Deadline: 0.000 of 0 s left>"
