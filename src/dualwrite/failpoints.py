"""Named points of the recipe at which a test can make the process fail. One global look-up when none is armed.

The names and the way to arm them are public in `dualwrite.testing.failpoints`; this file is what writer and recoverer call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE: Final = "DUALWRITE_FAILPOINTS"
"""What is to be armed; without the switch it does nothing."""

SWITCH: Final = "DUALWRITE_TESTING"
"""The variable that must be 1 for it."""

NAMES: Final = (
    "after_begin",
    "after_send",
    "after_prepare",
    "after_record",
    "before_db_commit",
    "after_db_commit",
    "before_kafka_commit",
    "after_kafka_commit",
    "recover_after_claim",
    "recover_after_describe",
    "recover_after_decision",
    "recover_after_end_txn",
    "recover_after_settle",
    "before_take_over",
    "after_take_over",
    "job_after_open",
    "job_after_claim",
    "job_after_start",
    "job_after_batch",
    "job_before_staged",
    "job_after_fence",
    "job_after_staged",
    "job_after_prepare",
    "job_before_commit",
    "job_after_record",
    "job_after_move",
    "job_after_commit",
    "job_after_complete",
    "job_after_clear",
    "job_after_abort",
)

armed: dict[str, Callable[[], None]] = {}
"""What runs at each point; empty outside tests. Changed by `dualwrite.testing.failpoints` only."""


def note_ignored_variable() -> None:
    """Warn of points in the environment that nothing has armed, where a writer opens: that they do nothing is no accident."""
    if not armed and os.environ.get(ENVIRONMENT_VARIABLE):
        log.warning(
            "%s is set and ignored: failpoints are for tests. A test sets %s=1 beside it, or calls "
            "dualwrite.testing.failpoints.arm_from_environment(); elsewhere, take the variable out.",
            ENVIRONMENT_VARIABLE,
            SWITCH,
        )


def hit(name: str) -> None:
    """Run what is armed at `name`, if anything is."""
    if armed:
        action = armed.get(name)
        if action is not None:
            action()
