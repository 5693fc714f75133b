"""Reports what a benchmark is doing, on standard error."""

from __future__ import annotations

import sys
import time


def show_progress(what: str) -> None:
    """Print the time of day and what has begun or ended."""
    print(f"{time.strftime('%H:%M:%S')} {what}", file=sys.stderr, flush=True)
