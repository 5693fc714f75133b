"""What all tests share: real servers, by plugins of their own; failpoints in processes; Ctrl-C, which some send themselves."""

import os
import signal

pytest_plugins = [
    "fixtures.reruns",
    "fixtures.workers",
    "fixtures.broker",
    "fixtures.tiers",
    "fixtures.database",
    "fixtures.spark",
]

os.environ["DUALWRITE_TESTING"] = "1"  # in the processes that tests start, DUALWRITE_FAILPOINTS acts

os.environ["DUALWRITE_TESTING"] = "1"  # in the processes that tests start, DUALWRITE_FAILPOINTS acts

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a shell: children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
