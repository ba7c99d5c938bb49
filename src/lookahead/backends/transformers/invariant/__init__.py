"""Passes in which the bits of a node depend on its own text alone: not on what else is sent, nor on how."""
