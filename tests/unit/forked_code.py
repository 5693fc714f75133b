"""The module that test_fork_server runs in a forked process: it executes the code in its first argument."""

import sys


def main() -> None:
    exec(sys.argv[1], {})
