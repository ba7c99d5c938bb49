"""The command line, built on the public API only."""

from __future__ import annotations

from lookahead.cli.app import main

__all__ = ["main"]
