"""The next command, as the user can paste it: with the options by which the database and Kafka were given to this one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

from dualwrite.shell import shell_word

_PASSWORD: Final = re.compile(r"(?<=://)([^/?#]*):([^/?#]*)@")
_SECRET: Final = re.compile("password|secret|jaas|private", re.IGNORECASE)
_HIDDEN: Final = "***"


@dataclass(frozen=True)
class GivenOptions:
    """What the user typed; None or empty if it comes from the environment, from which the next command gets it, too."""

    url: str | None = None
    schema: str | None = None
    kafka: str | None = None
    kafka_config: tuple[str, ...] = ()

    def command(self, *words: str) -> str:
        """`dualwrite` with these words and the options. Passwords are hidden."""
        return " ".join(("dualwrite", *map(shell_word, words), *self._options()))

    def _options(self) -> Iterable[str]:
        url = None if self.url is None else _PASSWORD.sub(rf"\1:{_HIDDEN}@", self.url)
        for option, value in (("--url", url), ("--schema", self.schema), ("--kafka", self.kafka)):
            if value is not None:
                yield from (option, shell_word(value))
        for setting in self.kafka_config:
            name, _, _ = setting.partition("=")
            yield from ("--kafka-config", shell_word(f"{name}={_HIDDEN}" if _SECRET.search(name) else setting))

    @property
    def of_kafka(self) -> GivenOptions:
        """Those of Kafka alone, for a command that does not look into a database."""
        return replace(self, url=None, schema=None)
