"""Functions that tests run on ranks; like the command line, they take arguments and return an exit code."""

from __future__ import annotations

import os
import signal
import sys
import time

from lookahead.parallel.launcher import run_ranks


def rank_1_fails(arguments: list[str]) -> int:
    """Fail with a message on rank 1; sleep forever on others."""
    if os.environ["RANK"] == "1":
        print("error: no room", file=sys.stderr)
        return 3
    time.sleep(600)
    return 0


def rank_1_is_killed(arguments: list[str]) -> int:
    """Kill rank 1; sleep forever on others."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return 0


def expects(arguments: list[str]) -> int:
    """Return 1 if the length of standard input differs from the argument."""
    return int([str(len(sys.stdin.read()))] != arguments)


def sleeps(arguments: list[str]) -> int:
    """Sleep forever."""
    time.sleep(600)
    return 0


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # ranks import this file, too
    sys.exit(run_ranks(2, f"parallel_entries:{sys.argv[1]}", sys.argv[2:], sys.stdin.buffer.read()))
