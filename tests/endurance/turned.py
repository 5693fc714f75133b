"""A process of a test whose clock is wrong: python -m endurance.turned HOURS MODULE ARGUMENTS, with `main` of the module."""

from __future__ import annotations

import importlib
import sys

from fixtures.host_clock import clock_ahead


def main() -> None:
    hours, module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    with clock_ahead(float(hours)):
        importlib.import_module(module).main()


if __name__ == "__main__":
    main()
