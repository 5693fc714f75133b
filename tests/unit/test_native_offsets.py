"""A consumer group's metadata in librdkafka's format: it round-trips, and nothing else is accepted as such."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import UsageError
from dualwrite.kafka.base import GroupMetadata
from fixtures.tables import table

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
groups = st.builds(GroupMetadata, texts, st.integers(-1, 2**31 - 1), texts, st.none() | texts)


@given(groups)
def test_offsets_survive_a_round_trip(group: GroupMetadata) -> None:
    assert GroupMetadata.from_librdkafka(group.for_librdkafka()) == group


@given(groups, st.data())
def test_truncated_bytes_are_refused(group: GroupMetadata, data: st.DataObject) -> None:
    written = group.for_librdkafka()
    with pytest.raises(UsageError):
        GroupMetadata.from_librdkafka(written[: data.draw(st.integers(0, len(written) - 1))])


@given(groups, st.binary(min_size=1))
def test_trailing_bytes_are_refused(group: GroupMetadata, more: bytes) -> None:
    with pytest.raises(UsageError):
        GroupMetadata.from_librdkafka(group.for_librdkafka() + more)


@given(st.binary())
def test_other_bytes_are_refused(written: bytes) -> None:
    with pytest.raises(UsageError):
        GroupMetadata.from_librdkafka(b"CGMDv1:" + written)


@table(
    "written",
    [
        None,
        "",
        b"",
        5,
        "CGMDv2:    g\0m\0\1",
        b"CGMDv2:" + struct.pack("=i", 1) + b"\xff\0m\0\1",
        b"CGMDv2:" + struct.pack("=i", 1) + b"g\0m\0\2i\0",
    ],
)
def test_other_types_are_refused_with_what_to_pass(written: Any) -> None:
    with pytest.raises(UsageError, match="pass a confluent-kafka Consumer, or your own GroupMetadata"):
        GroupMetadata.from_librdkafka(written)
