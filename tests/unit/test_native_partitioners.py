"""Partitioners in isolation; tests/kafka/test_partitions_of_keys.py compares them with librdkafka's."""

from __future__ import annotations

from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError
from dualwrite.kafka.native.partitioners import fnv1a, murmur2, partitioner_by_name
from fixtures.tables import table

HASHED = ("consistent", "murmur2", "fnv1a")
NAMES = ("random", *HASHED, *(f"{name}_random" for name in HASHED))


@table(
    ("key", "expected"),
    [  # from Apache Kafka's UtilsTest.testMurmur2, there with a sign
        (b"21", -973932308),
        (b"foobar", -790332482),
        (b"a-little-bit-long-string", -985981536),
        (b"a-little-bit-longer-string", -1486304829),
        (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        (b"abc", 479470107),
    ],
)
def test_murmur2_equals_that_of_java(key: bytes, expected: int) -> None:
    assert murmur2(key) == expected % 2**32


@table(
    ("key", "expected"),
    [  # from rdfnv1a.c's unit test, made with Sarama
        (b"kafka", 0xD33C4E1),
        (b"giberish123456789", 0x77A58295),
        (b"1234", 0x23BDD03),
        (b"234", 0x2DEA3CD2),
        (b"34", 0x740FA83E),
        (b"4", 0x310CA263),
        (b"PreAmbleWillBeRemoved,ThePrePartThatIs", 0x65CBD69C),
        (b"", 0x7EE3623B),
    ],
)
def test_fnv1a_equals_that_of_sarama(key: bytes, expected: int) -> None:
    assert fnv1a(key) == expected


@pytest.mark.parametrize("name", NAMES)
@given(key=st.none() | st.binary(max_size=300), partitions=st.integers(1, 200))
def test_a_partition_is_within_range(name: str, key: bytes | None, partitions: int) -> None:
    found = partitioner_by_name(name)(key, partitions)
    assert found is None or 0 <= found < partitions


@pytest.mark.parametrize("name", HASHED)
@given(key=st.binary(min_size=1, max_size=300), partitions=st.integers(1, 200))
def test_a_key_stays_in_its_partition_with_and_without_random(name: str, key: bytes, partitions: int) -> None:
    found = partitioner_by_name(name)(key, partitions)
    assert found == partitioner_by_name(f"{name}_random")(key, partitions) == partitioner_by_name(name)(key, partitions)


@pytest.mark.parametrize("name", ["random", "consistent_random", "murmur2_random", "fnv1a_random"])
def test_without_a_key_any_partition_is_allowed(name: str) -> None:
    assert partitioner_by_name(name)(None, 7) is None


@pytest.mark.parametrize("name", HASHED)
def test_without_random_no_key_is_an_empty_key(name: str) -> None:
    assert partitioner_by_name(name)(None, 7) == partitioner_by_name(name)(b"", 7) is not None


def test_an_empty_key_is_no_key_for_consistent_random_only() -> None:
    assert partitioner_by_name("consistent_random")(b"", 7) is None
    for name in ("murmur2", "fnv1a"):
        assert partitioner_by_name(f"{name}_random")(b"", 7) == partitioner_by_name(name)(b"", 7)


def test_random_spreads_one_key() -> None:
    assert {partitioner_by_name("random")(b"k", 7) for _ in range(1000)} == set(range(7))


def test_more_keys_than_are_cached() -> None:
    consistent, murmur, fnv = (partitioner_by_name(name) for name in HASHED)
    for n in range(40_000):
        key = b"%d" % n
        found = consistent(key, 7), murmur(key, 7), fnv(key, 7)
        assert found == (crc32(key) % 7, (murmur2(key) & 0x7FFFFFFF) % 7, fnv1a(key) % 7)


@table("name", ["", "Random", "murmur3", "consistent-random", None, 5, b"random", [], {}])
def test_an_unknown_name_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"(?s)Unknown partitioner .*random, consistent, consistent_random, murmur2, "
    ) as caught:
        partitioner_by_name(name)
    assert all(known in str(caught.value) for known in NAMES)
