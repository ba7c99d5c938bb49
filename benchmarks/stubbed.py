"""A stub for the model's pass: a table of recorded texts, and a clock with the prices of an H200.

The library runs on the CPU as it does on a GPU: rows in pages, recorded passes. The clock of the host leaves out the
work of the device. `host_worker.py` measures several commits with this file. Only `Device.install` and `Marks` name
insides of the library.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from math import gcd, log
from time import thread_time_ns
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from cases import Case

VOCABULARY = 1024
"""Number of token ids. It is small, since sampling over all ids is work of the device, but is timed here."""

LAYERS, HEAD = 32, 16
"""Number of layers that the host checks for changes, and the size of a key."""

NODES = (1, 8, 16, 32, 64, 128, 256)
MILLISECONDS = (6.1, 6.55, 6.6, 6.8, 7.5, 8.4, 10.5)
"""Milliseconds of a pass by number of nodes: an 8B model on an H200 (`results/gpu-h200.jsonl`)."""

LONG_PASS = 12.0
"""Milliseconds of a larger pass (a prompt). No draft depends on it."""

PROBABILITIES = (0.9, 0.03, 0.02, 0.01, 0.005, 0.003, 0.002, 0.001)
"""Probabilities of the recorded token and of seven others, after each node."""


class Table:
    """The next token for each token and position. A pass sees nothing else, so this pair identifies the text.

    Args:
        positions: Number of positions.
    """

    def __init__(self, positions: int) -> None:
        token = np.arange(VOCABULARY, dtype=np.int16)
        self._next = np.tile(1 + token * 7 % (VOCABULARY - 1), (positions, 1))
        self._known = np.zeros_like(self._next, dtype=bool)
        levels = np.log(np.array(PROBABILITIES, dtype=np.float32))
        self._levels = torch.from_numpy(levels)
        self._others = torch.from_numpy(37 * np.arange(len(levels)))
        self._rest = log((1 - sum(PROBABILITIES)) / (VOCABULARY - len(levels)))

    def add(self, case: Case) -> Case:
        """Return the case with its token ids renamed, so that no pair of token and position is used by another case."""
        text, start = np.array([*case.prompt, *case.answer]), len(case.prompt) - 1
        places = np.arange(start, len(text) - 1)
        size = VOCABULARY - 1  # token 0 pads
        factors = (factor for factor in itertools.count(1) if gcd(factor, size) == 1)
        for factor, offset in itertools.product(itertools.islice(factors, 64), range(0, size, 11)):
            renamed = 1 + (text * factor + offset) % size
            now, then = renamed[places], renamed[places + 1]
            if np.all(~self._known[places, now] | (self._next[places, now] == then)):
                self._next[places, now], self._known[places, now] = then, True
                return replace(case, prompt=renamed[: start + 1].tolist(), answer=renamed[start + 1 :].tolist())
        raise ValueError(f"{case.id}: no unused token ids are left; take fewer cases")

    def logits(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return logits `[nodes, vocabulary]` for `tokens` `[nodes]` at `positions` `[nodes]`."""
        follows = torch.from_numpy(self._next[positions.numpy(), tokens.numpy()].astype(np.int64))
        logits = torch.full((len(tokens), VOCABULARY), self._rest)
        likely = (follows[:, None] + self._others) % VOCABULARY
        return logits.scatter_(1, likely, self._levels.expand(len(tokens), -1))


class Device:
    """A simulated device: the time of its passes on the CPU is not counted, their price is.

    Attributes:
        table: Source of the logits. If `None`, the model's own forward pass runs.
        launches: Host time in nanoseconds at each pass.
        pooled: Whether keys and values lie in pages of the device. Passes then write none.
    """

    def __init__(self) -> None:
        self.table: Table | None = None
        self.launches: list[int] = []
        self._away = self._depth = self._since = 0
        self._seconds = 0.0
        self.pooled = False

    def host(self) -> int:
        """Return nanoseconds of CPU time of this thread outside of passes."""
        return thread_time_ns() - self._away

    def clock(self) -> float:
        """Return seconds on the virtual clock: host time plus the price of all passes."""
        return self.host() / 1e9 + self._seconds

    def enter(self) -> None:
        """Begin a pass, or work around one; calls may be nested."""
        if not self._depth:
            self._since = thread_time_ns()
            self.launches.append(self._since - self._away)
        self._depth += 1

    def leave(self) -> None:
        """End it."""
        self._depth -= 1
        if not self._depth:
            self._away += thread_time_ns() - self._since

    def record(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Replace the capture of a CUDA graph: the recorded work counts as work of the device."""

        def replay() -> Any:
            self.enter()
            try:
                return work()
            finally:
                self.leave()

        return replay

    def run(self, tokens: Any, positions: Any, keep: Any, cache: Any) -> torch.Tensor:
        """Return logits `[rows, kept nodes, vocabulary]` of a pass."""
        assert self.table is not None
        nodes = tokens.numel()
        self._seconds += (LONG_PASS if nodes > NODES[-1] else float(np.interp(nodes, NODES, MILLISECONDS))) / 1000
        if not self.pooled and self._depth == 1:  # recorded passes write to memory of the device
            states = torch.zeros(len(tokens), 1, tokens.shape[1], HEAD)
            for layer in range(LAYERS):
                cache.update(states, states, layer)
        selection = slice(-keep or None, None) if isinstance(keep, int) else keep
        tokens, positions = tokens[:, selection], positions.expand_as(tokens)[:, selection]
        return self.table.logits(tokens.flatten(), positions.flatten()).view(*tokens.shape, VOCABULARY)

    def install(self) -> None:
        """Give the library this clock and this recorder, and run rows of an Engine as on a GPU."""
        _replace("step_clock", lambda device: self.clock)
        _replace("recorder_for", lambda device: self.record)
        session = import_module("lookahead.backends.transformers.session").TransformersSession
        opened = session.open_rows
        shape, pooled, paused = _named("LayerShape"), _named("PooledRunner"), _named("PausingClock")

        def open_rows(self_: Any, *arguments: Any) -> Any:
            self.table, table = None, self.table  # trials of the model run its own forward pass
            rows, *rest = opened(self_, *arguments)
            self.table, self.pooled = table, True
            shapes = [shape(1, 1, 1, torch.float32)] * LAYERS
            if not hasattr(pooled, "begin_call"):  # of an older commit
                return (pooled(rows, shapes, True, paused(rows.model.device)), *rest)
            clone = _named("SharedClone")(self_._model, _named("TREE_ATTENTION")).module
            return (pooled(clone, shapes, paused(clone.device)), *rest)

        session.open_rows = open_rows


DEVICE = Device()


class Marks:
    """Host time at the end of each part of a step, as the library marks it, while switched on."""

    def __init__(self) -> None:
        self.times: list[tuple[str, int]] = []
        self._timer = _named("StepTimer")
        self._plain = self._timer.begin, self._timer.mark

    def switch(self, on: bool) -> None:
        """Start or stop noting times."""
        begin, mark = self._plain
        times, host = self.times, DEVICE.host

        def begun(timer: Any, *arguments: Any) -> None:
            times.append(("plan", host()))
            begin(timer, *arguments)

        def marked(timer: Any, phase: Any) -> None:
            times.append((phase, host()))
            mark(timer, phase)

        self._timer.begin, self._timer.mark = (begun, marked) if on else self._plain


class TableModel(LlamaForCausalLM):  # type: ignore[misc]
    """A Llama that takes its logits from `DEVICE.table`."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        logits_to_keep: Any = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """See transformers. Newer versions pass `past_key_values` as `cache`."""
        if DEVICE.table is None:
            if past_key_values is not None:
                kwargs["past_key_values"] = past_key_values
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                logits_to_keep=logits_to_keep,
                **kwargs,
            )
        cache = kwargs.get("cache") if past_key_values is None else past_key_values
        DEVICE.enter()
        try:
            return CausalLMOutputWithPast(logits=DEVICE.run(input_ids, position_ids, logits_to_keep, cache))
        finally:
            DEVICE.leave()


def table_model(positions: int) -> TableModel:
    """Return a small model with `LAYERS` layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=2 * HEAD,
        intermediate_size=2 * HEAD,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return TableModel(config).eval()


def _modules() -> Sequence[Any]:
    return [module for name, module in list(sys.modules.items()) if name.split(".")[0] == "lookahead"]


def _named(name: str) -> Any:
    """Return the class or function of this name from any module of the library."""
    for module in _modules():
        if name in vars(module):
            return vars(module)[name]
    raise LookupError(f"the library has no {name} any more; use its replacement in benchmarks/stubbed.py")


def _replace(name: str, by: Any) -> None:
    """Replace a name in all modules of the library."""
    _named(name)
    for module in _modules():
        if name in vars(module):
            setattr(module, name, by)
