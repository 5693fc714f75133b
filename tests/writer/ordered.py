"""The process that test_lanes.py kills: its transactions send two messages each, all to one partition.

python -m writer.ordered URL BOOTSTRAP ID TOPIC FIRST COUNT

The number of its lanes comes from the environment (DUALWRITE_LANES).
"""

from __future__ import annotations

import sys

import sqlalchemy as sa

import dualwrite
from writer.scene import TIMEOUTS, Event


def write(writer: dualwrite.DualWriter, topic: str, number: int) -> None:
    """Write a row, and send a message before and after it."""
    with writer.transaction() as tx:
        tx.send(topic, f"{number}a", partition=0)
        tx.db.execute(sa.insert(Event).values(writer=writer.transactional_id, number=number))
        tx.send(topic, f"{number}b", partition=0)


def main() -> None:
    url, bootstrap, transactional_id, topic, first, count = sys.argv[1:]
    with dualwrite.connect(url, kafka=bootstrap, transactional_id=transactional_id, timeouts=TIMEOUTS) as writer:
        for number in range(int(first), int(first) + int(count)):
            write(writer, topic, number)


if __name__ == "__main__":
    main()
