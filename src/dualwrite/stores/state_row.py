"""The row that a database keeps for one logical transactional id, and the values that the contract of a store is about."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final

from dualwrite.delivery import Delivery
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState
from dualwrite.transactional_id import TransactionalId

MAX_OWNER_LENGTH: Final = 255
"""Characters of an owner; a longer one is truncated."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to write the row of one id, until the next claim of it.

    Args:
        transactional_id: The logical id.
        fence: The claim's fencing token; every write to the row requires that it is still the row's.
        owner: Who claimed, as text for people: host, process id and program, at most MAX_OWNER_LENGTH characters.
    """

    transactional_id: str
    fence: int
    owner: str


class LostKind(Enum):
    """Why an entry is in a row's `lost` list."""

    LOST = "LOST"
    """The database committed, Kafka provably aborted."""

    UNVERIFIED = "UNVERIFIED"
    """The database committed, and Kafka has no evidence left."""


@dataclass(frozen=True, slots=True)
class LostTransaction:
    """A transaction whose messages are lost or unverified; it stays in the row until it is acknowledged.

    Args:
        kind: What is known about it.
        state: The prepared state that the database had committed.
        generation: The generation of the id that it ran under.
        recorded_at: When recovery found it (UTC, aware).
        delivery: How many messages it had, where they are in the log, and when it was prepared; None if that was not stored.
        producer: Which kind of producer had prepared it; None if that is not known.
        cluster_id: The Kafka cluster that the row named when it was recorded: `delivery` is about that one's log.
    """

    kind: LostKind
    state: PreparedTxnState
    generation: int
    recorded_at: datetime
    delivery: Delivery | None = None
    producer: ProducerKind | None = None
    cluster_id: str = ""


@dataclass(frozen=True, slots=True)
class StateRow:
    """What the database keeps for one logical transactional id.

    Args:
        transactional_id: The logical id.
        fence: The fencing token: number of the newest claim.
        generation: The newest generation acquired; 0 in a new row.
        generation_kind: Which kind of producer it was acquired for.
        prepared_state: The state S that the last recorded transaction committed, or None.
        prepared_generation: The generation that S belongs to; has no meaning while S is None.
        delivery: Where the messages of S's transaction are in Kafka's log; None while S is None, and if the transaction has no
            messages.
        resolved_generation: No transaction is open on any generation up to this one; 0 in a new row.
        transaction_number: The number of the last recorded transaction, counted by its writer from 1 at each claim; 0 at
            each claim. With `fence` it names a transaction that sent no message and so has no S.
        lost: What recovery found lost or unverified and is not acknowledged yet.
        owner: Who owns the newest claim.
        updated_at: When the row last changed (UTC, aware).
        forgotten: Whether it is only a tombstone that keeps the fence.
        cluster_id: Kafka's `cluster.id`, of the cluster that the generations are on; empty if no generation was acquired yet
            or the id was forgotten since.
        store_id: Identifies the database in the ids that Kafka sees (rule ST); empty if no generation was acquired yet. After
            the database got a new id it is still the old one, until the next generation is acquired.
        claim_token: Unique to the newest claim: by it the claim is recognized if its COMMIT got no response.
    """

    transactional_id: str
    fence: int
    generation: int
    prepared_state: PreparedTxnState | None
    prepared_generation: int
    resolved_generation: int
    transaction_number: int
    lost: tuple[LostTransaction, ...]
    owner: str
    updated_at: datetime
    forgotten: bool = False
    generation_kind: ProducerKind = ProducerKind.LIBRDKAFKA
    claim_token: str = ""
    delivery: Delivery | None = None
    cluster_id: str = ""
    store_id: str = ""

    @property
    def claim(self) -> Claim:
        """The newest claim."""
        return Claim(self.transactional_id, self.fence, self.owner)

    def kafka_id(self, generation: int) -> str:
        """The id that Kafka sees for a generation; for generation 0, which is never acquired, the row's id."""
        return str(TransactionalId.of_row(self.transactional_id).at(generation, self.store_id))

    def kind_of(self, generation: int) -> ProducerKind | None:
        """Which kind of producer a generation was acquired for; None for one before the newest, whose kind is not kept."""
        return self.generation_kind if generation == self.generation else None

    @property
    def unresolved_generations(self) -> range:
        """The generations on which something may still be open; the resolved ones are not described again (rule SG)."""
        return range(self.resolved_generation + 1, self.generation + 1)

    @property
    def generations_to_recover(self) -> tuple[int, ...]:
        """The generations that recovery examines: the unresolved ones, and those of UNVERIFIED entries (rule UC)."""
        return tuple(sorted({*self.unresolved_generations, *(entry.generation for entry in self.unverified)}))

    @property
    def is_clean(self) -> bool:
        """Whether there is nothing to recover, and nothing to acknowledge."""
        return self.prepared_state is None and not self.generations_to_recover and not self.lost

    @property
    def unverified(self) -> tuple[LostTransaction, ...]:
        """The entries of `lost` whose outcome may still be found."""
        return tuple(entry for entry in self.lost if entry.kind is LostKind.UNVERIFIED)


@dataclass(frozen=True, slots=True)
class Resolution:
    """One conditional change of a row by recovery. Fields left at their defaults change nothing.

    Args:
        clear_state: S is resolved: set it to None, and its delivery too.
        lost: Add this entry to `lost`, in the same write that clears S.
        resolved_generation: No transaction is open any more on the generations up to this one.
        resolved_entry: Remove this entry from `lost`: its outcome is known now (rule UC). Ignored if it is not there.
        cluster_id: The id has moved to this Kafka cluster.
        clear_lost: Remove every entry from `lost`: they belong to the database that this one is a copy of.
        clear_only: As `clear_state`, but only if S still is this state; otherwise S stays.
    """

    clear_state: bool = False
    lost: LostTransaction | None = None
    resolved_generation: int | None = None
    resolved_entry: LostTransaction | None = None
    cluster_id: str | None = None
    clear_lost: bool = False
    clear_only: PreparedTxnState | None = None


@dataclass(frozen=True, slots=True)
class Acquiring:
    """How to acquire generations for a writer's lanes; see `TxnStateStore.acquire_generation`.

    Args:
        kind: The kind of their producers.
        lanes: The ids of the lanes.
        reuse: Those of them that continue with their newest generation, if possible.
        cluster_id: Kafka's `cluster.id`.
    """

    kind: ProducerKind
    lanes: frozenset[str]
    reuse: frozenset[str]
    cluster_id: str


@dataclass(frozen=True, slots=True)
class ClaimedLanes:
    """The result of `TxnStateStore.claim_lanes`.

    Args:
        rows: The rows as claimed: those of the given lanes, in their order, then those of further lanes of the id.
        have_generations: Whether the generations were acquired as well.
    """

    rows: tuple[StateRow, ...]
    have_generations: bool = False
