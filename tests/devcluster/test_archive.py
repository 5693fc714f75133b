"""The archives of classes that let brokers start faster: created once, and ignored by Java if damaged."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from dualwrite.devcluster import DevCluster, SilentProgress, programs
from dualwrite.devcluster.programs import ClassArchive, Java, find_java
from fixtures.pace import LIMIT, joined

OPTIONS = ["-XX:+UseSerialGC", "-Xshare:auto"]
CLASSES = "java/lang/Object id: 0\njava/lang/String id: 1\njava/la"  # the JVM is still writing the last line


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without an archive."""
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "classes"


def made(archive: ClassArchive, tmp_path: Path, number: int = 0) -> ClassArchive:
    class_list = tmp_path / f"list-{number}"
    class_list.write_text(CLASSES)
    archive.make(class_list, SilentProgress())
    assert not class_list.exists()
    return archive


def test_one_of_several_processes_creates_the_archive_once_and_nothing_else_is_left(cache: Path, tmp_path: Path) -> None:
    archive = ClassArchive(find_java(), OPTIONS)
    assert archive.read_options == []
    assert archive.list_options(tmp_path / "list") == [f"-XX:DumpLoadedClassList={tmp_path / 'list'}"]
    threads = [threading.Thread(target=made, args=(ClassArchive(find_java(), OPTIONS), tmp_path, n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        joined(thread)
    before = archive.file.stat()
    assert made(archive, tmp_path).read_options[0] == f"-XX:SharedArchiveFile={archive.file}"
    assert archive.list_options(tmp_path / "list") == []
    assert archive.file.stat() == before
    assert {path.suffix for path in cache.iterdir()} <= {".jsa", ".lock"}


def test_each_java_and_each_set_of_options_has_its_own_archive(cache: Path) -> None:
    java = find_java()
    others = [Java(Path("/bin/sh"), java.version, "another"), Java(java.executable, java.version, "an update", "new")]
    archives = [ClassArchive(each, OPTIONS) for each in (java, *others)]
    assert len({archive.file for archive in (*archives, ClassArchive(java, ["-cp", "other.jar"]))}) == 4


def test_a_java_that_creates_no_archive_is_logged_once(cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'no archive on this platform' >&2\nexit 1\n")
    java.chmod(0o755)
    refused = made(ClassArchive(Java(java, 17, "the test"), OPTIONS), tmp_path)
    assert "no archive on this platform" in caplog.text
    assert (refused.read_options, refused.list_options(tmp_path / "list")) == ([], [])
    java.unlink()
    made(refused, tmp_path)
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_java_starts_without_a_damaged_archive(cache: Path, tmp_path: Path) -> None:
    """Java 17 and 25 may die with SIGSEGV of one, unless they verify what they read."""
    archive = made(ClassArchive(find_java(), OPTIONS), tmp_path)
    whole = archive.file.read_bytes()
    archive.file.unlink()
    archive.file.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:])
    subprocess.run([find_java().executable, *OPTIONS, *archive.read_options, "-version"], check=True, capture_output=True)


def archives(cluster: DevCluster) -> set[str]:
    """The archives that the brokers have mapped into memory."""
    lines = [line for node in cluster.status().nodes for line in Path(f"/proc/{node.pid}/maps").read_text().splitlines()]
    return {Path(line.split()[-1]).name for line in lines if line.endswith(".jsa") and "/cache/classes/" in line}


@pytest.mark.soak  # the archive that is made is tested above
@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="the mapped files are only listed on Linux")  # noqa: PTH110
def test_the_second_broker_starts_from_the_archive_of_the_first(cache: Path) -> None:
    with DevCluster.temporary(timeout=LIMIT, config={"num.partitions": "3"}) as cluster:
        assert archives(cluster) == set()
        assert not list(cluster.data_dir.rglob("classes"))
    (expected,) = cache.glob("*.jsa")
    with DevCluster.temporary(timeout=LIMIT) as cluster:
        assert archives(cluster) == {expected.name}
