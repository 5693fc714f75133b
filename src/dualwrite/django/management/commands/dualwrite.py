"""`manage.py dualwrite …`: the command `dualwrite`, for a database of DATABASES."""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence
from typing import Any, ClassVar
from unittest.mock import patch

from django.core.management.base import BaseCommand, CommandError
from django.db import DEFAULT_DB_ALIAS

from dualwrite.cli import main
from dualwrite.django.configuration import configuration
from dualwrite.errors import DualWriteError
from dualwrite.texts import error_text


class Command(BaseCommand):
    """Passes everything on; `--using ALIAS` chooses the database."""

    help = "dualwrite's command, with the database and Kafka of the settings: manage.py dualwrite [--using ALIAS] status …"
    requires_system_checks: ClassVar[list[str]] = []

    def run_from_argv(self, argv: Sequence[str]) -> None:
        """Without Django's own options, whose names are those of dualwrite's."""
        sys.exit(_run(argv[2:]))

    def add_arguments(self, parser: Any) -> None:
        """For `call_command("dualwrite", "status", "--json")`."""
        parser.add_argument("arguments", nargs=REMAINDER)

    def handle(self, *_: Any, arguments: list[str], **__: Any) -> None:
        """Run the command.

        Raises:
            CommandError: It has failed, with its exit code.
        """
        code = _run(arguments)
        if code:
            raise CommandError(f"dualwrite {' '.join(arguments)} ended with {code}.", returncode=code)


def _run(given: Sequence[str]) -> int:
    ours = ArgumentParser(add_help=False, allow_abbrev=False)
    ours.add_argument("--using", default=DEFAULT_DB_ALIAS)
    for option in ("--settings", "--pythonpath"):  # Django has read them
        ours.add_argument(option)
    options, arguments = ours.parse_known_args(given)
    try:
        with patch.dict(os.environ, configuration(options.using).environment()):
            return main(arguments)
    except DualWriteError as error:
        sys.stderr.write(f"{error_text(error)}\n")
        return 1
