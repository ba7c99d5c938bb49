"""Processes that begin as copies of one that has imported everything, which would take each of them seconds."""

from __future__ import annotations

import multiprocessing
from importlib.util import find_spec
from multiprocessing.context import ForkServerContext

_MODULES = [
    *("transformers.models.llama.modeling_llama", "lookahead.api.generation", "lookahead.parallel"),
    *("lookahead.api.call", "transformers.generation.utils", "torch._dynamo", "hypothesis"),
]
_OF_SERVERS = ["lookahead.cli.serve", "lookahead.server.process"]


def preloaded() -> ForkServerContext:
    """Where such processes are started: one for all tests of a process, with the first modules that it is given."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_MODULES, *(_OF_SERVERS if find_spec("fastapi") else [])])
    return context
