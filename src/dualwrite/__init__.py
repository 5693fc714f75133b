"""dualwrite: write to a database and to Kafka atomically, without an outbox relay (KIP-939).

The exception classes are imported immediately; every other name is imported on first use, with the libraries that it needs.
"""

import importlib as _importlib
import os as _os
from typing import TYPE_CHECKING, Any

from dualwrite import errors as _errors
from dualwrite.errors import *  # noqa: F403  (what its __all__ lists)

if TYPE_CHECKING:
    from dualwrite.api import connect, create_pool, plan_recovery, recover
    from dualwrite.kafka.topic import Topic
    from dualwrite.opening import open_recoverer
    from dualwrite.pool.pool import WriterPool
    from dualwrite.pool.scaling import PoolOptions
    from dualwrite.recipe.phases import Phase
    from dualwrite.recovery.plan import GenerationPlan, IdPlan, RecoveryPlan
    from dualwrite.recovery.recoverer import Recoverer
    from dualwrite.recovery.report import GenerationOutcome, IdReport, Outcome, RecoveryReport
    from dualwrite.relay.relay import Relay
    from dualwrite.settings import Settings, Timeouts
    from dualwrite.state import PreparedTxnState
    from dualwrite.stores.journal import JournalLimits
    from dualwrite.stores.registry import store_from_url
    from dualwrite.stores.sql import SqlStateStore
    from dualwrite.transaction import Transaction
    from dualwrite.writer import DualWriter

__version__ = "0.1.0"

__all__ = [
    "DualWriter",
    "GenerationOutcome",
    "GenerationPlan",
    "IdPlan",
    "IdReport",
    "JournalLimits",
    "Outcome",
    "Phase",
    "PoolOptions",
    "PreparedTxnState",
    "Recoverer",
    "RecoveryPlan",
    "RecoveryReport",
    "Relay",
    "Settings",
    "SqlStateStore",
    "Timeouts",
    "Topic",
    "Transaction",
    "WriterPool",
    "connect",
    "create_pool",
    "open_recoverer",
    "plan_recovery",
    "recover",
    "store_from_url",
]
if not TYPE_CHECKING:  # a type checker finds the classes by the import above
    __all__ += _errors.__all__
_WHERE = {
    name: module
    for module, names in {
        "dualwrite.api": ("connect", "create_pool", "plan_recovery", "recover"),
        "dualwrite.kafka.topic": ("Topic",),
        "dualwrite.opening": ("open_recoverer",),
        "dualwrite.pool.pool": ("WriterPool",),
        "dualwrite.pool.scaling": ("PoolOptions",),
        "dualwrite.recipe.phases": ("Phase",),
        "dualwrite.recovery.plan": ("GenerationPlan", "IdPlan", "RecoveryPlan"),
        "dualwrite.recovery.recoverer": ("Recoverer",),
        "dualwrite.recovery.report": ("GenerationOutcome", "IdReport", "Outcome", "RecoveryReport"),
        "dualwrite.relay.relay": ("Relay",),
        "dualwrite.settings": ("Settings", "Timeouts"),
        "dualwrite.state": ("PreparedTxnState",),
        "dualwrite.stores.journal": ("JournalLimits",),
        "dualwrite.stores.registry": ("store_from_url",),
        "dualwrite.stores.sql": ("SqlStateStore",),
        "dualwrite.transaction": ("Transaction",),
        "dualwrite.writer": ("DualWriter",),
    }.items()
    for name in names
}
"""The module of each name that is imported on first use."""


def __getattr__(name: str) -> Any:
    """Import the module of a name on first use, and cache the name here."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_importlib.import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """All names, whether already imported or not."""
    return sorted({*globals(), *__all__})


if _os.environ.get("DUALWRITE_TESTING") == "1" and _os.environ.get("DUALWRITE_FAILPOINTS"):
    from dualwrite.testing.failpoints import arm_from_environment as _arm

    _arm()
