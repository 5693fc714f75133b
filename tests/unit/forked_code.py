"""What test_fork_server has a forked process run: the code in its first argument."""

import sys


def main() -> None:
    exec(sys.argv[1], {})
