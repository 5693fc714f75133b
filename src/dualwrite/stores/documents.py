"""A row as text, for databases without columns: one JSON object, with the SQL table's column names."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from dualwrite.delivery import Delivery, delivery_text
from dualwrite.errors import StoredStateError
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.stores.state_row import LostKind, LostTransaction, StateRow


def document(row: StateRow) -> str:
    """The row as JSON text; `parse_document` reads it."""
    return json.dumps(
        {
            "fence": row.fence,
            "generation": row.generation,
            "generation_kind": row.generation_kind.value,
            "prepared_transaction_state": state_text(row.prepared_state),
            "prepared_generation": row.prepared_generation,
            "delivery": delivery_text(row.delivery),
            "resolved_generation": row.resolved_generation,
            "transaction_number": row.transaction_number,
            "lost": [_lost_object(entry) for entry in row.lost],
            "owner": row.owner,
            "claim_token": row.claim_token,
            "cluster_id": row.cluster_id,
            "store_id": row.store_id,
            "updated_at": row.updated_at.astimezone(UTC).isoformat(),
            "forgotten": row.forgotten,
        },
        ensure_ascii=False,
    )


def parse_document(transactional_id: str, text: str | bytes) -> StateRow:
    """The row from a text made by `document`.

    Fields that a newer release may have added are ignored.

    Raises:
        StoredStateError: The text can't be parsed, or lacks a field.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        found = json.loads(text)
        return StateRow(
            transactional_id=transactional_id,
            fence=_whole_number(found["fence"]),
            generation=_whole_number(found["generation"]),
            prepared_state=PreparedTxnState.parse(found["prepared_transaction_state"]),
            prepared_generation=_whole_number(found["prepared_generation"]),
            resolved_generation=_whole_number(found["resolved_generation"]),
            transaction_number=_whole_number(found["transaction_number"]),
            lost=tuple(_lost_entry(entry) for entry in found["lost"]),
            owner=str(found["owner"]),
            updated_at=datetime.fromisoformat(found["updated_at"]).astimezone(UTC),
            forgotten=bool(found["forgotten"]),
            generation_kind=ProducerKind(found["generation_kind"]),
            claim_token=str(found["claim_token"]),
            delivery=Delivery.parse(found["delivery"]),
            cluster_id=str(found["cluster_id"]),
            store_id=str(found["store_id"]),
        )
    except (ValueError, TypeError, KeyError, StoredStateError) as error:
        shown = text if isinstance(text, str) else repr(text)
        raise StoredStateError(
            f"The stored row can't be read: {shown[:200]!r}.",
            transactional_id=transactional_id,
            cause=f"it was changed manually or by a newer release ({type(error).__name__}: {error})",
            next_step="nothing was changed; restore the row, or upgrade",
            text=shown,
        ) from error


def lost_text(entries: Iterable[LostTransaction]) -> str:
    """The text to store for a list of lost transactions."""
    return json.dumps([_lost_object(entry) for entry in entries])


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
    return {
        "kind": entry.kind.value,
        "state": str(entry.state),
        "generation": entry.generation,
        "recorded_at": entry.recorded_at.astimezone(UTC).isoformat(),
        "delivery": delivery_text(entry.delivery),
        "producer": "" if entry.producer is None else entry.producer.value,
        "cluster_id": entry.cluster_id,
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
    )


def _whole_number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not an integer")
    return value
