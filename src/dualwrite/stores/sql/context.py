"""What all transactions of one SQL store share: its engine, dialect and connections, and the statements that they execute."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Engine, Select, Update, bindparam, select, update
from sqlalchemy.exc import SQLAlchemyError

from dualwrite.stores.sql.access import Access
from dualwrite.stores.sql.dialect import MergedStatements, Record, StoreDialect
from dualwrite.stores.sql.errors import ErrorMap
from dualwrite.stores.sql.session_effects import SessionEffects
from dualwrite.stores.sql.table import state_table as t

if TYPE_CHECKING:
    from dualwrite.stores.sql.orm import SessionFactory, SessionSource

NEWEST_CLAIM: Final = select(t.c.fence, t.c.owner, t.c.store_id).where(t.c.transactional_id == bindparam("id"))


@dataclass(frozen=True)
class StoreContext:
    """Built once for a store, so that SQLAlchemy can cache the SQL of the statements.

    Args:
        engine: Where connections come from.
        dialect: The database's dialect.
        errors: Translates its errors.
        access: Gives transactions their connections.
        session: What the user creates ORM sessions from, or None.
    """

    engine: Engine
    dialect: StoreDialect
    errors: ErrorMap
    access: Access
    session: SessionSource | None = None
    effects: SessionEffects = field(init=False)
    merged: MergedStatements | None = field(init=False)
    check_fence: Select[Any] = field(init=False)
    record: Update = field(init=False)
    driver_errors: tuple[type[BaseException], ...] = field(init=False)

    def __post_init__(self) -> None:
        mark = self.dialect.marking_column()
        check = NEWEST_CLAIM if mark is None else NEWEST_CLAIM.add_columns(mark)
        record = (
            update(t)
            .where(
                t.c.transactional_id == bindparam("id"),
                t.c.fence == bindparam("fence_"),
                t.c.store_id == bindparam("store_id_"),  # rule QN
            )
            .values(
                prepared_transaction_state=bindparam("state"),
                prepared_generation=bindparam("generation_"),
                transaction_number=bindparam("number"),
                delivery=bindparam("delivery_"),
                updated_at=bindparam("now"),
            )
        )
        marked = self.dialect.marked_condition()
        object.__setattr__(self, "effects", SessionEffects(self.dialect.family))
        object.__setattr__(self, "merged", self.dialect.merged_statements(self.engine))
        object.__setattr__(self, "check_fence", check)
        object.__setattr__(self, "record", record if marked is None else record.where(marked))
        dbapi = self.engine.dialect.dbapi
        object.__setattr__(self, "driver_errors", (SQLAlchemyError, *([dbapi.Error] if dbapi is not None else [])))

    @functools.cached_property
    def sessions(self) -> SessionFactory:
        """Creates the ORM sessions; the ORM is loaded only when it is used."""
        from dualwrite.stores.sql.orm import SessionFactory  # noqa: PLC0415  (only when it is used)

        return SessionFactory(self.session)


def parameters_of(record: Record) -> dict[str, Any]:
    """The parameters of `StoreContext.record`."""
    return {
        "id": record.transactional_id,
        "fence_": record.fence,
        "store_id_": record.store_id,
        "state": record.state,
        "delivery_": record.delivery,
        "generation_": record.generation,
        "number": record.number,
        "now": record.now,
        "token": record.token,
    }
