"""Starts the ranks of one machine and waits for them, as `torchrun` does for many."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not in its own list

GRACE = 15.0
"""Seconds that the other ranks have to end by themselves, with a message, after one has failed."""

_POLL = 0.05


def run_ranks(count: int, command: Sequence[str], stdin: bytes | None = None, grace: float = GRACE) -> int:
    """Run `command` as `count` processes, each told who it is as `torchrun` tells it, until all have ended.

    Rank 0 has this process's standard output and error; the others speak through it, by the errors they cause.

    Args:
        count: How many.
        command: The program and its arguments.
        stdin: What every rank finds on its standard input; nothing if not given.
        grace: Seconds that ranks go on after one has failed, before they are stopped.

    Returns:
        The exit code of rank 0, or if that is 0 of the first other rank that has another one.
    """
    # Kept here rather than on rank 0, so that the others can still find out what became of rank 0.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(count):
            own = None if rank == 0 else subprocess.DEVNULL
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=own,
                stderr=own,
                env={**os.environ, **_environment(rank, count, store.port)},
            )
            ranks.append(process)
        for process in ranks:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(stdin or b"")
                process.stdin.close()
        return _wait(ranks, grace)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The store is there already, and no rank is to make one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _wait(ranks: Sequence[subprocess.Popen[bytes]], grace: float) -> int:
    failed_at = None
    while any(process.poll() is None for process in ranks):
        try:
            time.sleep(_POLL)
        except KeyboardInterrupt:
            continue  # the ranks have got it too, and print what they have
        codes = [process.poll() for process in ranks]
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > grace:
            stuck = [str(rank) for rank, code in enumerate(codes) if code is None]
            print(f"error: rank {', '.join(stuck)} did not end after another had failed; stopped", file=sys.stderr)
            break
    codes = [process.poll() for process in ranks]
    code = next((code for code in codes if code), 1 if None in codes else 0)
    return 128 - code if code < 0 else code
