"""How long a transaction may stay open without two-phase commit, what is left of it, and timestamps that Kafka refuses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Final

from dualwrite.deadline import Limit
from dualwrite.errors import (
    BrokerError,
    ConfigurationError,
    DeliveryError,
    DualWriteError,
    HostClockError,
    MessageRefusedError,
    PrepareError,
    ProducerFencedError,
    TransactionTimeoutError,
)
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator

MORE_TIME: Final = (
    "raise transaction.timeout.ms if you set it, and the broker's transaction.max.timeout.ms, which is its default and "
    "maximum; with two-phase commit enabled on the broker (Apache Kafka 4.1 or newer) nothing times out"
)
"""What to do if a transaction's timeout is too short: the end of an error's next step."""

DEFAULT_TRANSACTION_TIMEOUT_MS: Final = 900_000  # the broker's own default for transaction.max.timeout.ms
NO_TIMEOUT_MS: Final = 2**31 - 1  # what DescribeTransactions shows under two-phase commit
MIN_TRANSACTION_TIMEOUT_MS: Final = 1_000
TIME_RESERVE_SHARE: Final = 0.2
MAX_TIME_RESERVE: Final = 10.0
_JUST: Final = 1.0

_BOOTTIME: Final[int | None] = getattr(time, "CLOCK_BOOTTIME", None)  # only Linux has it


def chosen_timeout_ms(config: KafkaConfig) -> int | None:
    """The user's `transaction.timeout.ms`, or None.

    Raises:
        ConfigurationError: It is below the minimum of 1 s.
    """
    chosen = config.transaction_timeout_ms
    if chosen is not None and chosen < MIN_TRANSACTION_TIMEOUT_MS:
        raise ConfigurationError(f"transaction.timeout.ms is {chosen}; it must be at least {MIN_TRANSACTION_TIMEOUT_MS}.")
    return chosen


def transaction_timeout_ms(
    config: KafkaConfig, coordinator: WireTransactionCoordinator, *, timeout: Limit | None = None
) -> int:
    """The user's `transaction.timeout.ms`, else the broker's maximum: a longer wait is better than a lost transaction."""
    chosen = chosen_timeout_ms(config)
    return chosen or coordinator.transaction_max_timeout_ms(timeout=timeout) or DEFAULT_TRANSACTION_TIMEOUT_MS


def reserve_for(timeout: float) -> float:
    """Seconds of a transaction's timeout that are reserved for committing the database and Kafka."""
    return min(TIME_RESERVE_SHARE * timeout, MAX_TIME_RESERVE)


def _now() -> float:
    """Seconds on a clock that goes on in suspend, as the broker's does; where there is none, `time.monotonic`."""
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)


class TimeBudget:
    """The age of the current transaction, compared with its timeout in seconds; None if it has none (two-phase commit).

    Measured by a local clock, which on Linux also counts the time in suspend, and started before the broker's timer: so the age
    is not underestimated.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._started_at: float | None = None

    def reset(self) -> None:
        """Prepare for a new transaction, whose clock is not running yet."""
        self._started_at = None

    def start(self) -> None:
        """Start the clock, unless it is running; called before anything is sent."""
        if self._started_at is None:
            self._started_at = _now()

    @property
    def elapsed(self) -> float:
        """Seconds since the clock was started; 0 if it was not."""
        return 0.0 if self._started_at is None else _now() - self._started_at

    @property
    def just_started(self) -> bool:
        """Whether the first message was sent within the last second: its leader is unlikely to be gone since (rule FB).

        A broker's session timeout is 9 s by default.
        """
        return self._started_at is not None and _now() - self._started_at < _JUST

    @property
    def reserve(self) -> float:
        """Seconds reserved at the end for committing the database and Kafka."""
        return 0.0 if self.timeout is None else reserve_for(self.timeout)

    def check(self, kafka_transactional_id: str) -> None:
        """Check that enough time is left to commit.

        Raises:
            TransactionTimeoutError: Less than the reserve is left.
        """
        if self._started_at is None or self.timeout is None:
            return
        elapsed = _now() - self._started_at
        if elapsed > self.timeout - self.reserve:
            raise _too_old(
                f"The transaction is {elapsed:.1f} s old; Kafka may abort it at {self.timeout:g} s, "
                f"and {self.reserve:g} s are reserved for committing.",
                kafka_transactional_id,
                elapsed,
                self.timeout,
            )

    def explained(self, error: BrokerError, kafka_transactional_id: str) -> BrokerError:
        """The error, or a TransactionTimeoutError in its place if the transaction is older than its timeout.

        Once Kafka has aborted a transaction that has timed out, it refuses the producer as if another one had replaced it.
        """
        if self._started_at is None or self.timeout is None or not _may_follow_from_an_abort(error):
            return error
        elapsed = _now() - self._started_at
        if elapsed <= self.timeout:
            return error
        explained = _too_old(
            f"The transaction is {elapsed:.1f} s old, and Kafka aborts it at {self.timeout:g} s. The producer was refused: "
            f"{error}",
            kafka_transactional_id,
            elapsed,
            self.timeout,
        )
        explained.__cause__ = error
        return explained


def _may_follow_from_an_abort(error: BrokerError) -> bool:
    return isinstance(error, ProducerFencedError | DeliveryError | PrepareError) and not isinstance(error, MessageRefusedError)


def _too_old(message: str, kafka_transactional_id: str, elapsed: float, timeout: float) -> TransactionTimeoutError:
    return TransactionTimeoutError(
        message,
        cause="the block, the deliveries or the database took too long",
        next_step=f"make transactions shorter, or {MORE_TIME}",
        transactional_id=kafka_transactional_id,
        elapsed=elapsed,
        timeout=timeout,
    )


# --- timestamps that Kafka refuses -----------------------------------------------------------------------------------------

_EARLIER: Final = 10.0
"""Seconds by which a message may be older than its transaction at Kafka: the first request may have had to wait."""
_ASKING: Final = 2.0
"""Seconds for asking the coordinator when the transaction has begun."""


Judged = Callable[[BrokerError, Iterable[int]], BrokerError]
"""`judged`, for the transactions of one producer."""


def judged(
    budget: TimeBudget, coordinator: WireTransactionCoordinator, refused: BrokerError, times: Iterable[int]
) -> BrokerError:
    """The error for refused `times` (milliseconds since 1970): HostClockError if all of them are the present time here.

    Then they are this host's, or the sender has asked the same clock. The transaction's beginning shows how far that is from
    Kafka's: the coordinator has noted it by its own clock.
    """
    now, began = time.time(), time.time() - budget.elapsed
    if not all(began - _EARLIER <= each / 1000 <= now + 1 for each in times):
        return refused
    ahead, found = 0.0, None
    with suppress(DualWriteError):
        found = coordinator.describe(refused.transactional_id or "", timeout=_ASKING)
    if found is not None and found.start_time_ms >= 0:
        ahead = began - found.start_time_ms / 1000
    cause = "this host's clock is not Kafka's, or the topic's message.timestamp.after.max.ms or .before.max.ms is too small"
    if abs(ahead) > _EARLIER:
        away = timedelta(seconds=round(abs(ahead)))
        cause = f"this host's clock is {away} {'ahead of' if ahead > 0 else 'behind'} the broker's (h:mm:ss)"
    return HostClockError(
        f"Kafka refuses the present time of this host as a message's timestamp: {refused.name}.",
        transactional_id=refused.transactional_id,
        cause=cause,
        next_step="correct the clock (NTP), and try again; the message needs no change",
        code=refused.code,
        name=refused.name,
        ahead=ahead or None,
    )
