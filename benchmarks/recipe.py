"""Compares `with writer.transaction()` with a plain commit, commit-then-produce and an outbox, by number of writers.

A writer is a process; an order is an update of an account, an insert and a message. See README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from alternatives import NAIVE, OUTBOX, PLAIN, WRITERS, Case
from comparison import compare
from options import add_servers, count, counts, parser_of, positive, some_of

_NAMES: Final = {"database": PLAIN, "naive": NAIVE, "outbox": OUTBOX, "recipe": WRITERS}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--seconds", type=positive, default=5.0, help="duration of one measurement")
    add("--rounds", type=count, default=5, help="number of rounds; each measures every alternative in turn")
    add("--writers", type=counts, default=[1, 4, 8], help="numbers of writers, comma-separated")
    add("--alternatives", type=some_of(list(_NAMES)), default=list(_NAMES), help="what to measure, comma-separated")
    add("--no-warm-up", dest="warm_up", action="store_false", help="skip the warm-up round, and the broker's")
    add("--json", type=Path, metavar="FILE", help="write every figure to this file")
    add_servers(parser)
    chosen = parser.parse_args(given)
    if not chosen.warm_up:
        parser.set_defaults(broker_warm_up=0.0)
        chosen = parser.parse_args(given)
    return chosen


def main() -> int:
    options = arguments()
    points = [
        [Case(_NAMES[name], writers, processes=writers, debits=True) for name in options.alternatives]
        for writers in options.writers
    ]
    return compare(points, options, warm_up=options.warm_up)


if __name__ == "__main__":
    sys.exit(main())
