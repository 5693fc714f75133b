"""The row that a database keeps for one logical transactional id, and the values that the contract of a store is about."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import Enum
from typing import Any, Final

from dualwrite.errors import (
    ClusterMismatchError,
    FencedError,
    NotResolvedError,
    StoredStateError,
    TransactionChangedError,
    shell_word,
)
from dualwrite.state import Delivery, PreparedTxnState, ProducerKind, TransactionDescription, delivery_text, names, state_text
from dualwrite.transactional_id import TransactionalId, name_of

MAX_OWNER_LENGTH: Final = 255
"""Characters of an owner; a longer one is truncated."""

_IDS_SHOWN: Final = 5
"""So many ids are named in an error."""


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

    FORGOTTEN = "FORGOTTEN"
    """Both sides committed, and the database has gone back to before that: the messages are visible, the rows are gone."""


@dataclass(frozen=True, slots=True)
class LostTransaction:
    """A lost, unverified or forgotten transaction; it stays in the row until it is published again, proven or acknowledged.

    Args:
        kind: What is known about it.
        state: The prepared state that the database had committed.
        generation: The generation of the id that it ran under.
        recorded_at: When recovery found it (UTC, aware).
        delivery: How many messages it had, where they are in the log, and when it was prepared; None if that was not stored.
        producer: Which kind of producer had prepared it; None if that is not known.
        cluster_id: The Kafka cluster that the row named when it was recorded: `delivery` is about that one's log.
        transactions: How many there are; of forgotten ones, at least: `state` is that of the newest, `delivery` of all.
    """

    kind: LostKind
    state: PreparedTxnState
    generation: int
    recorded_at: datetime
    delivery: Delivery | None = None
    producer: ProducerKind | None = None
    cluster_id: str = ""
    transactions: int = 1


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
        lost: What was found lost, unverified or forgotten, and was neither published again nor acknowledged yet.
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

    @property
    def without_messages(self) -> tuple[LostTransaction, ...]:
        """The entries of `lost` whose messages are missing in Kafka, or may be: not the forgotten ones."""
        return tuple(entry for entry in self.lost if entry.kind is not LostKind.FORGOTTEN)


@dataclass(frozen=True, slots=True)
class Republished:
    """A new transaction that publishes the messages of a LOST one again.

    Args:
        entry: The LOST transaction, which the new one replaces.
        state: The prepared state of the new transaction.
        generation: The generation that it runs on.
        delivery: Where its messages are in Kafka's log.
    """

    entry: LostTransaction
    state: PreparedTxnState
    generation: int
    delivery: Delivery | None


@dataclass(frozen=True, slots=True)
class Resolution:
    """One conditional change of a row by recovery. Fields left at their defaults change nothing.

    Args:
        clear_state: S is resolved: set it to None, and its delivery too.
        lost: Add this entry to `lost`, in the same write that clears S or removes `resolved_entry`; if that is not in the row
            any more, add nothing (rule RS). So if `behind` is given, and the row's transaction has this number or a later one.
        resolved_generation: No transaction is open any more on the generations up to this one.
        resolved_entry: Remove this entry from `lost`: its outcome is known now (rule UC). Ignored if it is not there.
        cluster_id: The id has moved to this Kafka cluster.
        clear_lost: Remove every entry from `lost`: they belong to the database that this one is a copy of (rule RD).
        clear_only: As `clear_state`, but only if S still is this state; otherwise S stays, and so does `resolved_generation`
            if there is another S: recovery shall see it.
        republished: Replace its entry in `lost` by S, its delivery and generation, in the same write (rules RA and RE).
    """

    clear_state: bool = False
    lost: LostTransaction | None = None
    resolved_generation: int | None = None
    resolved_entry: LostTransaction | None = None
    cluster_id: str | None = None
    clear_lost: bool = False
    clear_only: PreparedTxnState | None = None
    republished: Republished | None = None
    behind: int | None = None


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


# --- claims -------------------------------------------------------------------------------------------------------------------


def claimed(
    row: StateRow | None, transactional_id: str, owner: str, *, token: str, expected_fence: int | None = None
) -> StateRow:
    """The row after a claim: see `TxnStateStore.claim`. If its newest claim already has this token, the row itself.

    The token is unique to this claim, to recognize it if the commit gets no response (`is_claim_of`).

    Raises:
        FencedError: The row does not have the expected fence, or is gone.
    """
    if row is not None and is_claim_of(row, token):
        return row
    owner = owner[:MAX_OWNER_LENGTH]
    if expected_fence is not None:
        check_fence(row, Claim(transactional_id, expected_fence, owner))
    if row is None:
        return StateRow(
            transactional_id=transactional_id,
            fence=1,
            generation=0,
            prepared_state=None,
            prepared_generation=0,
            resolved_generation=0,
            transaction_number=0,
            lost=(),
            owner=owner,
            updated_at=datetime.now(UTC),
            claim_token=token,
        )
    return changed(
        row,
        fence=row.fence + 1,
        owner=owner,
        claim_token=token,
        transaction_number=0 if expected_fence is None else row.transaction_number,
        forgotten=False if expected_fence is None else row.forgotten,
        cluster_id="" if expected_fence is None and row.forgotten else row.cluster_id,
    )


def new_token() -> str:
    """A token for a claim, unique to it."""
    return uuid.uuid4().hex


def is_claim_of(row: StateRow | None, token: str, *, expected_fence: int | None = None) -> bool:
    """Whether the row's newest claim is the one made with this token: its commit got no response, but succeeded."""
    return row is not None and row.claim_token == token and (expected_fence is None or row.fence == expected_fence + 1)


def check_fence(row: StateRow | None, claim: Claim) -> StateRow:
    """The row, checked to have the claim's fence.

    Raises:
        FencedError: The row has another fence, or is gone.
    """
    if row is None:
        raise fenced(claim, None, None)
    if row.fence != claim.fence:
        raise fenced(claim, row.fence, row.owner)
    return row


def fenced(claim: Claim, current_fence: int | None, current_owner: str | None) -> FencedError:
    """The error for a claim whose fence is no longer the row's; no current fence means that the row is gone."""
    if current_fence is None:
        what = f"Our claim {claim.fence} is no longer valid: the row of the id is gone."
        cause = "it was deleted manually, or the transaction does not see it (a temporary table of the same name, for example)"
    else:
        what = f"Our claim {claim.fence} was replaced by claim {current_fence} of {current_owner!r}."
        cause = "another process opened or recovered the same transactional id after us"
        if current_fence < claim.fence:
            what = (
                f"The database has forgotten our claim {claim.fence}: the row has claim {current_fence} of {current_owner!r}."
            )
            cause = (
                "it has gone back to an earlier state: a failover to a standby that lacked the last commits, a restored backup"
            )
    return FencedError(
        what,
        transactional_id=claim.transactional_id,
        cause=cause,
        next_step="run one writer for each transactional id; opening a new one here acquires the id again",
        fence=claim.fence,
        current_fence=current_fence,
        current_owner=current_owner,
    )


# --- under a claim ------------------------------------------------------------------------------------------------------------


def recorded(
    row: StateRow,
    state: PreparedTxnState | None,
    *,
    generation: int,
    transaction_number: int,
    delivery: Delivery | None = None,
) -> StateRow:
    """The row after `StoreTransaction.record`."""
    return changed(
        row,
        prepared_state=state,
        prepared_generation=generation,
        transaction_number=transaction_number,
        delivery=delivery,
    )


def with_resolution(row: StateRow, resolution: Resolution) -> StateRow:
    """The row after `TxnStateStore.record_resolution`; applying a resolution twice has the same effect as once.

    Raises:
        TransactionChangedError: The entry of a transaction that was published again is not in the row any more.
    """
    if resolution.republished is not None:
        return _with_republished(row, resolution.republished)
    kept = () if resolution.clear_lost else row.lost
    left = tuple(entry for entry in kept if resolution.resolved_entry is None or not _is_same(entry, resolution.resolved_entry))
    added = resolution.lost
    if added is not None and resolution.clear_state and not _ends(row.prepared_state, added):
        added = None  # rule RS: written before, without an answer, and perhaps acknowledged since
    if resolution.behind is not None and row.transaction_number >= resolution.behind:
        added = None  # what was read before was not the newest row
    if added is not None and resolution.resolved_entry is not None and not has_entry(row, resolution.resolved_entry):
        added = None
    if added is not None and resolution.resolved_entry is None:
        added = _after(left, added)
    is_meant = resolution.clear_only is not None and row.prepared_state == resolution.clear_only
    clears = resolution.clear_state or is_meant
    is_other = resolution.clear_only is not None and row.prepared_state is not None and not is_meant
    return changed(
        row,
        prepared_state=None if clears else row.prepared_state,
        delivery=None if clears else row.delivery,
        lost=left if added is None else with_lost(left, added),
        cluster_id=row.cluster_id if resolution.cluster_id is None else resolution.cluster_id,
        resolved_generation=(
            row.resolved_generation if resolution.resolved_generation is None or is_other else resolution.resolved_generation
        ),
    )


def _ends(stored: PreparedTxnState | None, added: LostTransaction) -> bool:
    """Whether the entry says what has become of S, or of what came after it."""
    return stored is not None and (stored == added.state or added.kind is LostKind.FORGOTTEN)


def _with_republished(row: StateRow, new: Republished) -> StateRow:
    if (row.prepared_state, row.prepared_generation) == (new.state, new.generation):
        return row  # written before, without an answer
    if not has_entry(row, new.entry):
        raise entry_gone(row.transactional_id, new.entry)
    return changed(
        row,
        prepared_state=new.state,
        prepared_generation=new.generation,
        delivery=new.delivery,
        lost=tuple(entry for entry in row.lost if not _is_same(entry, new.entry)),
    )


def proven_lost(entries: Iterable[LostTransaction]) -> tuple[LostTransaction, ...]:
    """Those that Kafka has provably aborted: only their messages may be published again (rule RL)."""
    return tuple(entry for entry in entries if entry.kind is LostKind.LOST)


def has_entry(row: StateRow, entry: LostTransaction) -> bool:
    """Whether the row still lists this lost or unverified transaction."""
    return any(_is_same(each, entry) for each in row.lost)


def original_of(entry: LostTransaction) -> str:
    """The transaction that was lost first, whose messages this one has: its generation and state."""
    copied = "" if entry.delivery is None else entry.delivery.copy_of
    return copied or f"{entry.generation} {state_text(entry.state)}"


def entry_gone(transactional_id: str, entry: LostTransaction) -> TransactionChangedError:
    """The error if a lost transaction was acknowledged while its messages were being published again."""
    return TransactionChangedError(
        f"The lost transaction {entry.state} was acknowledged meanwhile, so its messages are not published again.",
        transactional_id=transactional_id,
        cause="`dualwrite recover --acknowledge`, which says that somebody has dealt with them",
        next_step="nothing; the new transaction was aborted",
    )


def with_lost(entries: tuple[LostTransaction, ...], added: LostTransaction) -> tuple[LostTransaction, ...]:
    """The list with `added`, unless it has the same transaction already: a resolution may be sent twice."""
    return entries if any(_is_same(entry, added) for entry in entries) else (*entries, added)


def _after(entries: tuple[LostTransaction, ...], added: LostTransaction) -> LostTransaction:
    """The entry of a transaction that was committed after those of the list, with a time after theirs (rule RP).

    The clock of its host may be behind. A copy keeps the time of its original.
    """
    delivery, times = added.delivery, [each.delivery.prepared_at for each in entries if each.delivery is not None]
    if delivery is None or delivery.copy_of or not times:
        return added
    earliest = max(times) + timedelta(milliseconds=1)  # what a row keeps of a time
    return added if delivery.prepared_at >= earliest else replace(added, delivery=replace(delivery, prepared_at=earliest))


def _is_same(one: LostTransaction, other: LostTransaction) -> bool:
    return (one.kind, one.state, one.generation) == (other.kind, other.state, other.generation)


def with_generation(row: StateRow, kind: ProducerKind, *, reuse: bool, store_id: str, cluster_id: str = "") -> StateRow:
    """The row after `TxnStateStore.acquire_generation`; its `generation` is the one acquired.

    A new generation is named by `store_id`, the store's own.

    Raises:
        ClusterMismatchError: The row belongs to another cluster.
    """
    if cluster_id:
        row = changed(on_cluster(row, cluster_id), cluster_id=cluster_id)
    has_unverified = any(entry.generation == row.generation for entry in row.unverified)  # rule UG
    if row.store_id != store_id:  # rule ST
        row = changed(row, store_id=store_id)
    elif reuse and kind.takes_over and row.generation_kind is kind and not has_unverified:
        return changed(row, resolved_generation=min(row.resolved_generation, row.generation - 1))
    return changed(row, generation=row.generation + 1, generation_kind=kind)


def found_again(row: StateRow, generation: int, described: TransactionDescription | None) -> LostTransaction | None:
    """The UNVERIFIED entry of a generation that is the described transaction (rule UC), if there is one."""
    entries = (entry for entry in row.unverified if entry.generation == generation)
    return next((entry for entry in entries if names(entry.state, described)), None)


def on_cluster(row: StateRow, cluster_id: str) -> StateRow:
    """The row, checked to belong to this cluster, or to none yet (rule CL); a tombstone belongs to none: nothing is open.

    Raises:
        ClusterMismatchError: The row belongs to another cluster.
    """
    if row.forgotten or row.cluster_id in ("", cluster_id):
        return row
    raise _elsewhere(row.transactional_id, {row.transactional_id: row.cluster_id}, cluster_id)


def elsewhere_in(rows: Iterable[StateRow | None], name: str, cluster_id: str) -> dict[str, str]:
    """The result of `TxnStateStore.elsewhere`, from the rows of the ids that begin with the name."""
    ours = (row for row in rows if row is not None and name_of(row.transactional_id) == name and not row.forgotten)
    return {row.transactional_id: row.cluster_id for row in ours if row.cluster_id not in ("", cluster_id)}


def none_elsewhere(transactional_id: str, elsewhere: Mapping[str, str], cluster_id: str) -> None:
    """Check that no id of this id's name is on another cluster (rule CL); `elsewhere`: see `TxnStateStore.elsewhere`.

    Raises:
        ClusterMismatchError: One is.
    """
    if elsewhere:
        raise _elsewhere(transactional_id, elsewhere, cluster_id)


def _elsewhere(transactional_id: str, elsewhere: Mapping[str, str], cluster_id: str) -> ClusterMismatchError:
    ids: dict[str, list[str]] = {}
    for row_id, stored in sorted(elsewhere.items()):
        on = ids.setdefault(stored, [])
        on += {TransactionalId.of_row(row_id).logical}.difference(on)
    stored = elsewhere.get(transactional_id) or next(iter(ids))
    what = f"the id is in use on cluster {stored!r}"
    if transactional_id not in elsewhere:
        what = f"ids of {name_of(transactional_id)!r} are in use " + "; ".join(
            f"on cluster {stored!r}: {', '.join(on[:_IDS_SHOWN])}{' …' if len(on) > _IDS_SHOWN else ''}"
            for stored, on in ids.items()
        )
    return ClusterMismatchError(
        f"This is Kafka cluster {cluster_id!r}, and {what}. Nothing was changed.",
        transactional_id=transactional_id,
        cause="bootstrap.servers (environment: DUALWRITE_KAFKA_BOOTSTRAP_SERVERS) names another cluster, its name resolves to "
        "another one, or the cluster was created again. All ids of a prefix, or of a relay's name, are on one cluster",
        next_step="connect to the right cluster; if that is this one, recover on the other one first, then move all ids of the "
        f"name with `dualwrite db move-cluster --id {shell_word(ids[stored][0])}` and this one's address",
        stored_cluster_id=stored,
        seen_cluster_id=cluster_id,
    )


# --- without a claim ----------------------------------------------------------------------------------------------------------


def acknowledged(row: StateRow, only: Collection[LostTransaction] | None = None) -> StateRow:
    """The row after `TxnStateStore.acknowledge`."""
    left = () if only is None else tuple(entry for entry in row.lost if not any(_is_same(entry, one) for one in only))
    return changed(row, lost=left)


def forgotten(row: StateRow) -> StateRow:
    """The row after `TxnStateStore.forget`; a tombstone is unchanged.

    Raises:
        NotResolvedError: The id still has something to recover or acknowledge.
    """
    if row.forgotten:
        return row
    if row.prepared_state is not None or row.unresolved_generations or row.lost:
        raise _not_resolved(row)
    return changed(row, forgotten=True, fence=row.fence + 1, owner="", claim_token="", cluster_id="")


def _not_resolved(row: StateRow) -> NotResolvedError:
    if proven_lost(row.lost):
        why, flag = "the messages of a lost transaction are not published again yet", " --republish"
    elif row.lost:
        why, flag = f"{len(row.lost)} unverified or forgotten transactions are not acknowledged", " --acknowledge"
    elif row.prepared_state is not None:
        why, flag = f"the state {row.prepared_state} is not resolved", ""
    else:
        why, flag = f"generations {row.resolved_generation + 1} to {row.generation} are not resolved", ""
    return NotResolvedError(
        "The id can't be forgotten: it is not fully recovered or acknowledged.",
        transactional_id=row.transactional_id,
        cause=why,
        next_step=f"run `dualwrite recover --id {shell_word(row.transactional_id)}{flag}` first",
    )


def changed(row: StateRow, **changes: object) -> StateRow:
    """The row with these fields changed, and the current time."""
    return replace(row, updated_at=datetime.now(UTC), **changes)  # type: ignore[arg-type]  # each caller names fields


_STORED: Final[Mapping[str, type]] = {
    **dict.fromkeys(("fence", "generation", "prepared_generation", "resolved_generation", "transaction_number"), int),
    **dict.fromkeys(("owner", "claim_token", "cluster_id", "store_id"), str),
    "updated_at": datetime,
    "forgotten": bool,
}
"""The fields that are stored as they are, with their types."""


def values_of(row: StateRow) -> dict[str, Any]:
    """What a store keeps of a row besides its id: values of JSON, but for `updated_at`. `row_of` reads them."""
    return {
        **{name: getattr(row, name) for name in _STORED},
        "generation_kind": row.generation_kind.value,
        "prepared_transaction_state": state_text(row.prepared_state),
        "delivery": delivery_text(row.delivery),
        "lost": [_lost_object(entry) for entry in row.lost],
        "updated_at": row.updated_at.astimezone(UTC),
    }


def row_of(transactional_id: str, values: Mapping[str, Any], lost: tuple[LostTransaction, ...]) -> StateRow:
    """The row that `values_of` was made of; the caller reads the entries of `lost`.

    Raises:
        StoredStateError, ValueError, TypeError, KeyError: A value is missing, or can't be read.
    """
    for name, kind in _STORED.items():
        if not isinstance(values[name], kind) or (kind is int and isinstance(values[name], bool)):
            raise TypeError(f"{name} can't be {values[name]!r}")
    return StateRow(
        transactional_id=transactional_id,
        prepared_state=PreparedTxnState.parse(values["prepared_transaction_state"]),
        lost=lost,
        generation_kind=_generation_kind(values["generation_kind"]),
        delivery=Delivery.parse(values["delivery"]),
        **{name: values[name] for name in _STORED},
    )


def document(row: StateRow) -> str:
    """The row as JSON text; `parse_document` reads it."""
    return json.dumps(values_of(row), ensure_ascii=False, default=datetime.isoformat)


def parse_document(transactional_id: str, text: str | bytes) -> StateRow:
    """The row from a text made by `document`.

    Fields that a newer release may have added are ignored.

    Raises:
        StoredStateError: The text can't be parsed, or lacks a field.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        found = json.loads(text)
        updated_at = datetime.fromisoformat(found["updated_at"]).astimezone(UTC)
        return row_of(transactional_id, {**found, "updated_at": updated_at}, tuple(map(_lost_entry, found["lost"])))
    except (ValueError, TypeError, KeyError, StoredStateError) as error:
        shown = text if isinstance(text, str) else repr(text)
        raise StoredStateError(
            f"The stored row can't be read: {shown[:200]!r}.",
            transactional_id=transactional_id,
            cause=f"it was changed manually or by a newer release ({type(error).__name__}: {error})",
            next_step="nothing was changed; restore the row, or upgrade",
            text=shown,
        ) from error


def parse_lost(transactional_id: str, text: str) -> tuple[LostTransaction, ...]:
    """The entries of a stored `lost` list.

    Raises:
        StoredStateError: The text can't be parsed.
    """
    try:
        return tuple(_lost_entry(entry) for entry in json.loads(text))
    except (ValueError, TypeError, KeyError, StoredStateError) as error:
        raise StoredStateError(
            f"The stored list of lost transactions can't be read: {text[:200]!r}.",
            transactional_id=transactional_id,
            cause="the row was changed manually or by a newer release",
            next_step="nothing was changed; restore a JSON list of kind, state, generation, recorded_at; or upgrade",
            text=text,
        ) from error


def _lost_object(entry: LostTransaction) -> dict[str, Any]:
    several = {} if entry.transactions == 1 else {"transactions": entry.transactions}  # a row must stay small
    return {
        "kind": entry.kind.value,
        "state": str(entry.state),
        "generation": entry.generation,
        "recorded_at": entry.recorded_at.astimezone(UTC).isoformat(),
        "delivery": delivery_text(entry.delivery),
        "producer": "" if entry.producer is None else entry.producer.value,
        "cluster_id": entry.cluster_id,
        **several,
    }


def _lost_entry(entry: Mapping[str, Any]) -> LostTransaction:
    state = PreparedTxnState.parse(entry["state"])
    if state is None:
        raise ValueError("an entry without a state")
    recorded_at = datetime.fromisoformat(entry["recorded_at"])
    delivery = Delivery.parse(entry["delivery"])
    producer = ProducerKind(entry["producer"]) if entry["producer"] else None
    return LostTransaction(
        LostKind(entry["kind"]),
        state,
        int(entry["generation"]),
        recorded_at,
        delivery,
        producer,
        cluster_id=str(entry["cluster_id"]),
        transactions=int(entry.get("transactions", 1)),
    )


def _generation_kind(text: str) -> ProducerKind:
    try:
        return ProducerKind(text)
    except ValueError as error:
        raise StoredStateError(
            f"The stored generation_kind {text!r} is not one of {', '.join(kind.value for kind in ProducerKind)}.",
            cause="the row was changed manually or by a newer release",
            next_step="nothing was changed; restore the value, or upgrade",
            text=text,
        ) from error
