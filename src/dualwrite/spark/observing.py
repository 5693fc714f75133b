"""The option `observe`: a function of the user that installs observers and tracers in each of Spark's Python processes."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Final

log: Final = logging.getLogger(__name__)

_called: Final[set[str]] = set()


def observe(name: str | None) -> None:
    """Call the function once in this process; an error is logged, and the work goes on.

    Args:
        name: `module:function`; None if the option is not set.
    """
    if name is None or name in _called:
        return
    _called.add(name)
    module, _, function = name.partition(":")
    try:
        getattr(import_module(module), function)()
    except Exception:
        log.exception("observe=%s has failed in this process; this is logged once, and the work goes on", name)
