"""A batch of messages of assigned partitions: what is left of it, and where it ends."""

from dataclasses import dataclass

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


def test_what_is_left_of_a_batch() -> None:
    whole = batch()
    assert whole.after == {A: 10, B: 9}
    assert Batch((Read(A, 3),), {A: TERM_A, B: TERM_B}).after == {A: 4}
    assert whole.still_owned({A: TERM_A, B: TERM_B, ("payments", 0): LATER}) is whole
    for owned in ({A: TERM_A}, {A: TERM_A, B: LATER}):  # revoked; assigned again
        left = whole.still_owned(owned)
        assert [one.at for one in left.messages] == [3, 4, 9]
        assert (left.terms, left.after) == ({A: TERM_A}, {A: 10})
    assert (whole.still_owned({}).messages, whole.still_owned({}).after) == ((), {})
    left = whole.from_offsets({B: 9})
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
