"""Kafka's format of each compression, the levels, and the errors for wrong settings."""

from __future__ import annotations

import gzip
import random
import sys
from typing import Any

import cramjam
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualwrite.errors import ConfigurationError, MissingDependencyError
from dualwrite.kafka.client.compression import NAMES, compression_by_name
from fixtures.tables import table

CODES = {"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4}
SNAPPY_MAGIC = b"\x82SNAPPY\0" + (1).to_bytes(4) + (1).to_bytes(4)
TEXT = b"".join(b'{"order": %d, "amount": %d}' % (n, n * 31 % 977) for n in range(10_000))
NOISE = random.Random(5).randbytes(300_000)
LARGE = TEXT * 12 + NOISE * 4 + bytes(3_000_000)  # several blocks of each codec
PACKED = ("snappy", "lz4", "zstd")


@table("name", NAMES)
def test_a_name_has_the_code_of_kafka(name: str) -> None:
    for spelled in (name, name.upper()):
        compression = compression_by_name(spelled)
        assert (compression.name, compression.code) == (name, CODES[name])
    assert compression_by_name(name, 0) == compression_by_name(name)
    assert name in repr(compression_by_name(name))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.binary(max_size=5000) | st.builds(lambda part, times: part * times, st.binary(), st.integers(0, 500)))
@settings(deadline=None, max_examples=50)
def test_compression_round_trip(name: str, data: bytes) -> None:
    compression = compression_by_name(name)
    for form in (data, bytearray(data), memoryview(data)):
        compressed = compression.compress(form)
        assert type(compressed) is bytes
        for taken in (compressed, bytearray(compressed), memoryview(compressed)):
            assert compression.decompress(taken) == data


@table("data", [TEXT, NOISE, LARGE], ids=["text", "noise", "large"])
@table("name", NAMES)
def test_compression_round_trip_of_megabytes(name: str, data: bytes) -> None:
    compression = compression_by_name(name)
    assert compression.decompress(compression.compress(data)) == data


# --- formats ----------------------------------------------------------------------------------------------------------


def test_gzip_is_readable_by_python() -> None:
    assert gzip.decompress(compression_by_name("gzip").compress(TEXT)) == TEXT


@pytest.mark.parametrize("data", [TEXT, LARGE], ids=["one block", "several blocks"])
def test_snappy_is_framed_as_by_the_java_client(data: bytes) -> None:
    framed = compression_by_name("snappy").compress(data)
    assert framed.startswith(SNAPPY_MAGIC)
    read, at = b"", len(SNAPPY_MAGIC)
    while at < len(framed):
        begin = at + 4
        at = begin + int.from_bytes(framed[at:begin])
        read += bytes(cramjam.snappy.decompress_raw(framed[begin:at]))
    assert at == len(framed)
    assert read == data


@table("level", [None, 0, 1, 3, 9, 12])
def test_lz4_is_a_frame_of_independent_blocks_that_java_accepts(level: int | None) -> None:
    frame = compression_by_name("lz4", level).compress(TEXT)
    assert frame[:4] == (0x184D2204).to_bytes(4, "little")
    flags = frame[4]
    assert flags >> 6 == 1, "version"
    assert flags & 0x20, "independent blocks"
    assert not flags & 0x03, "reserved, dictionary"
    assert bytes(cramjam.lz4.decompress(frame)) == TEXT


def test_zstd_is_one_frame() -> None:
    packed = compression_by_name("zstd").compress(TEXT)
    assert packed[:4] == (0xFD2FB528).to_bytes(4, "little")
    assert bytes(cramjam.zstd.decompress(packed)) == TEXT


# --- levels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "levels"),
    [("none", range(-1, 13)), ("gzip", range(-1, 10)), ("snappy", (-1, 0)), ("lz4", range(-1, 13)), ("zstd", range(-1, 13))],
)
def test_levels_of_librdkafka_are_accepted(name: str, levels: range) -> None:
    for level in levels:
        for form in (level, str(level)):
            compression = compression_by_name(name, form)
            assert compression.decompress(compression.compress(TEXT)) == TEXT


@pytest.mark.parametrize("name", ["gzip", "lz4", "zstd"])
def test_the_level_reaches_the_codec(name: str) -> None:
    assert len({len(compression_by_name(name, level).compress(TEXT)) for level in (1, 4, 9)}) == 3


@pytest.mark.parametrize(("name", "level"), [("gzip", 6), ("lz4", 0), ("zstd", 3)])
def test_the_default_level_is_that_of_librdkafka(name: str, level: int) -> None:
    expected = compression_by_name(name, level).compress(TEXT)
    for default in (None, -1, "-1"):
        assert compression_by_name(name, default).compress(TEXT) == expected


# --- errors -----------------------------------------------------------------------------------------------------------


@table("name", ["", "bzip2", "lz4 ", "inherit", None, 3, b"lz4", []])
def test_an_unknown_name_is_refused_with_the_known_ones(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)Unknown compression\.type .*none, gzip, snappy, lz4, zstd"):
        compression_by_name(name)


@table(
    ("name", "level"),
    [("gzip", 10), ("gzip", -2), ("lz4", 13), ("zstd", 13), ("zstd", 22), ("none", 13), ("none", -2), ("lz4", "13")],
)
def test_a_level_that_the_codec_does_not_have_is_refused_with_its_range(name: str, level: int | str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"(?s)compression\.level is {level!r}, which {name} does not support.*0 to [0-9]+"
    ):
        compression_by_name(name, level)


@table("level", ["fast", "", [], 1j, "1.5"])
def test_a_level_is_a_number(level: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"(?s)compression\.level is .*must be an integer"):
        compression_by_name("gzip", level)


@pytest.mark.parametrize("name", PACKED)
def test_a_missing_package_is_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "cramjam", None)
    with pytest.raises(MissingDependencyError, match=rf"(?s){name}.*cramjam.*pip install 'dualwrite\[compression\]'"):
        compression_by_name(name)
