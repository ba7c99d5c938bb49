"""Drafts for vLLM, through its `custom_class` proposers. Nothing here imports vLLM: it calls, with arrays."""

from lookahead.integrations.vllm.proposer import LookaheadProposer

__all__ = ["LookaheadProposer"]
