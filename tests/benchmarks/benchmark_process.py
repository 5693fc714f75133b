"""Runs a benchmark as a user does: as a script, in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fixtures.pace import limit

ROOT: Final = Path(__file__).parents[2]
BENCHMARKS: Final = ROOT / "benchmarks"


def environment_without_settings() -> dict[str, str]:
    """The environment variables of this process, without dualwrite's own."""
    return {name: value for name, value in os.environ.items() if not name.startswith("DUALWRITE_")}


def run_benchmark(
    script: str, *arguments: object, seconds: float = 240, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a benchmark to its end, and return its output.

    Args:
        script: The name of its file.
        arguments: The command line's arguments.
        seconds: The time limit on an idle machine.
        environment: The environment variables; by default `environment_without_settings`.
    """
    return subprocess.run(
        [sys.executable, BENCHMARKS / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=limit(seconds),
        env=environment_without_settings() if environment is None else environment,
    )
