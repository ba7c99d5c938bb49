"""What a user may choose about lookahead decoding."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from lookahead.errors import InvalidArgumentError

PRESETS = ("auto", "paper", "jacobi", "token_recycling", "context_matches", "autoregressive")

BUDGETED = ("auto", "token_recycling", "context_matches")
"""Presets whose steps are filled up to a number of nodes."""

ENGINES = ("dynamic", "static", "compiled")

MEMORY_SCOPES = ("request", "process")

MAX_NODES_PER_STEP = 4096
"""Largest token tree that a configuration may ask for, in nodes; far above what any device gains from."""


PAPER = {"window_size": 15, "ngram_size": 5, "guess_set_size": 15, "pool_from_prompt": False, "share_pool": False}
"""What the paper's method takes where nothing is said: the sizes that its authors found best for a 7B model."""

JACOBI = {"block_size": 16}

OWNERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*PAPER, "pool_from_output"), ("paper",)),
    **dict.fromkeys((*JACOBI, "max_iterations"), ("jacobi",)),
    "step_budget": BUDGETED,
    "memory": ("auto",),
    "seed": ("paper", "jacobi"),
}
"""Fields that are about some presets only, and which these are."""

_CHOSEN: Any = None  # stands for a default that depends on the other fields

MOST_CHOSEN_NODES = 128
"""Nodes, the root included, of a step whose number of nodes is chosen by what they bring. On most devices a node
costs its full price from here on."""


@dataclass(frozen=True)
class LookaheadConfig:
    """How tokens are drafted. Nothing in here can change the text that is generated, only the number of steps.

    Args:
        preset: The drafting method. `"auto"` is lookahead decoding as this library does it: an n-gram memory
            filled by every node of every step and matches in the text, as many nodes of each as pay.
            `"paper"` is lookahead decoding as published (2-D window and n-gram pool, Algorithm 2), `"jacobi"`
            is Jacobi decoding (Algorithm 1), `"token_recycling"` and `"context_matches"` are two published
            methods to compare with, `"autoregressive"` drafts nothing, so that each step yields one token.
            Not given, it is `"paper"` if any size or setting of the paper's method is given, `"jacobi"` if one
            of Jacobi decoding is, and else `"auto"`. Other values than the defaults are refused in fields that
            are about other presets.
        step_budget: For `"auto"`, `"token_recycling"` and `"context_matches"`: nodes of a step, the root included;
            every step is filled up to it, as far as there is anything to draft. `None` lets `"auto"` choose for
            each step what makes for the most tokens per second, and stands for 64 with the others. At least 1.
        memory: How long the n-gram memory of `"auto"` lives: for one `"request"` (one call), for all calls in
            this `"process"` with the same model, or in a file, given by its path, across processes; the file is
            made if it is not there, and written at the end of each call. A single word is no path: write
            `"./word"`. No text is kept, only token ids.
        window_size: Paper: W, columns of the 2-D window: how many positions ahead are guessed in parallel
            (section 3.1). 15 if not given, at least 1.
        ngram_size: Paper: N, length of the n-grams in the pool; the window has N-1 rows (section 3.1). 5 if not
            given, at least 2.
        guess_set_size: Paper: G, how many n-grams the pool keeps for each first token, and so how many candidates
            a step verifies at most (section 3.2). The paper suggests G = W. 15 if not given, at least 1.
        pool_from_prompt: Paper: fill the pool with the n-grams of the prompt before the first step (the paper's
            "prompt as reference", Table 3).
        pool_from_output: Paper: fill the pool with the n-grams of the generated text as it grows. `None` follows
            `pool_from_prompt`: the authors' evaluation has both or neither.
        share_pool: Paper: let the rows of one call share one pool, so that each drafts from what the others found.
        block_size: Jacobi decoding only: m, how many positions are guessed at once (Algorithm 1). 16 if not given, at
            least 1.
        max_iterations: Jacobi decoding only: after this many steps a block that has not settled is given up
            and a new one begins. `None` stands for `block_size`, the most that Jacobi iteration can need.
        seed: Seed of the random prompt tokens that the window and the Jacobi blocks start from. It has
            nothing to do with sampling.
        tie_margin: Greedy decoding in low precision: name no token from a step with a draft if its logit is
            less than this above the second; decide with a step without a draft, whose rounding is plain
            decoding's. 0 is off, and right in float32. See `docs/precision.md` for what it brings and costs.
        pack_weights: On a CPU, run the model with a second copy of its linear layers' weights, in the order in
            which the processor multiplies them. Steps take about half the time (`docs/engine.md`), the weights
            twice the memory. The copy is made at the first call and kept as long as the model.
        engine: How steps are run. `"dynamic"` sends each step as large as it is, which is right on a CPU.
            `"static"` takes memory for the longest text of the call beforehand (`max_length`, so choose that or
            `max_new_tokens` with care), pads steps to a few sizes, and on CUDA captures a graph of each;
            `"compiled"` sends the static pass through `torch.compile` first, which takes a minute or more. What was
            made is kept for the next call with the model. Long prompts, models that cannot be run so (with
            hooks, adapters, or positions that change when a text becomes long), and calls with a
            `tie_margin`, whose one-token steps must round as plain decoding does, go the dynamic way.

    Raises:
        InvalidArgumentError: A value has the wrong type, is out of its range, or is about another preset.
    """

    preset: str = _CHOSEN
    step_budget: int | None = None
    memory: str | os.PathLike[str] = "request"
    window_size: int = _CHOSEN
    ngram_size: int = _CHOSEN
    guess_set_size: int = _CHOSEN
    pool_from_prompt: bool = _CHOSEN
    pool_from_output: bool | None = None
    share_pool: bool = _CHOSEN
    block_size: int = _CHOSEN
    max_iterations: int | None = None
    seed: int = 0
    tie_margin: float = 0.0
    pack_weights: bool = False
    engine: str = "dynamic"

    def __post_init__(self) -> None:
        if self.preset is None:
            object.__setattr__(self, "preset", self._preset_of_fields())
        for name, value in (PAPER | JACOBI).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.preset not in PRESETS:
            raise InvalidArgumentError(f"preset={self.preset!r} is not known; choose one of {', '.join(PRESETS)}")
        if self.engine not in ENGINES:
            raise InvalidArgumentError(f"engine={self.engine!r} is not known; choose one of {', '.join(ENGINES)}")
        self._check_numbers()
        self._check_memory()
        for name in ("pool_from_prompt", "share_pool", "pack_weights"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidArgumentError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.pool_from_output is not None and not isinstance(self.pool_from_output, bool):
            raise InvalidArgumentError(
                f"pool_from_output={self.pool_from_output!r} must be True, False, or None to follow pool_from_prompt"
            )
        self._check_owners()
        if self.max_nodes > MAX_NODES_PER_STEP:
            raise InvalidArgumentError(
                f"preset={self.preset!r} with {self._sizes()} asks for up to {self.max_nodes} nodes in one step; "
                f"the most is {MAX_NODES_PER_STEP}: choose smaller sizes"
            )

    def _check_numbers(self) -> None:
        """Refuse what is no number or out of its range; keep Python's own numbers."""
        for name, least, most, meaning in _WHOLE_NUMBERS:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _whole_number(name, value, least, most, meaning))
        margin = self.tie_margin
        if isinstance(margin, bool) or not isinstance(margin, Real) or not margin >= 0:
            raise InvalidArgumentError(f"tie_margin={margin!r} must be a number of at least 0, a difference of logits")
        object.__setattr__(self, "tie_margin", float(margin))

    def _check_memory(self) -> None:
        memory = self.memory
        if not isinstance(memory, (str, os.PathLike)) or not os.fspath(memory):
            raise InvalidArgumentError(
                f'memory={memory!r} must be "request", "process", or the path of a file to keep the memory in'
            )
        # One wrong letter in "process" must not make a file.
        if isinstance(memory, str) and memory not in MEMORY_SCOPES and _is_word(memory):
            raise InvalidArgumentError(
                f'memory={memory!r} is neither "request" nor "process"; for a file of this name write '
                f"{os.path.join(os.curdir, memory)!r}"
            )

    def _check_owners(self) -> None:
        """Refuse what the preset would not look at."""
        for name, presets in OWNERS.items():
            value, default = getattr(self, name), _default(name)
            if value != default and self.preset not in presets:
                raise InvalidArgumentError(
                    f"{name}={value!r} is about preset {' or '.join(map(repr, presets))}, but the preset is "
                    f"{self.preset!r}, which has no use for it; leave one of the two out"
                )

    def _preset_of_fields(self) -> str:
        """Whoever sets sizes of a method means that method."""
        if self.pool_from_output is not None or any(getattr(self, name) is not None for name in PAPER):
            return "paper"
        if self.max_iterations is not None or any(getattr(self, name) is not None for name in JACOBI):
            return "jacobi"
        return "auto"

    @property
    def chooses_nodes(self) -> bool:
        """Whether the nodes of each step are chosen by what they bring and cost."""
        return self.preset == "auto" and self.step_budget is None

    @property
    def max_nodes(self) -> int:
        """Most nodes that one step may send after the prompt, the root included."""
        if self.preset in BUDGETED:
            return self.step_budget or MOST_CHOSEN_NODES
        if self.preset == "paper":
            return self._max_window_nodes() + self.guess_set_size * (self.ngram_size - 1)
        if self.preset == "jacobi":
            return 1 + self.block_size
        return 1

    def _max_window_nodes(self) -> int:
        """Nodes of the window, the root included, when it is largest; a window of few columns is during warm-up."""
        longest = self.window_size + self.ngram_size - 2
        return max((longest - row) * (row + 1) for row in range(self.ngram_size - 1))

    def _sizes(self) -> str:
        if self.preset in BUDGETED:
            return f"step_budget={self.step_budget}"
        if self.preset == "jacobi":
            return f"block_size={self.block_size}"
        return f"window_size={self.window_size}, ngram_size={self.ngram_size}, guess_set_size={self.guess_set_size}"

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LookaheadConfig:
        """Build a configuration from a dictionary, refusing names that are no field of it."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise InvalidArgumentError(
                    f"{name!r} is no field of LookaheadConfig; it has {', '.join(sorted(known))}"
                )
        return cls(**values)


_WHOLE_NUMBERS: tuple[tuple[str, int, int | None, str], ...] = (
    ("step_budget", 1, MAX_NODES_PER_STEP, "nodes of a step, the root included"),
    ("window_size", 1, MAX_NODES_PER_STEP, "W, the columns of the window"),
    ("ngram_size", 2, MAX_NODES_PER_STEP, "N; an n-gram needs a first token and one that follows it"),
    ("guess_set_size", 1, MAX_NODES_PER_STEP, "G, the n-grams kept for each first token"),
    ("block_size", 1, MAX_NODES_PER_STEP - 1, "the positions that Jacobi decoding guesses at once"),
    ("max_iterations", 1, None, "the steps that a Jacobi block may take"),
    ("seed", 0, None, "the seed of the window's first tokens"),
)
"""Fields that are whole numbers: the least, the most, and what they are."""


def _whole_number(name: str, value: object, least: int, most: int | None, meaning: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidArgumentError(f"{name}={value!r} must be a whole number ({meaning})")
    number = int(value)
    if number < least:
        limit = "" if most is None else f" and at most {most}"
        raise InvalidArgumentError(f"{name}={number} is out of range; it must be at least {least}{limit} ({meaning})")
    if most is not None and number > most:
        raise InvalidArgumentError(
            f"{name}={number} is out of range; it must be at least {least} and at most {most} ({meaning}): "
            "choose a smaller one"
        )
    return number


def _default(name: str) -> object:
    return (PAPER | JACOBI).get(name, getattr(LookaheadConfig, name))


def _is_word(text: str) -> bool:
    """Whether a text has neither folders nor an ending, so that nobody would take it for a file."""
    separators = {os.sep, os.altsep or os.sep, "~"}
    return not separators.intersection(text) and not os.path.splitext(text)[1]
