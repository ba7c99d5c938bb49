"""Lookahead decoding for `model.generate(..., custom_generate="...", trust_remote_code=True)`."""

from __future__ import annotations

from typing import Any

try:
    import lookahead
except ImportError as error:
    raise ImportError(
        "lookahead-decoding is not installed, nor on a package index yet: run `pip install .` in a checkout of it, or "
        "`pip install WHEEL` with the path of its wheel"
    ) from error


def generate(*inputs: Any, model: Any, lookahead_config: Any = None, **kwargs: Any) -> Any:
    """The text of `model.generate`, in fewer steps.

    Args:
        *inputs: Token ids of the prompts, where they are passed by position.
        model: The model.
        lookahead_config: How to draft: a `lookahead.LookaheadConfig`, or its fields as a dictionary.
        **kwargs: As for `model.generate`.
    """
    if isinstance(lookahead_config, dict):
        lookahead_config = lookahead.LookaheadConfig(**lookahead_config)
    given = {name: value for name, value in kwargs.items() if value is not None}
    return lookahead.generate(model, *inputs, lookahead_config=lookahead_config, **given)
