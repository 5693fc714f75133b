"""The relay that tests kill: it publishes the outbox until SIGTERM.

python -m relay.relay_worker URL BOOTSTRAP NAME BATCH LEASE SHARDS
"""

from __future__ import annotations

import sys

import dualwrite
from dualwrite.relay import BatchOptions, RelayOptions


def main() -> None:
    url, servers, name, batch, lease, shards = sys.argv[1:]
    options = RelayOptions(
        batch=BatchOptions(rows=int(batch)),
        poll=0.01,
        longest_poll=0.1,
        pause=0.05,
        longest_pause=0.5,
        lease=float(lease),
        shards=int(shards),
    )
    with dualwrite.Relay(url, kafka=servers, name=name, options=options) as relay:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        relay.run()


if __name__ == "__main__":
    main()
