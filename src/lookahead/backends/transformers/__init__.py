"""Backend for transformers models, on token trees or chains."""

import re
import warnings

from transformers import __version__

from lookahead.errors import LookaheadWarning

TRANSFORMERS: tuple[int, ...] = tuple(int(number) for number in re.findall(r"\d+", __version__)[:2])
"""Major and minor version of the installed transformers."""

_TESTED = ((5, 17), (5, 24))
"""Oldest and newest tested versions, as in pyproject.toml."""

if not _TESTED[0] <= TRANSFORMERS <= _TESTED[1]:  # before any import below can fail
    _oldest, _newest = (".".join(map(str, version)) for version in _TESTED)
    warnings.warn(
        f"transformers {__version__} is untested with this library: {_oldest} to {_newest} are known to work. "
        f"If a call fails, install one of them: pip install transformers=={_newest}.*",
        LookaheadWarning,
        stacklevel=2,
    )
