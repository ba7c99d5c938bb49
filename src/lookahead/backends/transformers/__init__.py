"""The engine: runs a transformers model, as it is, on token trees."""

from lookahead.backends.forward_result import ForwardResult
from lookahead.backends.transformers.cache_exchange import adopt_cache, return_cache
from lookahead.backends.transformers.chain_cache import ChainRow, SavedState, check_states, has_running_state
from lookahead.backends.transformers.checks.kinds import Equivalence, equivalence
from lookahead.backends.transformers.checks.models import check_adapters, check_model, runs_on_chains
from lookahead.backends.transformers.engine_model import engine_model, runs_static
from lookahead.backends.transformers.prompt_pass import PromptPass
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner, RowsRunner
from lookahead.backends.transformers.shared_clone import chain_engine
from lookahead.backends.transformers.static_engine import StaticBuffers
from lookahead.backends.transformers.tree_cache import TreeCache

__all__ = [
    "ChainRow",
    "ChainRunner",
    "Equivalence",
    "ForwardResult",
    "ModelRunner",
    "PromptPass",
    "RowsRunner",
    "SavedState",
    "StaticBuffers",
    "TreeCache",
    "adopt_cache",
    "chain_engine",
    "check_adapters",
    "check_model",
    "check_states",
    "engine_model",
    "equivalence",
    "has_running_state",
    "return_cache",
    "runs_on_chains",
    "runs_static",
]
