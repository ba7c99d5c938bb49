"""Drafts for vLLM, through its `custom_class` proposers. This package does not import vLLM."""

from lookahead.integrations.vllm.proposer import LookaheadProposer

__all__ = ["LookaheadProposer"]
