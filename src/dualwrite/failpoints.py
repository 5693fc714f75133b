"""Named points of the recipe at which a test can make the process fail. When none is armed, each costs one global lookup.

`dualwrite.testing.failpoints` is the public interface to arm them; this module is what the writer and recoverer call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

ENVIRONMENT_VARIABLE: Final = "DUALWRITE_FAILPOINTS"
"""The variable that lists the failpoints to arm; ignored unless SWITCH is set."""

SWITCH: Final = "DUALWRITE_TESTING"
"""The variable that must be 1 for failpoints to be armed from the environment."""

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
    "recover_after_resolution",
    "republish_after_check",
    "republish_after_prepare",
    "republish_after_record",
    "republish_after_commit",
    "before_take_over",
    "after_take_over",
    "group_after_unit",
    "group_after_units",
    "journal_after_open",
    "journal_after_entries",
    "journal_before_close",
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
"""The action at each failpoint; empty outside tests. Only `dualwrite.testing.failpoints` changes it."""


def note_ignored_variable() -> None:
    """Warn, when a writer opens, if the environment lists failpoints but none is armed: they are ignored on purpose."""
    if not armed and os.environ.get(ENVIRONMENT_VARIABLE):
        log.warning(
            "%s is set and ignored: failpoints are for tests. In a test, also set %s=1, or call "
            "dualwrite.testing.failpoints.arm_from_environment(); elsewhere, unset the variable.",
            ENVIRONMENT_VARIABLE,
            SWITCH,
        )


def hit(name: str) -> None:
    """Run the action armed at `name`, if any."""
    if armed:
        action = armed.get(name)
        if action is not None:
            action()
