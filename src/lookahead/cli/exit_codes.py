"""What the exit code of the command says."""

from __future__ import annotations

OK = 0
DIFFERENT = 1
"""`compare`: the outputs are not identical."""
ERROR = 2
INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
BROKEN_PIPE = 141
"""128 + SIGPIPE: whoever read the output has gone."""
