"""Tiny models of the same class as a large one, on which the large one's ways are tried."""

from lookahead.backends.transformers.miniature.model import build_miniature, draw_text, plain_logits, quiet

__all__ = ["build_miniature", "draw_text", "plain_logits", "quiet"]
