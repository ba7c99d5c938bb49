"""Tiny models of every family in transformers."""
