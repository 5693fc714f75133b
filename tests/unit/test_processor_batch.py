"""A batch of messages of assigned partitions: what is left of it, and where it ends."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.kafka.librdkafka.group_offsets import Batch, Partition, partition_of

A, B = ("orders", 0), ("orders", 1)
TERM_A, TERM_B, LATER = object(), object(), object()


@dataclass(frozen=True)
class Read:
    """A message, with what a batch looks at."""

    key: Partition
    at: int

    def topic(self) -> str:
        return self.key[0]

    def partition(self) -> int:
        return self.key[1]

    def offset(self) -> int:
        return self.at


def batch() -> Batch:
    return Batch((Read(A, 3), Read(B, 7), Read(A, 4), Read(A, 9), Read(B, 8)), {A: TERM_A, B: TERM_B})


def test_the_next_offset_of_each_partition() -> None:
    assert batch().after == {A: 10, B: 9}
    assert Batch((), {}).after == {}


def test_a_partition_without_messages_has_no_next_offset() -> None:
    assert Batch((Read(A, 3),), {A: TERM_A, B: TERM_B}).after == {A: 4}


@pytest.mark.parametrize("owned", [{A: TERM_A, B: TERM_B}, {A: TERM_A, B: TERM_B, ("payments", 0): LATER}])
def test_all_partitions_are_still_owned(owned: dict[Partition, object]) -> None:
    whole = batch()
    assert whole.still_owned(owned) is whole


@pytest.mark.parametrize("owned", [{A: TERM_A}, {A: TERM_A, B: LATER}], ids=["revoked", "assigned again"])
def test_a_partition_that_was_revoked_is_left_out(owned: dict[Partition, object]) -> None:
    left = batch().still_owned(owned)
    assert [one.at for one in left.messages] == [3, 4, 9]
    assert left.terms == {A: TERM_A}
    assert left.after == {A: 10}


def test_nothing_is_left() -> None:
    left = batch().still_owned({})
    assert (left.messages, left.terms, left.after) == ((), {}, {})


def test_a_partition_without_messages_left_keeps_none() -> None:
    left = batch().from_offsets({B: 9})
    assert left.after == {A: 10}
    assert left.only({B}).messages == ()


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 5))),
    st.dictionaries(st.sampled_from([A, B]), st.integers(0, 6)),
)
def test_messages_before_an_offset_are_left_out(found: list[tuple[Partition, int]], begin: dict[Partition, int]) -> None:
    messages = tuple(Read(key, at) for key, at in sorted(found, key=lambda one: one[1]))
    left = Batch(messages, {A: TERM_A, B: TERM_B}).from_offsets(begin)
    assert left.messages == tuple(one for one in messages if one.at >= begin.get(one.key, 0))
    assert left.after == {partition_of(one): one.at + 1 for one in left.messages}
