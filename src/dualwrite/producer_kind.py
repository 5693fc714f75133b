"""The kind of producer that uses a generation of an id; only some kinds can reuse a generation's Kafka transactional id."""

from __future__ import annotations

from enum import Enum


class ProducerKind(Enum):
    """The kind of producer that a generation was acquired for; the value is stored in the database."""

    LIBRDKAFKA = "librdkafka"
    """librdkafka, whose InitProducerId can't be made conditional: every claim acquires a new generation (rule O2)."""

    NATIVE = "native"
    """The native producer without two-phase commit: its transactions have a timeout."""

    NATIVE_TWO_PHASE = "native-2pc"
    """The native producer with two-phase commit (KIP-939)."""

    @property
    def takes_over(self) -> bool:
        """Whether a claimant can continue with an earlier claimant's generation, by compare-and-set (rule F5)."""
        return self is not ProducerKind.LIBRDKAFKA
