"""Kafka's integers of variable length: seven bits to a byte, lowest first, the top bit set on every byte but the last.

Signed ones are zigzag-encoded first (0, -1, 1, -2 … become 0, 1, 2, 3 …), as in Protocol Buffers.
"""

from __future__ import annotations

from typing import Final


def unsigned_varint(number: int) -> bytes:
    """Encode a number from 0 on, as flexible requests do with lengths (KIP-482)."""
    encoded = bytearray()
    while number > 0x7F:  # noqa: PLR2004  (what fits seven bits)
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def signed_varint(number: int) -> bytes:
    """Encode a number of 64 bits with its sign, as records do with lengths, counts and deltas (KIP-98)."""
    return unsigned_varint(number << 1 ^ number >> 63)


SMALL: Final = 1 << 14
"""Numbers from 0 up to this one stand in `SIGNED`: most lengths, and every offset of a batch of librdkafka's default size."""

SIGNED: Final = tuple(map(signed_varint, range(SMALL)))
"""`SIGNED[number] == signed_varint(number)`, ten times as fast."""
