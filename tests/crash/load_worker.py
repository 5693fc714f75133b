"""The process that `crash.load` kills: it writes events until its standard input is closed, with a thread for each id.

python -m crash.load_worker URL BOOTSTRAP '[[ID, FIRST NUMBER], …]'
"""

from __future__ import annotations

import json
import sys
import threading

import dualwrite
from crash import worker


def write(url: str, bootstrap: str, name: str, first: int, stop: threading.Event) -> None:
    try:
        with dualwrite.connect(
            url, kafka={"bootstrap.servers": bootstrap}, transactional_id=name, timeouts=worker.timeouts()
        ) as writer:
            worker.say("open", name, ",".join(o.outcome.value for o in writer.recovery_report))
            number = first
            while not stop.is_set():
                worker.say("begin", name, number)
                worker.write_event(writer, f"events-{name}", number)
                worker.say("done", name, number)
                number += 1
    except dualwrite.DualWriteError as error:
        worker.say("error", name, type(error).__name__, error)


def main() -> None:
    url, bootstrap, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    stop = threading.Event()
    threads = [threading.Thread(target=write, args=(url, bootstrap, name, first, stop)) for name, first in ids]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
