"""Measures what observing a pool costs: with nothing installed, with metrics, with traces, and with all of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, Final

from alternatives import CORE, HANDLES, OBSERVED, POOL, TITLES, Case
from comparison import Rounds, compare
from figures import Spread, median, table, with_range
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

    def of(name: str, what: str) -> list[float | None]:
        return [next((getattr(each, what) for each in one if each.case.alternative == name), None) for one in rounds]

    lines = []
    for name in (POOL, *OBSERVED):
        rate, client = of(name, "rate"), of(name, "client")
        ratios = [Spread.of_ratios(rate, of(POOL, "rate")), Spread.of_ratios(client, of(POOL, "client"))]
        cells = [median(Spread.of(rate), 0), with_range(ratios[0], 3), median(Spread.of(client), 0, _MICRO)]
        lines.append(["nothing" if name == POOL else TITLES[name], *cells, with_range(ratios[1], 3)])
    head = ["installed", "units/s", "of nothing", "client CPU µs", "of nothing's"]
    return [_EXPLAINED.format(rounds=len(rounds)), table(head, lines)]


def main() -> int:
    options = arguments()
    points = [
        [Case(name, options.callers, handle=handle, pool_size=options.pool_size) for name in (POOL, *OBSERVED)]
        for handle in options.handle
    ]
    return compare(points, options, warm_up=not options.quick, shown=shown)


if __name__ == "__main__":
    sys.exit(main())
