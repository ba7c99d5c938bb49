"""Tree attention: a step's tokens attend to the cached text and to their ancestors, without a dense mask."""

from lookahead.backends.transformers.tree_attention.interface import NAME, register, tree_attention_forward
from lookahead.backends.transformers.tree_attention.packed_mask import pack, packed_width, unpack

__all__ = ["NAME", "pack", "packed_width", "register", "tree_attention_forward", "unpack"]
