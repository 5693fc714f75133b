"""What dualwrite ships for tests: its own and those of its users."""

from __future__ import annotations

import os
from typing import Final

PACE_VARIABLE: Final = "DUALWRITE_TEST_PACE"
"""An environment variable with a factor of at least 1, read when a suite is imported."""

TIMEOUT: Final = 30.0 * max(1.0, float(os.environ.get(PACE_VARIABLE) or 1))
"""Seconds to wait for anything that must happen: far more than it needs."""
