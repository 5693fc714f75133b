"""Encoding requests and decoding responses on one connection: size, header, correlation id."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from io import BytesIO
from typing import Any, Final

from kafka.errors import CorrelationIdError, InvalidReceiveError, KafkaProtocolError

from dualwrite.kafka.client.hot_messages import Fields

_SIZE: Final = struct.Struct(">i")
_HEADER: Final = struct.Struct(">ihhi")  # size, API key, version, correlation id
_LENGTH: Final = struct.Struct(">h")
_MOST: Final = 100_000_000
"""The maximum size of a response, in bytes."""


class Framing:
    """Encodes requests, and decodes their responses, which arrive in the order of the requests.

    Each response contains the number of its request (the correlation id). A HotRequest encodes itself and decodes its
    response; all other requests are kafka-python's.

    Args:
        client_id: For the header.
    """

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        encoded = client_id.encode()
        self._client = _LENGTH.pack(len(encoded)) + encoded + b"\0"  # and no tagged fields
        self._number = 0
        self._unanswered: deque[tuple[int, Callable[[memoryview], Any]]] = deque()
        self._rest = b""

    def request(self, request: Any) -> tuple[int, bytes]:
        """The number of a request, and its bytes, which must be sent before those of the next request."""
        number = self._number = (self._number + 1) % 2**31
        if hasattr(request, "parts"):
            parts = request.parts()
            size = _HEADER.size - _SIZE.size + len(self._client) + sum(map(len, parts))
            data = b"".join((_HEADER.pack(size, request.API_KEY, request.API_VERSION, number), self._client, *parts))
            self._unanswered.append((number, partial(_own_response, request)))
        else:
            request.with_header(correlation_id=number, client_id=self._client_id)
            data = request.encode(framed=True, header=True)
            self._unanswered.append((number, partial(_kafka_pythons_response, request.header)))
        return number, data

    def responses(self, data: bytes) -> list[tuple[int, Any]]:
        """The responses that are complete with this data, each with the number of its request.

        Raises:
            KafkaError: The data can't be decoded as responses to the requests.
        """
        received = self._rest + data if self._rest else data
        found, place = [], 0
        while len(received) - place >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, place)
            if not 0 <= size <= _MOST:
                raise InvalidReceiveError(f"the size of a response is {size}")
            end = place + _SIZE.size + size
            if end > len(received):
                break
            found.append(self._answer(memoryview(received)[place + _SIZE.size : end]))
            place = end
        self._rest = received[place:]
        return found

    def _answer(self, frame: memoryview) -> tuple[int, Any]:
        if not self._unanswered:
            raise CorrelationIdError("a response without a request")
        number, decoded = self._unanswered.popleft()
        try:
            (answered,) = _SIZE.unpack_from(frame)
            if answered != number:
                raise CorrelationIdError(f"the response to request {answered} came instead of the one to {number}")
            return number, decoded(frame)
        except (ValueError, IndexError, struct.error, EOFError) as error:
            raise KafkaProtocolError(f"the response to request {number} can't be decoded: {error}") from error


def _own_response(request: Any, frame: memoryview) -> Any:
    fields = Fields(frame, _SIZE.size)  # after the correlation id
    fields.skip_tags()
    return request.response(fields)


def _kafka_pythons_response(header: Any, frame: memoryview) -> Any:
    kind = header.get_response_class()
    if kind is None:
        raise KafkaProtocolError(f"kafka-python does not know the response to API {header.request_api_key}")
    data = BytesIO(frame)
    kind.parse_header(data)
    return kind.decode(data)
