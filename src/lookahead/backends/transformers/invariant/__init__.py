"""Invariant passes: the bits of a node depend only on its own text, not on other nodes or rows of a pass."""
