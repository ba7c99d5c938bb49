"""`python -m lookahead`, the same as the `lookahead` command."""

from __future__ import annotations

from lookahead.cli import program

if __name__ == "__main__":
    program()
