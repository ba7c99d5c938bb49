"""`python -m lookahead`, the same as the `lookahead` command."""

from __future__ import annotations

import sys

from lookahead.cli import main

if __name__ == "__main__":
    sys.exit(main())
