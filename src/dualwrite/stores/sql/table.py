"""The tables of dualwrite, except those of jobs, and the conversion of the state table's rows.

They belong to a separate MetaData, so that autogenerate of the user's alembic does not treat them as the user's tables.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, ColumnElement, Integer, MetaData, RowMapping, Table, bindparam, func, or_

from dualwrite.delivery import MAX_TOPIC_LENGTH, Delivery, delivery_text
from dualwrite.errors import StoredStateError
from dualwrite.producer_kind import ProducerKind
from dualwrite.state import PreparedTxnState, state_text
from dualwrite.stores.documents import lost_text, parse_lost
from dualwrite.stores.positions import MAX_GROUP_LENGTH
from dualwrite.stores.sql.column_types import LongWords, UtcDateTime, Words
from dualwrite.stores.state_row import MAX_OWNER_LENGTH, StateRow

TABLE_NAME: Final = "kafka_transaction_state"
STORE_TABLE_NAME: Final = "kafka_transaction_store"
LEASE_TABLE_NAME: Final = "kafka_transaction_lease"
POSITION_TABLE_NAME: Final = "kafka_consumed_offset"
VERSION_TABLE_NAME: Final = "kafka_transaction_state_version"
_UUID_LENGTH: Final = 36

metadata: Final = MetaData()

state_table: Final = Table(
    TABLE_NAME,
    metadata,
    Column("transactional_id", Words(255), primary_key=True),
    Column("fence", BigInteger, nullable=False),
    Column("generation", Integer, nullable=False, server_default="0"),
    Column("prepared_transaction_state", Words(64), nullable=False, server_default=""),
    Column("prepared_generation", Integer, nullable=False, server_default="0"),
    Column("delivery", LongWords(), nullable=True),
    Column("resolved_generation", Integer, nullable=False, server_default="0"),
    Column("transaction_number", BigInteger, nullable=False, server_default="0"),
    Column("lost", LongWords(is_medium=True), nullable=False),
    Column("owner", Words(MAX_OWNER_LENGTH), nullable=False, server_default=""),
    Column("claim_token", Words(32), nullable=False, server_default=""),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("forgotten", Boolean, nullable=False),
    Column("cluster_id", Words(255), nullable=False, server_default=""),
    Column("store_id", Words(32), nullable=False, server_default=""),
    Column("generation_kind", Words(16), nullable=False, server_default=ProducerKind.LIBRDKAFKA.value),
)


store_table: Final = Table(
    STORE_TABLE_NAME,
    metadata,
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("identity", LongWords(), nullable=False),
)
"""One row, with the number 1: which database this is (`StoreIdentity`)."""


lease_table: Final = Table(
    LEASE_TABLE_NAME,
    metadata,
    Column("transactional_id", Words(255), primary_key=True),
    Column("owner", Words(MAX_OWNER_LENGTH), nullable=False),
    Column("leased_until", UtcDateTime, nullable=False),
)
"""One row for each id that was ever leased. A released id has the owner ''."""


position_table: Final = Table(
    POSITION_TABLE_NAME,
    metadata,
    Column("group_id", Words(MAX_GROUP_LENGTH), primary_key=True),
    Column("topic", Words(MAX_TOPIC_LENGTH), primary_key=True),
    Column("partition_number", Integer, primary_key=True, autoincrement=False),
    Column("next_offset", BigInteger, nullable=False),
    Column("topic_id", Words(_UUID_LENGTH), nullable=False, server_default=""),
    Column("updated_at", UtcDateTime, nullable=False),
)
"""One row for each consumer group and partition that was read: the next offset."""


def begins_with_prefix(column: ColumnElement[str]) -> ColumnElement[bool]:
    """The condition that a text begins with the prefix in `prefix_parameters`.

    By substr instead of LIKE: nothing to escape, and SQLite's LIKE is case-insensitive. Without a prefix its result is not
    used: with MariaDB's sql_mode ORACLE it is NULL.
    """
    length = bindparam("length", type_=Integer)
    return or_(length == 0, func.substr(column, 1, length) == bindparam("prefix"))


def prefix_parameters(prefix: str) -> dict[str, str | int]:
    """The parameters of `begins_with_prefix`."""
    return {"prefix": prefix, "length": len(prefix)}


def state_row(columns: RowMapping) -> StateRow:
    """A stored row as the contract's value.

    Raises:
        StoredStateError: The prepared state, the kind of producer or the list of lost transactions can't be parsed.
    """
    transactional_id = columns["transactional_id"]
    return StateRow(
        transactional_id=transactional_id,
        fence=columns["fence"],
        generation=columns["generation"],
        prepared_state=_prepared_state(transactional_id, columns["prepared_transaction_state"]),
        prepared_generation=columns["prepared_generation"],
        resolved_generation=columns["resolved_generation"],
        transaction_number=columns["transaction_number"],
        lost=parse_lost(transactional_id, columns["lost"]),
        owner=columns["owner"],
        updated_at=columns["updated_at"],
        forgotten=columns["forgotten"],
        generation_kind=_generation_kind(transactional_id, columns["generation_kind"]),
        claim_token=columns["claim_token"],
        delivery=_delivery(transactional_id, columns["delivery"]),
        cluster_id=columns["cluster_id"],
        store_id=columns["store_id"],
    )


def columns_of(row: StateRow) -> dict[str, Any]:
    """The row's columns except the key; `state_row` reads them."""
    return {
        "fence": row.fence,
        "generation": row.generation,
        "prepared_transaction_state": state_text(row.prepared_state),
        "prepared_generation": row.prepared_generation,
        "delivery": delivery_text(row.delivery),
        "resolved_generation": row.resolved_generation,
        "transaction_number": row.transaction_number,
        "lost": lost_text(row.lost),
        "owner": row.owner,
        "claim_token": row.claim_token,
        "updated_at": row.updated_at,
        "forgotten": row.forgotten,
        "generation_kind": row.generation_kind.value,
        "cluster_id": row.cluster_id,
        "store_id": row.store_id,
    }


def _generation_kind(transactional_id: str, text: str) -> ProducerKind:
    try:
        return ProducerKind(text)
    except ValueError as error:
        raise StoredStateError(
            f"The stored generation_kind {text!r} is not one of {', '.join(kind.value for kind in ProducerKind)}.",
            transactional_id=transactional_id,
            cause="the row was changed manually or by a newer release",
            next_step="nothing was changed; restore the value, or upgrade",
            text=text,
        ) from error


def _delivery(transactional_id: str, text: str | None) -> Delivery | None:
    try:
        return Delivery.parse(text or "")
    except StoredStateError as error:
        error.transactional_id = transactional_id
        raise


def _prepared_state(transactional_id: str, text: str) -> PreparedTxnState | None:
    try:
        return PreparedTxnState.parse(text)
    except StoredStateError as error:
        error.transactional_id = transactional_id
        raise
