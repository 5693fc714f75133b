"""Measures what observing a pool costs: with nothing installed, with metrics, with traces, and with all of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from alternatives import CORE, HANDLES, OBSERVED, POOL, TITLES, Case
from comparison import Rounds, compare
from figures import FigureColumn, compared
from measurement import Figures
from options import add_servers, count, parser_of, positive, some_of

_QUICK: Final[dict[str, Any]] = {"seconds": 0.5, "rounds": 1, "callers": 8, "broker_warm_up": 0.0}
_MICRO: Final = 1e6
_EXPLAINED: Final = """\
Medians of {rounds} rounds, with the smallest and largest ratio to a pool with nothing installed in the same round. A unit is an
insert and a message of 200 bytes each. CPU is that of the callers' process, for a unit. Spans are counted, not sent:"""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--callers", type=count, default=32, help="the number of callers, which are threads of one process")
    add("--seconds", type=positive, default=5.0, help="duration of one measurement")
    add("--rounds", type=count, default=9, help="number of rounds; each measures every alternative in turn")
    add("--handle", type=some_of(HANDLES), default=[CORE], help="what callers write with")
    add("--pool-size", type=count, default=2, help="the number of the pool's writers, which must not differ")
    add("--quick", action="store_true", help="short and without the warm-up round, to see the output")
    add_servers(parser)
    chosen = parser.parse_args(given)
    if chosen.quick:
        parser.set_defaults(**_QUICK)
        chosen = parser.parse_args(given)
    chosen.json = None
    return chosen


def shown(rounds: Rounds) -> list[str]:
    """Units per second and processor time of each, and relative to the pool with nothing installed in the same round."""
    found = {
        name: [next(each for each in one if each.case.alternative == alternative) for one in rounds]
        for alternative, name in {POOL: "nothing", **{each: TITLES[each] for each in OBSERVED}}.items()
    }
    columns: list[FigureColumn[Figures]] = [
        FigureColumn("units/s", lambda each: each.rate, 1, 0),
        FigureColumn("client CPU µs", lambda each: each.client, _MICRO, 0),
    ]
    shown = compared("installed", columns, found, "nothing", base_heading="nothing", digits=3)
    return [_EXPLAINED.format(rounds=len(rounds)), shown]


def main() -> int:
    options = arguments()
    points = [
        [Case(name, options.callers, handle=handle, pool_size=options.pool_size) for name in (POOL, *OBSERVED)]
        for handle in options.handle
    ]
    return compare(points, options, warm_up=not options.quick, shown=shown)


if __name__ == "__main__":
    sys.exit(main())
