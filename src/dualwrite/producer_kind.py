"""Which producer holds a generation of an id: it decides who may go on with the same Kafka transactional id."""

from __future__ import annotations

from enum import Enum


class ProducerKind(Enum):
    """What a generation was taken for; the value is what the database keeps."""

    LIBRDKAFKA = "librdkafka"
    """librdkafka, whose InitProducerId can't be made conditional: every claim takes a generation of its own (rule O2)."""

    NATIVE = "native"
    """The native producer without two-phase commit: its transactions have a timeout."""

    NATIVE_TWO_PHASE = "native-2pc"
    """The native producer with two-phase commit (KIP-939)."""

    @property
    def takes_over(self) -> bool:
        """Whether a claimant goes on with the generation of an earlier one, by compare-and-set (rule F5)."""
        return self is not ProducerKind.LIBRDKAFKA
