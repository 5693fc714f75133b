"""Requests as bytes and bytes as answers, on one connection: size, header, and who decodes what."""

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
"""Bytes of an answer."""


class Framing:
    """Requests are answered in their order, each with the number of its request (the correlation id).

    A request encodes itself and decodes its answer if it is a HotRequest; others are kafka-python's.

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
        """The number of a request, and what must be sent next."""
        number = self._number = (self._number + 1) % 2**31
        if hasattr(request, "parts"):
            parts = request.parts()
            size = _HEADER.size - _SIZE.size + len(self._client) + sum(map(len, parts))
            data = b"".join((_HEADER.pack(size, request.API_KEY, request.API_VERSION, number), self._client, *parts))
            self._unanswered.append((number, partial(_own_answer, request)))
        else:
            request.with_header(correlation_id=number, client_id=self._client_id)
            data = request.encode(framed=True, header=True)
            self._unanswered.append((number, partial(_kafka_pythons_answer, request.header)))
        return number, data

    def answers(self, data: bytes) -> list[tuple[int, Any]]:
        """The answers that are complete with this data, each with the number of its request.

        Raises:
            KafkaError: The data are no answers to the requests.
        """
        received = self._rest + data if self._rest else data
        found, place = [], 0
        while len(received) - place >= _SIZE.size:
            (size,) = _SIZE.unpack_from(received, place)
            if not 0 <= size <= _MOST:
                raise InvalidReceiveError(f"the size of an answer is {size}")
            end = place + _SIZE.size + size
            if end > len(received):
                break
            found.append(self._answer(memoryview(received)[place + _SIZE.size : end]))
            place = end
        self._rest = received[place:]
        return found

    def _answer(self, frame: memoryview) -> tuple[int, Any]:
        if not self._unanswered:
            raise CorrelationIdError("an answer without a request")
        number, decoded = self._unanswered.popleft()
        try:
            (answered,) = _SIZE.unpack_from(frame)
            if answered != number:
                raise CorrelationIdError(f"the answer to request {answered} came instead of that to {number}")
            return number, decoded(frame)
        except (ValueError, IndexError, struct.error, EOFError) as error:
            raise KafkaProtocolError(f"the answer to request {number} can't be decoded: {error}") from error


def _own_answer(request: Any, frame: memoryview) -> Any:
    fields = Fields(frame, _SIZE.size)  # after the correlation id
    fields.skip_tags()
    return request.answer(fields)


def _kafka_pythons_answer(header: Any, frame: memoryview) -> Any:
    kind = header.get_response_class()
    if kind is None:
        raise KafkaProtocolError(f"kafka-python does not know the answer to API {header.request_api_key}")
    data = BytesIO(frame)
    kind.parse_header(data)
    return kind.decode(data)
