"""The writer that the tests of `recover` crash: it sends one message per transaction, and exits at a failpoint.

python -m cli.crashing_writer ID TOPIC COUNT
"""

from __future__ import annotations

import sys

import dualwrite


def main() -> None:
    transactional_id, topic, count = sys.argv[1:]
    writer = dualwrite.connect(transactional_id=transactional_id)
    for _ in range(int(count)):
        with writer.transaction() as tx:
            tx.send(topic, "from the crashed writer")


if __name__ == "__main__":
    main()
