"""A plugin of alembic's: autogenerate, in any project, does not propose to drop the tables of dualwrite.

Alembic 1.18 or later loads it by itself, by the entry point `alembic.autogenerate.dualwrite` of the installed package. For an
older one, env.py says `context.configure(…, include_object=dualwrite_alembic.include_object)`.

It stands outside of the package `dualwrite`, and imports nothing of it: alembic loads it at every start, in every project.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import UpgradeOps
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

log = logging.getLogger(__name__)

TABLES: Final = frozenset(
    {
        "kafka_transaction_state",
        "kafka_transaction_state_version",
        "kafka_transaction_store",
        "kafka_job",
        "kafka_job_batch",
        "kafka_job_attempt",
        "kafka_job_chunk",
    }
)
"""The tables of the store, the one in which the revision of its migrations stands, and those of jobs."""


def include_object(object_: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
    """Whether autogenerate shall look at an object: not at a table of ours that the project's metadata does not have.

    For `include_object` of alembic's `context.configure`; a function of your own calls this one.
    """
    del object_
    return not (type_ == "table" and reflected and compare_to is None and name in TABLES)


def setup(plugin: Plugin) -> None:
    """Called by alembic as it is imported."""
    from alembic.util import DispatchPriority  # noqa: PLC0415  (alembic before 1.18 has none, and does not come here)

    plugin.add_autogenerate_comparator(_leave_ours_alone, "autogenerate", priority=DispatchPriority.LAST)


def _leave_ours_alone(_context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Take back what was found to drop; a drop is only found for tables that the project's metadata does not have."""
    from alembic.operations.ops import DropTableOp  # noqa: PLC0415  (as above; while alembic is imported, it is not there yet)
    from alembic.util import PriorityDispatchResult  # noqa: PLC0415  (as above)

    ours = {
        (operation.schema, operation.table_name)
        for operation in upgrade_ops.ops
        if isinstance(operation, DropTableOp) and operation.table_name in TABLES
    }
    for _, name in sorted(ours, key=str):
        log.info("Table %r is dualwrite's, and is left alone", name)
    upgrade_ops.ops[:] = [
        operation
        for operation in upgrade_ops.ops
        if (getattr(operation, "schema", None), getattr(operation, "table_name", None)) not in ours  # with its indexes
    ]
    return PriorityDispatchResult.CONTINUE
