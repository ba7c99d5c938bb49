"""The engine: runs a transformers model, as it is, on token trees."""

from lookahead.backends.transformers.cache_exchange import adopt_cache, return_cache
from lookahead.backends.transformers.engine_model import engine_model
from lookahead.backends.transformers.equivalence import Equivalence, equivalence
from lookahead.backends.transformers.forward_result import ForwardResult
from lookahead.backends.transformers.model_check import check_adapters, check_model
from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.backends.transformers.static_engine import StaticBuffers
from lookahead.backends.transformers.tree_cache import TreeCache

__all__ = [
    "Equivalence",
    "ForwardResult",
    "ModelRunner",
    "StaticBuffers",
    "TreeCache",
    "adopt_cache",
    "check_adapters",
    "check_model",
    "engine_model",
    "equivalence",
    "return_cache",
]
