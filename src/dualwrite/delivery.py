"""Where the messages of a prepared transaction are in Kafka's log: proof of its outcome if the coordinator has forgotten it.

A coordinator drops a transactional id that was not used for `transactional.id.expiration.ms`; the log keeps the messages for
the topic's retention time. The database therefore stores their positions with the prepared state. They also show which messages
a lost transaction had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Self

from dualwrite.errors import StoredStateError

MAX_TOPIC_LENGTH: Final = 249
"""The maximum length of a topic name in characters (Kafka, `Topic.MAX_NAME_LENGTH`)."""

MAX_PLACES: Final = 16
"""The maximum number of places stored with a state. `Delivery.messages` counts all messages, also those at other places."""


class Fate(Enum):
    """How a transaction ended, according to the log."""

    COMMITTED = "committed"
    ABORTED = "aborted"

    OPEN = "open"
    """It has not ended: the log has no marker for it."""

    GONE = "gone"
    """The log no longer has the message (retention), or the principal is not allowed to read it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a transaction wrote to one partition.

    Args:
        topic: The topic.
        partition: The partition; with `in_topic`, that of the topic's first message.
        first_offset: The offset of the first message there, as acknowledged by the broker; None if it was not returned.
        messages: The number of messages in the partition; with `in_topic`, in the whole topic.
        in_topic: Only the place of the topic's first message is known (librdkafka): the others may be in any partition.
    """

    topic: str
    partition: int
    first_offset: int | None
    messages: int
    in_topic: bool = False

    def __str__(self) -> str:
        """Readable text: `orders-0 from offset 17 (3 messages)`; `orders (3 messages, the first in orders-0 at offset 17)`."""
        count = f"{self.messages} message{'' if self.messages == 1 else 's'}"
        if self.in_topic and self.messages > 1:
            at = "" if self.first_offset is None else f" at offset {self.first_offset}"
            return f"{self.topic} ({count}, the first in {self.topic}-{self.partition}{at})"
        where = "" if self.first_offset is None else f" from offset {self.first_offset}"
        return f"{self.topic}-{self.partition}{where} ({count})"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The acknowledged messages of one prepared transaction.

    Args:
        messages: The number of messages.
        places: Where they are; at most MAX_PLACES are stored.
        prepared_at: When the transaction was prepared (UTC, aware; this machine's clock), just before the database's commit.
    """

    messages: int
    places: tuple[Place, ...]
    prepared_at: datetime

    @classmethod
    def of(cls, places: Iterable[Place]) -> Self | None:
        """The delivery of a transaction that was just prepared; None if no message was sent."""
        listed = tuple(places)
        if not listed:
            return None
        return cls(sum(place.messages for place in listed), listed, datetime.now(UTC))

    @property
    def proofs(self) -> tuple[Place, ...]:
        """The places whose first offset is known: a transaction ends the same way in all partitions, so each can prove how."""
        return tuple(place for place in self.places if place.first_offset is not None)

    def __str__(self) -> str:
        """Readable text: the number of messages, where they are, and when the transaction was prepared."""
        shown = ", ".join(map(str, self.places))
        more = self.messages - sum(place.messages for place in self.places)
        elsewhere = f" and {more} elsewhere" if more else ""
        return f"{self.messages} messages: {shown}{elsewhere}; prepared at {self.prepared_at.astimezone(UTC):%F %T} UTC"

    def text(self) -> str:
        """The text to store: JSON with up to MAX_PLACES places, including one with a known offset if there is one."""
        kept = self.places
        if len(kept) > MAX_PLACES:
            kept, proofs = kept[:MAX_PLACES], self.proofs
            if proofs and proofs[0] not in kept:
                kept = (proofs[0], *kept[1:])
        places = ",".join([_stored(place) for place in kept])
        prepared_at = self.prepared_at.astimezone(UTC).isoformat(timespec="milliseconds")
        # not json.dumps, which takes three times as long: every transaction needs this
        return f'{{"messages":{self.messages},"places":[{places}],"prepared_at":"{prepared_at}"}}'

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse a stored text; the empty text returns None.

        Raises:
            StoredStateError: The text does not parse.
        """
        if text == "":
            return None
        try:
            found = json.loads(text)
            places = tuple(map(_place, found["places"]))
            return cls(int(found["messages"]), places, datetime.fromisoformat(found["prepared_at"]).astimezone(UTC))
        except (ValueError, TypeError, KeyError) as error:
            raise StoredStateError(
                f"The stored delivery {text[:200]!r} can't be read.",
                cause="the row was changed manually or by a newer release",
                next_step="nothing was changed; restore the text, or set it to the empty text, or upgrade",
                text=text,
            ) from error


def delivery_text(delivery: Delivery | None) -> str:
    """The text to store for a delivery; the empty text for None."""
    return "" if delivery is None else delivery.text()


def _stored(place: Place) -> str:
    offset = "null" if place.first_offset is None else place.first_offset
    in_topic = ",true" if place.in_topic else ""
    return f"[{json.dumps(place.topic)},{place.partition},{offset},{place.messages}{in_topic}]"


def _place(stored: Any) -> Place:
    topic, partition, first_offset, messages, *in_topic = stored
    offset = None if first_offset is None else int(first_offset)
    return Place(str(topic), int(partition), offset, int(messages), in_topic == [True])
