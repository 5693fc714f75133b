"""How long a transaction may stay open without two-phase commit: `transaction.timeout.ms`, and what is left of it."""

from __future__ import annotations

import time
from typing import Final

from dualwrite.deadline import Limit
from dualwrite.errors import ConfigurationError, TransactionTimeoutError
from dualwrite.kafka.client.config import KafkaConfig
from dualwrite.kafka.client.coordinator import WireTransactionCoordinator

MORE_TIME: Final = (
    "raise transaction.timeout.ms where you set it, and the broker's transaction.max.timeout.ms, which is its default and its "
    "limit; with two-phase commit at the broker (Apache Kafka 4.1 or newer) nothing times out"
)
"""What to do where a transaction's time is too short: the end of an error's next step."""

DEFAULT_TRANSACTION_TIMEOUT_MS: Final = 900_000  # the broker's own default for transaction.max.timeout.ms
NO_TIMEOUT_MS: Final = 2**31 - 1  # what DescribeTransactions shows under two-phase commit
MIN_TRANSACTION_TIMEOUT_MS: Final = 1_000
TIME_RESERVE_SHARE: Final = 0.2
MAX_TIME_RESERVE: Final = 10.0
_JUST: Final = 1.0


def chosen_timeout_ms(config: KafkaConfig) -> int | None:
    """The user's `transaction.timeout.ms`, or None.

    Raises:
        ConfigurationError: It is too short to be kept.
    """
    chosen = config.transaction_timeout_ms
    if chosen is not None and chosen < MIN_TRANSACTION_TIMEOUT_MS:
        raise ConfigurationError(f"transaction.timeout.ms is {chosen}; {MIN_TRANSACTION_TIMEOUT_MS} is the least.")
    return chosen


def transaction_timeout_ms(
    config: KafkaConfig, coordinator: WireTransactionCoordinator, *, timeout: Limit | None = None
) -> int:
    """The user's `transaction.timeout.ms`, else the broker's maximum: a lost transaction can't be mended, a wait can."""
    chosen = chosen_timeout_ms(config)
    return chosen or coordinator.transaction_max_timeout_ms(timeout=timeout) or DEFAULT_TRANSACTION_TIMEOUT_MS


def reserve_for(timeout: float) -> float:
    """Seconds of a transaction's timeout that are kept back for committing the database and Kafka."""
    return min(TIME_RESERVE_SHARE * timeout, MAX_TIME_RESERVE)


class TimeBudget:
    """The clock of one transaction at a time.

    It is our own and starts before the broker's does, so that what it counts is never too little, whatever the clocks say.

    Args:
        timeout: The transaction's timeout in seconds, or None where it has none (two-phase commit).
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self._started_at: float | None = None

    def reset(self) -> None:
        """A new transaction; its time does not run yet."""
        self._started_at = None

    def start(self) -> None:
        """Something is about to be sent; the first call starts the clock."""
        if self._started_at is None:
            self._started_at = time.monotonic()

    @property
    def just_started(self) -> bool:
        """Whether the first message left within the last second, in which hardly a leader is given up (rule FB).

        A broker's session is 9 s by default.
        """
        return self._started_at is not None and time.monotonic() - self._started_at < _JUST

    @property
    def reserve(self) -> float:
        """Seconds kept back at the end for committing the database and Kafka."""
        return 0.0 if self.timeout is None else reserve_for(self.timeout)

    def check(self, kafka_transactional_id: str) -> None:
        """See that enough is left to commit.

        Raises:
            TransactionTimeoutError: It is not.
        """
        if self._started_at is None or self.timeout is None:
            return
        elapsed = time.monotonic() - self._started_at
        if elapsed > self.timeout - self.reserve:
            raise TransactionTimeoutError(
                f"The transaction is {elapsed:.1f} s old; Kafka may abort it at {self.timeout:g} s, "
                f"and {self.reserve:g} s are kept for committing.",
                cause="the block, the deliveries or the database took too long",
                next_step=f"make transactions shorter, or {MORE_TIME}",
                transactional_id=kafka_transactional_id,
                elapsed=elapsed,
                timeout=self.timeout,
            )
