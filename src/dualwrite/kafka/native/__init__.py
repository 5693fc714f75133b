"""The native Kafka producer: KIP-939 on the wire. Records and batches are encoded without I/O."""

from __future__ import annotations

from importlib.util import find_spec


def is_compiled() -> bool:
    """Whether this installation has the compiled form. Loads nothing that a producer needs."""
    found = find_spec("dualwrite.kafka.native.records")
    return found is not None and not str(found.origin).endswith(".py")
