"""What all tests share: real servers, by plugins of their own; and Ctrl-C, which some tests send to themselves."""

import signal

pytest_plugins = ["fixtures.reruns", "fixtures.broker", "fixtures.tiers", "fixtures.database", "fixtures.spark"]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # run in the background of a shell: children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
