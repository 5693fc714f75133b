"""Where the messages of a prepared transaction lie in Kafka's log: proof of its outcome, once the coordinator has forgotten it.

A coordinator drops a transactional id that was not used for `transactional.id.expiration.ms`; the log keeps the messages for as
long as the topic's retention says. The database therefore stores this beside the prepared state. It also tells people what a
lost transaction had held.
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
"""Characters of a topic's name (Kafka, `Topic.MAX_NAME_LENGTH`)."""

MAX_PLACES: Final = 16
"""Places that are stored with a state; `Delivery.messages` counts all messages, also those at places left out."""


class Fate(Enum):
    """How a transaction ended, by the log."""

    COMMITTED = "committed"
    ABORTED = "aborted"

    OPEN = "open"
    """It has not ended: no marker of it is there."""

    GONE = "gone"
    """The log does not have the message any more (retention), or the principal may not read it."""


@dataclass(frozen=True, slots=True)
class Place:
    """What a transaction wrote to one partition.

    Args:
        topic: The topic.
        partition: The partition; of a librdkafka producer the one that holds the topic's first message.
        first_offset: The offset of the first message there, as the broker acknowledged it; None where it did not give it.
        messages: How many messages went there; with librdkafka, to the whole topic.
    """

    topic: str
    partition: int
    first_offset: int | None
    messages: int

    def __str__(self) -> str:
        """For people: `orders-0 from offset 17 (3 messages)`."""
        where = "" if self.first_offset is None else f" from offset {self.first_offset}"
        return f"{self.topic}-{self.partition}{where} ({self.messages} message{'' if self.messages == 1 else 's'})"


@dataclass(frozen=True, slots=True)
class Delivery:
    """The acknowledged messages of one prepared transaction.

    Args:
        messages: How many there are.
        places: Where they are; at most MAX_PLACES are stored.
        prepared_at: When the transaction was prepared (UTC, aware; this machine's clock), just before the database's commit.
    """

    messages: int
    places: tuple[Place, ...]
    prepared_at: datetime

    @classmethod
    def of(cls, places: Iterable[Place]) -> Self | None:
        """The delivery of what was just prepared; None where nothing was sent."""
        listed = tuple(places)
        if not listed:
            return None
        return cls(sum(place.messages for place in listed), listed, datetime.now(UTC))

    @property
    def proof(self) -> Place | None:
        """A place whose first offset is known: all partitions of a transaction end alike, so one of them tells for all."""
        return next((place for place in self.places if place.first_offset is not None), None)

    def __str__(self) -> str:
        """For people: how many messages, where, and since when."""
        shown = ", ".join(map(str, self.places))
        more = self.messages - sum(place.messages for place in self.places)
        elsewhere = f" and {more} elsewhere" if more else ""
        return f"{self.messages} messages: {shown}{elsewhere}; prepared at {self.prepared_at.astimezone(UTC):%F %T} UTC"

    def text(self) -> str:
        """The text to store: JSON with the first MAX_PLACES places, one of which tells the outcome if any does."""
        kept = self.places[:MAX_PLACES]
        proof = self.proof
        if proof is not None and proof not in kept:
            kept = (proof, *kept[1:])
        return json.dumps(
            {
                "messages": self.messages,
                "places": [[place.topic, place.partition, place.first_offset, place.messages] for place in kept],
                "prepared_at": self.prepared_at.astimezone(UTC).isoformat(timespec="milliseconds"),
            },
            separators=(",", ":"),
        )

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Read a stored text; the empty text gives None.

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
                cause="the row was changed by hand or by a newer release",
                next_step="nothing was changed; put the text back, or make it empty, or upgrade",
                text=text,
            ) from error


def delivery_text(delivery: Delivery | None) -> str:
    """The text to store: the delivery's own, or the empty text for none."""
    return "" if delivery is None else delivery.text()


def _place(stored: Any) -> Place:
    topic, partition, first_offset, messages = stored
    return Place(str(topic), int(partition), None if first_offset is None else int(first_offset), int(messages))
