"""An alembic plugin: keeps autogenerate, in any project, from proposing to drop dualwrite's tables.

Alembic 1.18 and later load it automatically, through the installed package's entry point `alembic.autogenerate.dualwrite`. With
older versions, use `context.configure(…, include_object=dualwrite_alembic.include_object)` in env.py.

It is outside the package `dualwrite` and imports nothing from it, because alembic loads it at every start, in every project.
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
        "kafka_transaction_lease",
        "kafka_consumed_offset",
        "dualwrite_dead_letter",
        "dualwrite_journal",
        "dualwrite_journal_later",
        "dualwrite_journal_gate",
        "kafka_job",
        "kafka_job_batch",
        "kafka_job_attempt",
        "kafka_job_chunk",
    }
)
"""The store's tables, the version table of its migrations, the dead letters of relays, the journal, and the tables of jobs."""


def include_object(object_: Any, name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
    """Whether autogenerate considers an object: false for a table of dualwrite that is not in the project's metadata.

    Pass it as `include_object` to alembic's `context.configure`, or call it from your own function.
    """
    del object_
    return not (type_ == "table" and reflected and compare_to is None and name in TABLES)


def setup(plugin: Plugin) -> None:
    """Register the plugin; alembic calls this while it is being imported."""
    from alembic.util import DispatchPriority  # noqa: PLC0415  (alembic before 1.18 does not have it, and never calls this)

    plugin.add_autogenerate_comparator(_leave_ours_alone, "autogenerate", priority=DispatchPriority.LAST)


def _leave_ours_alone(_context: AutogenContext, upgrade_ops: UpgradeOps) -> PriorityDispatchResult:
    """Remove the operations that would drop dualwrite's tables; they exist only for tables not in the project's metadata."""
    from alembic.operations.ops import DropTableOp  # noqa: PLC0415  (as above; not available yet while alembic is imported)
    from alembic.util import PriorityDispatchResult  # noqa: PLC0415  (as above)

    ours = {
        (operation.schema, operation.table_name)
        for operation in upgrade_ops.ops
        if isinstance(operation, DropTableOp) and operation.table_name in TABLES
    }
    for _, name in sorted(ours, key=str):
        log.info("Table %r belongs to dualwrite and is left alone", name)
    upgrade_ops.ops[:] = [
        operation
        for operation in upgrade_ops.ops
        if (getattr(operation, "schema", None), getattr(operation, "table_name", None)) not in ours  # includes its indexes
    ]
    return PriorityDispatchResult.CONTINUE
