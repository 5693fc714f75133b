"""The archives of classes that let brokers start faster: created once, never used if damaged."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster, SilentProgress, programs
from dualwrite.devcluster.programs import DEFAULT_KAFKA_VERSION, ClassArchive, Java, find_java
from fixtures.pace import LIMIT, joined

OPTIONS = ["-XX:+UseSerialGC", "-Xshare:auto"]
CLASSES = "java/lang/Object id: 0\njava/lang/String id: 1\njava/la"  # the JVM is still writing the last line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without an archive."""
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "classes"


@pytest.fixture
def class_list(tmp_path: Path) -> Path:
    path = tmp_path / "list"
    path.write_text(CLASSES)
    return path


def archive_of(java: Java | None = None) -> ClassArchive:
    return ClassArchive(DEFAULT_KAFKA_VERSION, java or find_java(), OPTIONS)


def test_the_archive_is_created_once_and_nothing_else_is_left(cache: Path, class_list: Path) -> None:
    made = archive_of()
    assert made.read_options == []
    assert made.list_options(class_list) == [f"-XX:DumpLoadedClassList={class_list}"]
    made.make(class_list, SilentProgress())
    assert made.read_options == [f"-XX:SharedArchiveFile={made.file}"]
    assert made.list_options(class_list) == []
    assert {path.suffix for path in cache.iterdir()} <= {".jsa", ".crc32", ".lock"}
    assert not class_list.exists()
    before = made.file.stat()
    class_list.write_text(CLASSES)
    made.make(class_list, SilentProgress())
    assert made.file.stat() == before


def test_each_java_and_each_set_of_options_has_its_own_archive(cache: Path) -> None:
    java = find_java()
    other = Java(Path("/bin/sh"), java.version, "another")
    files = {
        archive_of(java).file,
        archive_of(other).file,
        ClassArchive("3.9.1", java, OPTIONS).file,
        ClassArchive(DEFAULT_KAFKA_VERSION, java, ["-cp", "other.jar"]).file,
    }
    assert len(files) == 4


def test_a_java_that_creates_no_archive_is_logged_once(
    cache: Path, class_list: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'no archive on this platform' >&2\nexit 1\n")
    java.chmod(0o755)
    refused = archive_of(Java(java, 17, "the test"))
    refused.make(class_list, SilentProgress())
    assert "no archive on this platform" in caplog.text
    assert (refused.read_options, refused.list_options(class_list), refused.wanted) == ([], [], False)
    java.unlink()
    class_list.write_text(CLASSES)
    refused.make(class_list, SilentProgress())
    assert len(caplog.records) == 1


def test_obstacles_are_logged(cache: Path, class_list: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive_of(Java(Path("/nowhere/java"), 17, "the test")).make(class_list, SilentProgress())
    shutil.rmtree(cache)
    cache.touch()  # a file in the way
    class_list.write_text(CLASSES)
    archive_of().make(class_list, SilentProgress())
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert all("Brokers start without a class-data archive" in record.message for record in caplog.records)


def test_only_one_of_several_processes_creates_the_archive(cache: Path, tmp_path: Path) -> None:
    lists = [tmp_path / f"list-{number}" for number in range(4)]
    for path in lists:
        path.write_text(CLASSES)
    threads = [threading.Thread(target=archive_of().make, args=(path, SilentProgress())) for path in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    assert archive_of().file.exists()
    assert {path.suffix for path in cache.iterdir()} <= {".jsa", ".crc32", ".lock"}


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut off", "a wrong byte", "no file"])
def test_a_damaged_archive_is_not_used_but_recreated(
    cache: Path, class_list: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Java 17 and 25 die with SIGSEGV on some of them."""
    made = archive_of()
    made.make(class_list, SilentProgress())
    whole = made.file.read_bytes()
    made.file.unlink()
    if damage == "cut off":
        made.file.write_bytes(whole[: len(whole) // 2])
    elif damage == "a wrong byte":
        made.file.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:])
    assert made.read_options == []
    assert made.wanted
    assert ("damaged" in caplog.text) == (damage != "no file")
    class_list.write_text(CLASSES)
    made.make(class_list, SilentProgress())
    assert made.read_options == [f"-XX:SharedArchiveFile={made.file}"]


def archives(cluster: DevCluster) -> set[str]:
    """The archives that the brokers have mapped into memory."""
    lines = [line for node in cluster.status().nodes for line in Path(f"/proc/{node.pid}/maps").read_text().splitlines()]
    return {Path(line.split()[-1]).name for line in lines if line.endswith(".jsa") and "/kafka-" in line}


@pytest.mark.soak  # the archive that is made is tested above
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the mapped files are only listed on Linux")  # noqa: PTH110
def test_the_second_broker_starts_from_the_archive_of_the_first(cache: Path) -> None:
    with DevCluster.temporary(timeout=LIMIT) as cluster:
        assert archives(cluster) == set()
        assert not list(cluster.data_dir.rglob("classes"))
    (expected,) = cache.glob("*.jsa")
    with DevCluster.temporary(timeout=LIMIT) as cluster:
        assert archives(cluster) == {expected.name}
