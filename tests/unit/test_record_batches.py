"""Record batches read back: every record, header and timestamp, from what the producer encodes; and what is damaged."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import MissingDependencyError
from dualwrite.kafka.client import compression as compressions
from dualwrite.kafka.client.compression import NAMES, compression_by_name
from dualwrite.kafka.client.record_batches import Batch, DamagedBatchError, batches, following_offset, read_headers
from dualwrite.kafka.client.transaction_runs import RunsInPartition
from dualwrite.kafka.native.records import BatchBuilder
from dualwrite.state import FoundPlace, PreparedTxnState
from fixtures.tables import table

STATE = PreparedTxnState(70, 3)
NOON = 1_700_000_000_000
_ATTRIBUTES_AT, _COUNT_AT, _CHECKED_AT = 21, 57, 21

contents = st.none() | st.binary(max_size=300)
headers = st.lists(st.tuples(st.text(max_size=20), contents), max_size=4)
records = st.lists(st.tuples(contents, contents, headers, st.integers(0, 2**42)), min_size=1, max_size=20)


def encoded(
    count: int = 1, *, offset: int = 0, sequence: int = 0, state: PreparedTxnState = STATE, codec: str = "none"
) -> bytes:
    """A batch of the transaction, as it is in a log."""
    builder = BatchBuilder()
    for number in range(count):
        builder.append(None, b"x" * 50 + str(number).encode(), None, NOON)
    made = builder.build(
        producer_id=state.producer_id, epoch=state.epoch, base_sequence=sequence, compression=compression_by_name(codec)
    )
    return at_offset(made, offset)


def at_offset(batch: bytes, offset: int) -> bytes:
    return struct.pack(">q", offset) + batch[8:]


def changed(batch: bytes, place: int, kind: str, *values: Any) -> bytes:
    """The batch with other values at a place of its header, and the checksum for them."""
    made = bytearray(batch)
    struct.pack_into(kind, made, place, *values)
    struct.pack_into(">I", made, 17, crc32c(bytes(made[_CHECKED_AT:])))
    return bytes(made)


def marker(offset: int, *, commit: bool = False, state: PreparedTxnState = STATE) -> bytes:
    """What a broker writes at the end of a transaction."""
    builder = BatchBuilder()
    builder.append(struct.pack(">hh", 0, int(commit)), struct.pack(">hi", 0, 5), None, NOON + 9)
    made = builder.build(
        producer_id=state.producer_id, epoch=state.epoch, base_sequence=-1, compression=compression_by_name("none")
    )
    return at_offset(changed(made, _ATTRIBUTES_AT, ">h", 0x30), offset)


def only(data: bytes) -> Batch:
    (found,) = batches(data)
    return found


@given(records, st.sampled_from(NAMES))
def test_what_was_encoded_is_read_back(sent: list[Any], codec: str) -> None:
    builder = BatchBuilder()
    for key, value, names, timestamp in sent:
        builder.append(key, value, names, timestamp)
    batch = only(builder.build(producer_id=1, epoch=2, base_sequence=3, compression=compression_by_name(codec)))
    assert (batch.count, batch.base_sequence, batch.last_offset, batch.removed) == (len(sent), 3, len(sent) - 1, 0)
    assert batch.is_transactional
    assert batch.is_intact
    assert not batch.is_control
    assert not batch.is_truncated
    read = [(key, value, read_headers(encoded), timestamp) for key, value, encoded, timestamp in batch.records()]
    assert read == [(key, value, names or None, timestamp) for key, value, names, timestamp in sent]


def test_with_append_time_every_record_has_the_brokers_timestamp() -> None:
    made = changed(changed(encoded(3), _ATTRIBUTES_AT, ">h", 0x18), 35, ">q", 4711)  # the greatest timestamp
    assert [timestamp for *_, timestamp in only(made).records()] == [4711] * 3


def test_markers_say_how_a_transaction_ended() -> None:
    assert [only(marker(3, commit=commit)).commits for commit in (False, True)] == [False, True]
    assert only(marker(3)).is_control


def test_a_response_may_end_within_a_batch() -> None:
    first, second = encoded(2, offset=5), encoded(3, offset=7, sequence=2)
    for end in range(len(first), len(first + second)):
        found = list(batches((first + second)[:end]))
        assert [batch.base_offset for batch in found if not batch.is_truncated] == [5]
        assert following_offset((first + second)[:end]) == 7
    assert following_offset(first + second) == 10
    assert following_offset(first[:-1]) is None
    assert following_offset(None) is None
    assert list(batches(None)) == []


def test_messages_of_older_formats_are_skipped() -> None:
    message = struct.pack(">iBBq", 0, 1, 0, NOON) + b"\xff\xff\xff\xff" + struct.pack(">i", 5) + b"value"
    old = struct.pack(">qi", 4, len(message)) + message
    assert [batch.base_offset for batch in batches(old + encoded(offset=5))] == [5]
    assert following_offset(old) == 5


def test_damage_is_noticed() -> None:
    good = encoded(2, codec="gzip")
    for place in range(_CHECKED_AT, len(good)):
        assert not only(good[:place] + bytes((good[place] ^ 1,)) + good[place + 1 :]).is_intact
    with pytest.raises(DamagedBatchError, match="the batch at offset 0 can't be decoded"):
        only(changed(good, _COUNT_AT, ">i", 3)).records()
    with pytest.raises(DamagedBatchError):
        only(good[:-9] + b"\0" * 9).records()


def test_snappy_without_javas_framing_is_read() -> None:
    """As librdkafka writes it."""
    cramjam = pytest.importorskip("cramjam")
    assert compression_by_name("snappy").decompress(bytes(cramjam.snappy.compress_raw(b"plain" * 100))) == b"plain" * 100


# --- runs -------------------------------------------------------------------------------------------------------------


def runs(*made: bytes, state: PreparedTxnState = STATE) -> RunsInPartition:
    found = RunsInPartition(state)
    for batch in batches(b"".join(made)):
        found.add(batch)
    return found


def test_a_run_has_the_batches_up_to_its_marker() -> None:
    other = PreparedTxnState(71, 3)
    data = (encoded(2), encoded(5, offset=2, state=other), encoded(3, offset=7, sequence=2))
    found = runs(*data)
    assert found.open is found.last
    found = runs(*data, marker(10, state=other, commit=True), marker(11, state=PreparedTxnState(70, 4)))
    assert found.open is None
    assert found.last is not None
    assert (found.last.messages, found.last.removed, found.last.damage) == (5, 0, None)
    assert not found.last.is_committed
    assert found.last.place("orders", 7) == FoundPlace("orders", 7, 0, 11, 5)


def test_the_last_run_is_that_of_the_last_transaction() -> None:
    found = runs(encoded(2), marker(2, commit=True), encoded(1, offset=3, sequence=2), marker(4), marker(5, commit=True)).last
    assert found is not None
    assert (found.first_offset, found.messages, found.is_committed) == (3, 1, False)


def test_sequence_numbers_wrap() -> None:
    last = runs(encoded(2, sequence=2**31 - 1), encoded(1, offset=2, sequence=1)).last
    assert last is not None
    assert (last.messages, last.removed, last.damage) == (3, 0, None)


COMPACTED = changed(encoded(3, offset=2, sequence=2), _COUNT_AT, ">i", 1)


@table(
    "data, messages, removed",
    [
        ((encoded(2), COMPACTED), 3, 2),  # the batch keeps its offsets and sequence numbers
        ((encoded(2), encoded(3, offset=7, sequence=7)), 5, 5),  # a whole batch is gone
    ],
)
def test_what_compaction_has_removed_is_counted(data: tuple[bytes, ...], messages: int, removed: int) -> None:
    last = runs(*data).last
    assert last is not None
    assert (last.messages, last.removed) == (messages, removed)


@table(
    "data, damage",
    [
        ((encoded(2), encoded(2, offset=2, sequence=1)), "the batch at offset 2 does not continue the one before it"),
        ((encoded(2), encoded(2, offset=2, sequence=2)[:-1] + b"?"), "the checksum of the batch at offset 2 is wrong"),
        ((encoded(2), encoded(2, offset=2, state=PreparedTxnState(70, 4))), "at offset 2 another transaction begins"),
        ((changed(encoded(2), _COUNT_AT, ">i", 9),), "the batch at offset 0 does not continue"),
    ],
)
def test_a_run_that_does_not_fit_is_damaged(data: tuple[bytes, ...], damage: str) -> None:
    last = runs(*data, marker(9)).last
    assert last is not None
    assert str(last.damage).startswith(damage)


def test_a_missing_package_is_noticed_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(2, codec="zstd")

    def not_installed(name: str) -> None:
        raise MissingDependencyError(f"{name} is not installed.", next_step="pip install 'dualwrite[compression]'")

    monkeypatch.setattr(compressions, "_cramjam", not_installed)
    with pytest.raises(MissingDependencyError, match=r"dualwrite\[compression\]"):
        runs(data)
