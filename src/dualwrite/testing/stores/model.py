"""A model of what dualwrite guarantees: what a row and a database must contain after each step; and a simulated Kafka. No I/O.

It does not use `dualwrite.stores.rows`, which the stores use, so that a mistake there is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.stores.state_row import LostKind, LostTransaction, StateRow


@dataclass(frozen=True)
class RowModel:
    """What the row of the id must contain; a fence of 0 means that there is no row."""

    fence: int = 0
    generation: int = 0
    kind: ProducerKind = ProducerKind.LIBRDKAFKA
    state: PreparedTxnState | None = None
    prepared_generation: int = 0
    resolved: int = 0
    number: int = 0
    lost: tuple[LostTransaction, ...] = ()
    forgotten: bool = False

    @property
    def is_open(self) -> bool:
        """Whether something is still to be recovered or acknowledged."""
        return self.state is not None or self.resolved < self.generation or bool(self.lost)

    def with_generation(self, kind: ProducerKind, *, reuse: bool) -> RowModel:
        """The row after acquiring a generation."""
        unverified = {entry.generation for entry in self.lost if entry.kind is LostKind.UNVERIFIED}
        if self.generation not in unverified and reuse and kind is self.kind and kind is not ProducerKind.LIBRDKAFKA:
            return replace(self, resolved=self.generation - 1 if self.resolved >= self.generation else self.resolved)
        return replace(self, generation=self.generation + 1, kind=kind)

    def fields(self) -> dict[str, Any]:
        """The values by their names in StateRow."""
        return {
            "fence": self.fence,
            "generation": self.generation,
            "generation_kind": self.kind,
            "prepared_state": self.state,
            "prepared_generation": None if self.state is None else self.prepared_generation,
            "resolved_generation": self.resolved,
            "transaction_number": self.number,
            "lost": self.lost,
            "forgotten": self.forgotten,
        }


def fields_of(row: StateRow) -> dict[str, Any]:
    """The same fields of a stored row."""
    found = {name: getattr(row, name) for name in RowModel().fields()}
    return {**found, "prepared_generation": None if row.prepared_state is None else row.prepared_generation}


@dataclass
class SimulatedTransaction:
    """One Kafka transaction.

    Args:
        state: Identifies it.
        messages: What was sent in it.
        committed: How it ended; None while it is open.
    """

    state: PreparedTxnState
    messages: list[int] = field(default_factory=list)
    committed: bool | None = None

    def end(self, *, commit: bool) -> bool:
        """End it if it is open; return whether it has ended in this way, as EndTxn v5 does."""
        if self.committed is None:
            self.committed = commit
        return self.committed is commit


@dataclass
class SimulatedKafka:
    """Every Kafka transaction of one id, each with its own state, as with EndTxn v5 (KIP-890)."""

    transactions: list[SimulatedTransaction] = field(default_factory=list)

    def begin(self) -> SimulatedTransaction:
        """Begin a transaction."""
        begun = SimulatedTransaction(PreparedTxnState(len(self.transactions), 0))
        self.transactions.append(begun)
        return begun

    def ongoing(self) -> list[SimulatedTransaction]:
        """The open transactions, as DescribeTransactions reports them."""
        return [transaction for transaction in self.transactions if transaction.committed is None]
