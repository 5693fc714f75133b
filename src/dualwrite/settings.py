"""Connection settings, options and time limits, from arguments or from `DUALWRITE_*` environment variables.

| variable | meaning |
| --- | --- |
| `DUALWRITE_DATABASE_URL` | the database's URL, as for `store_from_url` |
| `DUALWRITE_SCHEMA` | the schema (MariaDB, MySQL: the database) that contains dualwrite's tables |
| `DUALWRITE_KAFKA_BOOTSTRAP_SERVERS` | `bootstrap.servers` |
| `DUALWRITE_KAFKA_<NAME>` | any other Kafka setting: `DUALWRITE_KAFKA_SECURITY_PROTOCOL` is `security.protocol` |
| `DUALWRITE_TRANSACTIONAL_ID` | the logical transactional id |
| `DUALWRITE_PRODUCER` | `auto`, `native` or `librdkafka` |
| `DUALWRITE_TWO_PHASE` | `true` requires two-phase commit from the broker, `false` never uses it |
| `DUALWRITE_LANES` | the number of a writer's lanes, a whole number |
| `DUALWRITE_ON_LOST` | `republish`, `raise` or `report` |
| `DUALWRITE_MARK_REPUBLISHED` | `true` to add a header to messages that are published again |
| `DUALWRITE_TIMEOUT_CLAIM`, `_KAFKA`, `_DELIVERY` | time limits in seconds, see `Timeouts` |
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal, Self, cast, get_args

from dualwrite.errors import ConfigurationError

MAX_SECONDS: Final = 1_000_000
"""Eleven days. In milliseconds it fits into 32 bits: more would be too large for poll, librdkafka, PostgreSQL or SQLite."""

_DELIVERY: Final = 60.0

_DELIVERY_IN_POOL: Final = 20.0
"""Longer than a cluster needs to replace a leader that has died: its session ends after 9 s (`broker.session.timeout.ms`)."""

PREFIX: Final = "DUALWRITE_"
_KAFKA: Final = PREFIX + "KAFKA_"
_TIMEOUT: Final = PREFIX + "TIMEOUT_"
MAX_LANES: Final = 100

ProducerName = Literal["auto", "native", "librdkafka"]
OnLost = Literal["republish", "raise", "report"]
WhenKafkaIsDown = Literal["fail", "journal"]
"""What happens to a transaction while Kafka does not answer."""

Acknowledge = Literal["visible", "journaled"]


def check_count(name: str, number: Any, *, most: int | None = None, next_step: str | None = None) -> None:
    """Check that an option is an integer from 1 to `most`.

    Raises:
        ConfigurationError: It is not.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 1 or (most is not None and number > most):
        allowed = "of at least 1" if most is None else f"from 1 to {most}"
        raise ConfigurationError(f"{name} must be an integer {allowed}, not {number!r}.", next_step=next_step)


def check_seconds(name: str, seconds: Any, *, may_be_zero: bool = False) -> None:
    """Check that an option is a number above 0, or also 0 if it may be, and at most `MAX_SECONDS`.

    Raises:
        ConfigurationError: It is not.
    """
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not (0 < seconds <= MAX_SECONDS or (may_be_zero and seconds == 0)):
        least = "from 0" if may_be_zero else "above 0 and"
        raise ConfigurationError(f"{name} must be a number of seconds {least} up to {MAX_SECONDS}, not {seconds!r}.")


SWITCH_AFTER: Final = 1.5
"""Seconds without an acknowledgement after which a unit's messages go into the journal, if there is one."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Time limits in seconds; each must be above 0 and at most 1000000 (eleven days).

    Args:
        claim: For claiming an id: how long to wait for the row's lock and to retry after a broken database connection. On
            SQLite from a URL also for a transaction's wait for the file's write lock.
        kafka: For one call to a coordinator or one EndTxn, including name lookup, connecting, TLS, login and retries. Opening
            and recovery apply it to each lane: once to resolving what was left open, once to taking the id over.
        delivery: For the flush at prepare, and for queueing one message when the queue is full. If one call queues many
            messages, for each wait during which the brokers store nothing. While Kafka is down, a transaction keeps its row
            locks for as long. None: 60 s; for the writers of a pool 20 s, since they serve requests.
        throttled: Instead of `delivery`, if a quota of Kafka holds the messages back. None: as `delivery`, also with a journal,
            which takes messages after 1.5 s without an answer, but not those that a quota holds back.

    Raises:
        ConfigurationError: A limit is not a number, or out of this range.
    """

    claim: float = 30.0
    kafka: float = 60.0
    delivery: float | None = None
    throttled: float | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            given = getattr(self, limit.name)
            if given is not None or limit.default is not None:
                check_seconds(f"The time limit {limit.name!r}", given)

    @property
    def for_delivery(self) -> float:
        """`delivery`, or its default for a writer."""
        return _DELIVERY if self.delivery is None else self.delivery

    @property
    def for_throttled(self) -> float:
        """`throttled`, or its default."""
        return self.for_delivery if self.throttled is None else self.throttled

    def with_journal(self) -> Timeouts:
        """For writers whose messages go into the journal if they are not acknowledged soon."""
        return replace(self, delivery=min(self.for_delivery, SWITCH_AFTER), throttled=self.for_throttled)

    def in_pool(self) -> Self:
        """These limits with the defaults of a pool."""
        return replace(self, delivery=_DELIVERY_IN_POOL) if self.delivery is None else self


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that `connect` needs.

    Args:
        database_url: The database's URL, as for `store_from_url`, or None.
        kafka: Kafka settings, with librdkafka's names.
        transactional_id: The logical id, or None.
        producer: Which producer to use; "auto" picks the best for the broker.
        two_phase: Two-phase commit (KIP-939), with which transactions never time out at the broker: True requires it, False
            never uses it, None uses it if the broker offers it.
        lanes: The number of a writer's lanes, 1 to 100; None for the producer's default (native: 3, librdkafka: 1). See
            DualWriter.
        on_lost: What opening a writer, or recovery, does about unacknowledged lost transactions; see DualWriter.
        mark_republished: Whether messages that are published again get the header `dualwrite-republished`, whose value is
            the name of the lost transaction.
        timeouts: Time limits.
        schema: The schema that contains dualwrite's tables in a SQL database, or None for the connection's default.

    Raises:
        ConfigurationError: A value is not one of those allowed.
    """

    database_url: str | None = field(default=None, repr=False)  # may contain a password
    kafka: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    transactional_id: str | None = None
    producer: ProducerName = "auto"
    two_phase: bool | None = None
    lanes: int | None = None
    on_lost: OnLost = "republish"
    mark_republished: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    schema: str | None = None

    def __post_init__(self) -> None:
        _one_of("producer", self.producer, get_args(ProducerName))
        _one_of("on_lost", self.on_lost, get_args(OnLost))
        _one_of("two_phase", self.two_phase, (True, False, None))
        _one_of("mark_republished", self.mark_republished, (True, False))
        if self.lanes is not None:
            validate_lanes(self.lanes)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the `DUALWRITE_*` variables; settings without a variable keep their defaults.

        Raises:
            ConfigurationError: A value is not one of those allowed, or not a number.
        """
        given = {k: v for k, v in (os.environ if environ is None else environ).items() if k.startswith(PREFIX) and v}
        kafka = {k.removeprefix(_KAFKA).lower().replace("_", "."): v for k, v in given.items() if k.startswith(_KAFKA)}
        limits = {}
        for limit in fields(Timeouts):
            text = given.get(_TIMEOUT + limit.name.upper())
            if text is not None:
                limits[limit.name] = _seconds(_TIMEOUT + limit.name.upper(), text)
        return cls(
            database_url=given.get(PREFIX + "DATABASE_URL"),
            kafka=MappingProxyType(kafka),
            transactional_id=given.get(PREFIX + "TRANSACTIONAL_ID"),
            producer=cast("ProducerName", given.get(PREFIX + "PRODUCER", "auto")),
            two_phase=_boolean(PREFIX + "TWO_PHASE", given.get(PREFIX + "TWO_PHASE")),
            lanes=_whole_number(PREFIX + "LANES", given.get(PREFIX + "LANES")),
            on_lost=cast("OnLost", given.get(PREFIX + "ON_LOST", "republish")),
            mark_republished=bool(_boolean(PREFIX + "MARK_REPUBLISHED", given.get(PREFIX + "MARK_REPUBLISHED"))),
            timeouts=Timeouts(**limits),
            schema=given.get(PREFIX + "SCHEMA"),
        )

    def with_changes(self, **changes: Any) -> Self:
        """A copy with these values, except those that are None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def validate_lanes(lanes: int) -> int:
    """Return the number of lanes if it is valid.

    Raises:
        ConfigurationError: It is not an integer from 1 to 100.
    """
    check_count("lanes", lanes, most=MAX_LANES, next_step="each lane has its own producer; 3 are enough for a writer")
    return lanes


def validate_acknowledge(acknowledge: Acknowledge) -> Acknowledge:
    """Return when a block or a call ends if it is valid.

    Raises:
        ConfigurationError: It is neither "visible" nor "journaled".
    """
    _one_of("acknowledge", acknowledge, get_args(Acknowledge))
    return acknowledge


def validate_when_kafka_is_down(when_kafka_is_down: WhenKafkaIsDown) -> WhenKafkaIsDown:
    """Return what is done while Kafka is down if it is valid.

    Raises:
        ConfigurationError: It is neither "fail" nor "journal".
    """
    _one_of("when_kafka_is_down", when_kafka_is_down, get_args(WhenKafkaIsDown))
    return when_kafka_is_down


def misspelt(given: Iterable[str], known: Collection[str]) -> str | None:
    """Which of the given names is not known, and looks like one that is; None if there is none."""
    found = ((name, near) for name in given if name not in known for near in get_close_matches(name, known, 1, 0.8))
    return next((f"{name!r} is not a setting; {near!r} is" for name, near in found), None)


def _one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ConfigurationError(f"{name} is {value!r}.", next_step=f"use one of {', '.join(map(str, allowed))}")


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}, not a number of seconds.") from None


def _boolean(name: str, text: str | None) -> bool | None:
    if text is None:
        return None
    if text.lower() not in ("true", "false"):
        raise ConfigurationError(f"{name} is {text!r}.", next_step="use true or false")
    return text.lower() == "true"


def _whole_number(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):  # noqa: PLR2004  (int() refuses very long texts with an error of its own)
        raise ConfigurationError(f"{name} is {text!r}, not a whole number.")
    return int(text)
