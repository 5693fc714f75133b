"""The jars of brokers: cached, downloaded by one process at a time, and the errors without a network."""

from __future__ import annotations

import io
import json
import threading
import zipfile
from pathlib import Path

import jgo.util.http
import pytest
import requests

from dualwrite.devcluster import DEFAULT_KAFKA_VERSION, DevClusterError, programs
from fixtures.pace import happened
from fixtures.tables import table


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(programs, "cache_dir", lambda: tmp_path)
    return tmp_path


def offline(*_args: object, **_kwargs: object) -> None:
    raise requests.ConnectionError("no route to host")


def test_the_classpath_has_a_logging_backend() -> None:
    names = {jar.name for jar in programs.classpath(DEFAULT_KAFKA_VERSION)}
    assert f"kafka-clients-{DEFAULT_KAFKA_VERSION}.jar" in names
    assert any(name.startswith("log4j-slf4j-impl-2.25") for name in names)
    assert any(name.startswith("slf4j-api-1.7") for name in names)


def test_cached_jars_need_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = programs.classpath(DEFAULT_KAFKA_VERSION)
    monkeypatch.setattr(jgo.util.http, "request", offline)
    assert programs.classpath(DEFAULT_KAFKA_VERSION) == first


@pytest.mark.slow
def test_an_unreachable_network_is_one_clear_error(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("M2_REPO", str(tmp_path / "empty"))
    monkeypatch.setattr(jgo.util.http, "request", offline)
    with pytest.raises(DevClusterError, match=r"(?s)could not be downloaded.*no route to host.*check the network"):
        programs.classpath(DEFAULT_KAFKA_VERSION)


POM = b"<project><groupId>g</groupId><artifactId>a</artifactId><version>1</version></project>"


@pytest.fixture
def repository(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the artifact g:a:1 in an empty local Maven repository, which is also what the cache is."""
    monkeypatch.setenv("M2_REPO", str(tmp_path / "m2"))
    monkeypatch.setattr(programs, "_PAUSE", 0)
    return tmp_path / "m2" / "g" / "a" / "1"


def serve(monkeypatch: pytest.MonkeyPatch, status: int = 200, **answers: bytes) -> None:
    """Let the remote repository answer a request for a file, or for any POM or jar, with these bytes; the rest with 404."""

    def answer(_method: str, url: str, **_: object) -> requests.Response:
        content = answers.get(url.rpartition("/")[2], answers.get(url.rpartition(".")[2]))
        response = requests.Response()
        response.status_code = 404 if content is None else status
        response.raw = io.BytesIO(content or b"")
        return response

    monkeypatch.setattr(jgo.util.http, "request", answer)


def jar_of(tmp_path: Path) -> bytes:
    with zipfile.ZipFile(tmp_path / "some.jar", "w") as archive:
        archive.writestr("A.class", b"1")
    return (tmp_path / "some.jar").read_bytes()


@pytest.mark.parametrize(
    ("name", "rest"), [("a-1.pom", b""), ("a-1.pom", POM[:40]), ("a-1.jar", b"PK\3\4")], ids=["empty", "cut off", "jar"]
)
def test_a_file_of_a_download_that_was_killed_is_downloaded_again(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rest: bytes
) -> None:
    repository.mkdir(parents=True)
    (repository / name).write_bytes(rest)
    whole = {"a-1.pom": POM, "a-1.jar": jar_of(tmp_path)}
    serve(monkeypatch, **whole)
    assert programs.artifact_jars("A", "1", ["g:a:1"]) == [repository / "a-1.jar"]
    assert (repository / name).read_bytes() == whole[name]


@pytest.mark.parametrize("page", [b"<html><br></html>", b"<html><body/></html>"], ids=["HTML", "XHTML"])
def test_a_login_page_instead_of_the_pom_of_a_dependency_leaves_nothing_out(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: bytes
) -> None:
    needs = b"<dependencies><dependency><groupId>g</groupId><artifactId>%s</artifactId><version>1</version></dependency>"
    end = b"</dependencies></project>"
    a, c = POM.replace(b"</project>", needs % b"b" + end), POM.replace(b">a<", b">c<")
    b = POM.replace(b">a<", b">b<").replace(b"</project>", needs % b"c" + end)
    serve(monkeypatch, jar=jar_of(tmp_path), **{"a-1.pom": a, "b-1.pom": page, "c-1.pom": c})
    with pytest.raises(DevClusterError, match=r"(?s)b-1\.pom is something else.*proxy settings"):
        programs.artifact_jars("A", "1", ["g:a:1"])
    serve(monkeypatch, jar=jar_of(tmp_path), **{"a-1.pom": a, "b-1.pom": b, "c-1.pom": c})
    assert {path.name for path in programs.artifact_jars("A", "1", ["g:a:1"])} == {"a-1.jar", "b-1.jar", "c-1.jar"}


@table("status", [403, 404, 503])
def test_a_refused_request_is_not_taken_for_a_missing_version_only(
    repository: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    serve(monkeypatch, status, pom=b"", jar=b"")
    with pytest.raises(DevClusterError, match=r"(?s)a proxy refused.*another version, or check the network and the proxy"):
        programs.artifact_jars("A", "1", ["g:a:1"])


def test_only_one_of_two_processes_downloads(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jar = cache / "a.jar"
    jar.touch()
    calls: list[str] = []
    release = threading.Event()

    def download(what: str, *_: object) -> list[Path]:
        calls.append(what)
        happened(release)
        return [jar]

    monkeypatch.setattr(programs, "_fetch", download)
    threads = [threading.Thread(target=programs.classpath, args=("9.9.9",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join()
    assert calls == ["Kafka 9.9.9"]
    assert json.loads((cache / "kafka-9.9.9.json").read_text()) == [str(jar)]
