"""Transformers' arguments in, transformers' outputs out."""
