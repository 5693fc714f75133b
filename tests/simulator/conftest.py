"""Tests that run the simulator have a process of their own: it replaces the clocks, which threads of other tests read."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fixtures.pace import limit

_CHILD = "DUALWRITE_TEST_SIMULATOR"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run the test in a pytest of its own; see `pytest_pyfunc_call` in pytest's reference."""
    if os.environ.get(_CHILD) or pyfuncitem.path.name != "test_simulator.py":
        return None
    marker = pyfuncitem.get_closest_marker("timeout")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env=os.environ | {_CHILD: "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        timeout=limit(float(marker.args[0]) if marker else 240),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True
