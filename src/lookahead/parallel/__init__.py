"""Lookahead parallelism (section 3.4 of the paper): several devices, each with the model, make one text faster."""

from lookahead.parallel.group import TIMEOUT, ParallelGroup, join
from lookahead.parallel.scaling import scale_config
from lookahead.parallel.split import Split, split_tree
from lookahead.parallel.tensor import shard_model
from lookahead.parallel.traffic import Traffic

__all__ = ["TIMEOUT", "ParallelGroup", "Split", "Traffic", "join", "scale_config", "shard_model", "split_tree"]
