"""Imports kafka-python, without the DeprecationWarnings that it causes on Python 3.11 and 3.12.

It reads more than a hundred schemas by `importlib.resources.read_text`, when its classes are made. Where warnings are errors
(`python -W error`, `filterwarnings = error` of pytest), nothing of dualwrite could be imported, and its users could not change
that. A filter for just these two places is added, and stays: `warnings.catch_warnings` would restore the filters as they were,
and so undo what another thread has changed meanwhile.
"""

from __future__ import annotations

import sys
import warnings


def ignore_warnings() -> None:
    """Ignore the warnings from now on; to be called before anything else makes classes of kafka-python."""
    if sys.version_info < (3, 13):
        warnings.filterwarnings(
            "ignore",
            message=r"(read|open)_text is deprecated",
            category=DeprecationWarning,
            module=r"kafka\.protocol\.schemas\.load_json$|importlib\.resources\._legacy$",  # read_text itself calls open_text
        )


ignore_warnings()

import kafka  # noqa: E402, F401  (makes all its classes, now that the warnings are ignored)
