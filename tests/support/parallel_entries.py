"""What tests let ranks do: functions that take arguments and return an exit code, as the command line does."""

from __future__ import annotations

import os
import signal
import sys
import time

from lookahead.parallel.launcher import run_ranks


def rank_1_fails(arguments: list[str]) -> int:
    """Rank 1 fails with a message, the others would never end."""
    if os.environ["RANK"] == "1":
        print("error: no room", file=sys.stderr)
        return 3
    time.sleep(600)
    return 0


def rank_1_is_killed(arguments: list[str]) -> int:
    """Rank 1 is killed, the others would never end."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0


def expects(arguments: list[str]) -> int:
    """Whether standard input has another length than the argument says."""
    return int([str(len(sys.stdin.read()))] != arguments)


def sleeps(arguments: list[str]) -> int:
    """Would never end."""
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(run_ranks(2, f"parallel_entries:{sys.argv[1]}", []))
