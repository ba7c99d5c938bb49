"""The command line, built on the public API only."""

from __future__ import annotations

from collections.abc import Sequence

from lookahead.cli import process

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: Arguments without the program's name; those of the process, which is then all ours, when left out.
    """
    try:
        if argv is None:
            process.quit_on_interrupt()
        from lookahead.cli.app import run

        return run(argv)
    except KeyboardInterrupt:
        return process.INTERRUPTED
