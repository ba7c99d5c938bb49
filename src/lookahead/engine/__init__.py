"""The engine: runs a transformers model, as it is, on token trees."""

from lookahead.engine.model_check import check_model
from lookahead.engine.model_runner import ForwardResult, ModelRunner
from lookahead.engine.tree_cache import TreeCache

__all__ = ["ForwardResult", "ModelRunner", "TreeCache", "check_model"]
