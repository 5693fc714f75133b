"""Which of the two guarantees a writer gets on a cluster. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from dualwrite.kafka.inspect.capabilities import BrokerCapabilities

NATIVE: Final = "native"
LIBRDKAFKA: Final = "librdkafka"


class Guarantee(Enum):
    """Both are atomic; they differ in what happens to a crashed transaction that is not recovered for a long time."""

    TWO_PHASE = "two-phase commit"
    """The broker keeps a prepared transaction until it is committed or aborted."""

    BOUNDED = "bounded"
    """The broker aborts a transaction after `transaction.timeout.ms`."""


@dataclass(frozen=True, slots=True)
class Promise:
    """The guarantee that a writer gets.

    Args:
        guarantee: Which guarantee.
        producer: "native" or "librdkafka".
        budget_ms: The most milliseconds from the first message of a transaction to its recovery; None if there is no limit,
            or the limit is not visible.
    """

    guarantee: Guarantee
    producer: str
    budget_ms: int | None

    def __str__(self) -> str:
        if self.guarantee is Guarantee.TWO_PHASE:
            return (
                f"Atomic, without a time limit (producer {self.producer!r} with two-phase commit): after a crash, a prepared "
                "transaction waits at the broker until recovery resolves it, and so do read_committed consumers of its "
                "partitions. Nothing is lost."
            )
        budget = "" if self.budget_ms is None else f", here {duration(self.budget_ms)}"
        return (
            f"Atomic, bounded by transaction.timeout.ms{budget} (producer {self.producer!r}): a crashed transaction that "
            "is not recovered within that time is proven LOST and reported, never silent."
        )


def promise(
    capabilities: BrokerCapabilities, *, producer: str, transaction_timeout_ms: int | None, two_phase: bool | None = None
) -> Promise:
    """The guarantee that a writer with these settings gets from a cluster.

    Args:
        capabilities: The cluster's capabilities.
        producer: The setting `producer`; "auto" chooses the best one for the cluster.
        transaction_timeout_ms: The setting `transaction.timeout.ms`; None means the broker's maximum.
        two_phase: The setting `two_phase`; False does not use two-phase commit even if the cluster supports it.
    """
    with_two_phase = capabilities.two_phase and two_phase is not False
    native = capabilities.native_with(two_phase=with_two_phase) and producer != LIBRDKAFKA
    if native and with_two_phase:
        return Promise(Guarantee.TWO_PHASE, NATIVE, None)
    budget = transaction_timeout_ms or capabilities.transaction_max_timeout_ms
    return Promise(Guarantee.BOUNDED, NATIVE if native else LIBRDKAFKA, budget)


def duration(milliseconds: int) -> str:
    """A duration as text: whole minutes as minutes, anything else in seconds."""
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{milliseconds / 1000:g} s" if rest or minutes < 2 else f"{minutes} min"  # noqa: PLR2004  (60 s is clearer)
