"""Where things are and how to behave: one frozen object, from arguments or from `DUALWRITE_*` environment variables.

| variable | meaning |
| --- | --- |
| `DUALWRITE_DATABASE_URL` | the database, as a SQLAlchemy URL |
| `DUALWRITE_KAFKA_BOOTSTRAP_SERVERS` | `bootstrap.servers` |
| `DUALWRITE_KAFKA_<NAME>` | any other Kafka setting: `DUALWRITE_KAFKA_SECURITY_PROTOCOL` is `security.protocol` |
| `DUALWRITE_TRANSACTIONAL_ID` | the logical transactional id |
| `DUALWRITE_PRODUCER` | `auto` or `librdkafka` |
| `DUALWRITE_ON_LOST` | `raise` or `report` |
| `DUALWRITE_TIMEOUT_CLAIM`, `_KAFKA`, `_DELIVERY` | time limits in seconds, see `Timeouts` |
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, Self, cast, get_args

from dualwrite.errors import ConfigurationError
from dualwrite.timeouts import Timeouts

PREFIX: Final = "DUALWRITE_"
_KAFKA: Final = PREFIX + "KAFKA_"
_TIMEOUT: Final = PREFIX + "TIMEOUT_"

ProducerName = Literal["auto", "librdkafka"]
OnLost = Literal["raise", "report"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that `connect` needs.

    Args:
        database_url: The database, as a SQLAlchemy URL, or None.
        kafka: Kafka's settings in librdkafka's names.
        transactional_id: The logical id, or None.
        producer: Which producer; "auto" takes the best for the broker.
        on_lost: What opening a writer does about unacknowledged lost transactions; see DualWriter.
        timeouts: Time limits.

    Raises:
        ConfigurationError: A value is none of those allowed.
    """

    database_url: str | None = field(default=None, repr=False)  # it may hold a password
    kafka: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    transactional_id: str | None = None
    producer: ProducerName = "auto"
    on_lost: OnLost = "raise"
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        _one_of("producer", self.producer, get_args(ProducerName))
        _one_of("on_lost", self.on_lost, get_args(OnLost))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the `DUALWRITE_*` variables; what is not set keeps its default.

        Raises:
            ConfigurationError: A value is none of those allowed, or not a number.
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
            on_lost=cast("OnLost", given.get(PREFIX + "ON_LOST", "raise")),
            timeouts=Timeouts(**limits),
        )

    def with_changes(self, **changes: Any) -> Self:
        """A copy with the given values that are not None."""
        return replace(self, **{name: value for name, value in changes.items() if value is not None})


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigurationError(f"{name} is {value!r}.", next_step=f"one of {', '.join(allowed)}")


def _seconds(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}, not a number of seconds.") from None
