"""The engine: runs a transformers model, as it is, on token trees."""

from lookahead.engine.cache_exchange import adopt_cache, return_cache
from lookahead.engine.engine_model import engine_model
from lookahead.engine.equivalence import Equivalence, equivalence
from lookahead.engine.forward_result import ForwardResult
from lookahead.engine.model_check import check_adapters, check_model
from lookahead.engine.model_runner import ModelRunner
from lookahead.engine.static_engine import StaticLoan
from lookahead.engine.tree_cache import TreeCache

__all__ = [
    "Equivalence",
    "ForwardResult",
    "ModelRunner",
    "StaticLoan",
    "TreeCache",
    "adopt_cache",
    "check_adapters",
    "check_model",
    "engine_model",
    "equivalence",
    "return_cache",
]
