"""Compares the pool with a plain commit per request, commit-then-produce, an outbox and a writer each. See README.md."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from alternatives import ALTERNATIVES, CORE, DECLARED, HANDLES, KINDS, OWN, THREADS, UNDECLARED, WRITERS, Case
from comparison import compare
from options import add_servers, count, counts, parser_of, positive, round_trips, some_of

_QUICK: Final[dict[str, Any]] = {"seconds": 0.5, "rounds": 1, "callers": [2, 8], "broker_warm_up": 0.0}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--rtt", type=round_trips, default=[0.0], help="round trips to database and Kafka, in milliseconds, comma-separated")
    add("--callers", type=counts, default=[1, 8, 32, 128], help="numbers of callers, comma-separated")
    add("--seconds", type=positive, default=5.0, help="duration of one measurement")
    add("--rounds", type=count, default=3, help="number of rounds; each measures every alternative in turn")
    add("--handles", type=some_of(HANDLES), default=list(HANDLES), help="what callers write with")
    add("--callers-kind", type=some_of(KINDS), default=list(KINDS), help="what callers are")
    add("--alternatives", type=some_of(ALTERNATIVES), default=list(ALTERNATIVES), help="what to measure, comma-separated")
    add("--pool-size", type=count, help="a fixed number of the pool's writers (default: what the pool chooses)")
    add(
        "--most-writers",
        type=count,
        default=32,
        help="measure a writer per caller up to this many callers; pool.transaction() has at most as many",
    )
    tenants = "each order sets its tenant first, for row-level security (threads, Core); declared: pools are given the tenant"
    add("--tenants", nargs="?", const=UNDECLARED, choices=(UNDECLARED, DECLARED), help=tenants)
    add("--quick", action="store_true", help="short and without the warm-up round, to see the output")
    add("--json", type=Path, metavar="FILE", help="write every figure to this file")
    add_servers(parser)
    chosen = parser.parse_args(given)
    if chosen.quick:
        parser.set_defaults(**_QUICK)
        chosen = parser.parse_args(given)
    if any(chosen.rtt) and chosen.kafka is not None:
        parser.error("--rtt needs a broker of our own, which tells its clients the proxy's address: omit --kafka")
    if not points(chosen):
        parser.error("nothing to measure: writers and own need threads, tasks need psycopg; see also --most-writers")
    return chosen


def points(options: argparse.Namespace) -> list[list[Case]]:
    """The alternatives at each point."""
    places = itertools.product(options.rtt, options.callers_kind, options.handles, options.callers)
    found = [[case for name in options.alternatives if (case := _case(options, name, *place))] for place in places]
    return [here for here in found if here]


def _case(options: argparse.Namespace, name: str, round_trip: float, kind: str, handle: str, callers: int) -> Case | None:
    """An alternative at a point; None if it is not measured there: blocks and writers need threads, tasks psycopg."""
    most: int = options.most_writers
    if options.tenants and (kind, handle) != (THREADS, CORE):
        return None
    if (kind != THREADS and (handle == CORE or name in (WRITERS, OWN))) or (name == WRITERS and callers > most):
        return None
    size = min(callers, most) if options.pool_size is None and name == OWN else options.pool_size
    return Case(name, callers, kind, handle, round_trip, pool_size=size, tenants=options.tenants)


def main() -> int:
    options = arguments()
    return compare(points(options), options, warm_up=not options.quick)


if __name__ == "__main__":
    sys.exit(main())
