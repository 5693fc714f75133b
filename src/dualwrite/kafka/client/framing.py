"""Encoding requests and decoding responses on one connection: size, header, correlation id."""

from __future__ import annotations

import struct
from collections import deque
from typing import Any, Final

from dualwrite.kafka.client.fields import NO_TAGS, Fields, KafkaProtocolError, Request
from dualwrite.kafka.client.messages_generated import ApiVersionsRequest

_SIZE: Final = struct.Struct(">i")
_HEADER: Final = struct.Struct(">ihhi")  # size, API key, version, correlation id
_LENGTH: Final = struct.Struct(">h")
_MOST: Final = 100_000_000
"""The maximum size of a response, in bytes."""


class Framing:
    """Encodes requests, and decodes their responses, which arrive in the order of the requests.

    Each response contains the number of its request (the correlation id).

    Args:
        client_id: For the header.
    """

    def __init__(self, client_id: str) -> None:
        encoded = client_id.encode()
        self._client = _LENGTH.pack(len(encoded)) + encoded
        self._number = 0
        self._unanswered: deque[tuple[int, Request[Any], int]] = deque()
        self._rest = b""

    def request(self, request: Request[Any], version: int) -> tuple[int, bytes]:
        """The number of a request, and its bytes, which must be sent before those of the next request.

        Raises:
            ValueError: See `Request.write`.
        """
        number = (self._number + 1) % 2**31
        parts = [b"", self._client, NO_TAGS] if request.FLEXIBLE else [b"", self._client]
        request.write(parts, version)
        size = _HEADER.size - _SIZE.size + sum(map(len, parts))
        parts[0] = _HEADER.pack(size, request.API_KEY, version, number)
        self._number = number
        self._unanswered.append((number, request, version))
        return number, b"".join(parts)

    def responses(self, data: bytes) -> list[tuple[int, Any]]:
        """The responses that are complete with this data, each with the number of its request.

        Raises:
            KafkaProtocolError: The data can't be decoded as responses to the requests.
        """
        received = self._rest + data if self._rest else data
        found, place = [], 0
        while len(received) - place >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, place)
            if not 0 <= size <= _MOST:
                raise KafkaProtocolError(f"the size of a response is {size}")
            end = place + _SIZE.size + size
            if end > len(received):
                break
            found.append(self._answer(received[place + _SIZE.size : end]))
            place = end
        self._rest = received[place:]
        return found

    def _answer(self, frame: bytes) -> tuple[int, Any]:
        if not self._unanswered:
            raise KafkaProtocolError("a response without a request")
        number, request, version = self._unanswered.popleft()
        fields = Fields(frame)
        try:
            (answered,) = fields.numbers(_SIZE)
            if answered == number:
                return number, _response(request, version, fields)
        except KafkaProtocolError as error:
            raise KafkaProtocolError(f"the response to request {number} can't be decoded: {error}") from error
        raise KafkaProtocolError(f"the response to request {answered} came instead of the one to {number}")


def _response(request: Request[Any], version: int, fields: Fields) -> Any:
    if request.FLEXIBLE and request.API_KEY != ApiVersionsRequest.API_KEY:  # whose header has no tags: it may be in v0
        fields.skip_tags()
    response = request.response(fields, version)
    fields.end()
    return response
