"""Tree attention: a step's tokens attend to the cached text and to their ancestors, without a dense mask."""

from lookahead.backends.transformers.tree_attention.interface import (
    BY_POSITION,
    NAME,
    register,
    register_by_position,
    tree_attention_forward,
)
from lookahead.backends.transformers.tree_attention.packed_mask import pack, packed_width, unpack

__all__ = [
    "BY_POSITION",
    "NAME",
    "pack",
    "packed_width",
    "register",
    "register_by_position",
    "tree_attention_forward",
    "unpack",
]
