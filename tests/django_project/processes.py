"""What the tests do with the project: give this process another database, and run `manage.py` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from crash.cases import crash_writer
from crash.scene import Scene


def with_database(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    """Let the alias `default` mean another database."""
    for found in connections.all(initialized_only=True):
        found.close()
        delattr(connections._connections, found.alias)
    monkeypatch.setitem(connections.__dict__, "settings", connections.configure_settings({"default": given}))


def manage(url: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `manage.py`, with the tests' project, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    given = {"SHOP_DATABASE": url, "DJANGO_SETTINGS_MODULE": "django_project.settings", "PYTHONPATH": path, **environment}
    command = [sys.executable, "-m", "django", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env={**os.environ, **given}, text=True, **pipes)


def run_manage(url: str, *arguments: str, **environment: str) -> str:
    """Run `manage.py`, and return what it prints."""
    with manage(url, *arguments, **environment) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, f"{output}\n{errors}"
    return output + errors


def in_doubt(scene: Scene) -> str:
    """Let a writer die after the database's commit of its second transaction; return the id of its row."""
    crash_writer(scene, "after_db_commit", DUALWRITE_LANES="1")
    return scene.transactional_id
