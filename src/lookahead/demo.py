"""Small model and prompt of the package, to try the library offline."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

DEMO_PROMPT = '''\
import copy
from collections import OrderedDict

import networkx as nx


class Graph:
    """A directed graph with weighted edges."""

    def __init__(self, nodes=None, edges=None, directed=False):
        self.nodes = nodes or {}
        self.edges = edges or {}
        self.directed = directed

    def add_node(self, node, **attributes):
        """Add a node to the graph."""
        if node not in self.nodes:
            self.nodes[node] = {}
        self.nodes[node].update(attributes)

    def add_edge(self, source, target, weight=1.0):
        """Add an edge to the graph."""
        if source not in self.nodes:'''
"""The beginning of a Python class.

The model's greedy continuation repeats names and shapes of the class, without a repeated cycle in its first 128
tokens. The prompt ends without a line break, since the model's tokens join a break to the indentation after it.
"""


def demo_model_path() -> Path:
    """Return the folder of the demonstration model: a Llama of 5.9 million parameters trained on Python code.

    The model loads with `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`, offline.
    """
    return Path(str(files("lookahead") / "demo_model"))
