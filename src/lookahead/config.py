"""Options of lookahead decoding."""
# ruff: noqa: RUF009, as `_choice` makes dataclass fields

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from lookahead.errors import InvalidArgumentError
from lookahead.values import check_path, finite_number, require, whole_number

Preset = Literal[
    "auto", "paper", "jacobi", "token_recycling", "suffix_decoding", "racer", "context_matches", "autoregressive"
]
PRESETS: tuple[Preset, ...] = get_args(Preset)

BUDGETED = ("auto", "token_recycling", "suffix_decoding", "racer", "context_matches")
"""Presets that fill each step up to a number of nodes."""

_MAX_NUMBER = 1_000_000_000
"""Largest factor or size of a method without another limit."""

OWN = "own"
"""Value of `preset` with a user's own `drafter`."""

EngineName = Literal["auto", "dynamic", "static"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

Fallback = Literal["refuse", "plain"]
FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)

MEMORY_SCOPES = ("request", "process")

MAX_NODES_PER_STEP = 4096
"""Largest token tree of a configuration, in nodes; far more than useful on any device."""

_CHOSEN: Any = None  # a default that depends on the other fields

MOST_CHOSEN_NODES = 128
"""Maximum nodes of a step with a measured number of nodes, the root included; more cost their full time."""

_Check = Callable[[str, Any, Mapping[str, Any]], Any]
"""Check of a field's name, value and metadata: refuse the value, or return the value to store."""


def _whole_number(name: str, value: Any, about: Mapping[str, Any]) -> int:
    return whole_number(name, value, about["least"], about["most"], about["meaning"])


def _number(name: str, value: Any, about: Mapping[str, Any]) -> float:
    requirement = f"must be a number from 0 to {_MAX_NUMBER} ({about['meaning']})"
    number = finite_number(name, value, requirement)
    require(0 <= number <= _MAX_NUMBER, name, value, requirement)
    return number


def _that(fits: Callable[[Any], bool], requirement: str) -> _Check:
    """Make a check of a single `requirement`; a field may replace its wording."""

    def check(name: str, value: Any, about: Mapping[str, Any]) -> Any:
        require(fits(value), name, value, about.get("requirement", requirement))
        return value

    return check


_yes_or_no = _that(lambda value: isinstance(value, bool), "must be True or False")
_factory = _that(callable, "must be a class or function that makes a new drafter for each sequence")
_recorder = _that(
    lambda value: callable(getattr(value, "begin", None)),
    "records nothing; pass a lookahead.Trace, as in LookaheadConfig(trace=lookahead.Trace())",
)


def _factories(name: str, value: Any, about: Mapping[str, Any]) -> tuple[Callable[[], Any], ...]:
    are_factories = isinstance(value, (tuple, list)) and all(map(callable, value))
    require(
        are_factories, name, value, "must be a tuple of classes or functions that make a new source for each sequence"
    )
    return tuple(value)


def _one_of_choices(name: str, value: Any, about: Mapping[str, Any]) -> Any:
    is_known = isinstance(value, str) and value in about["choices"]
    require(is_known, name, value, f"is not known; choose one of {', '.join(about['choices'])}")
    return value


def _scope_or_file(name: str, value: Any, about: Mapping[str, Any]) -> Any:
    check_path(name, value, 'must be "request", "process", or the path of a file to keep the memory in')
    # A misspelt "process" must not create a file, so a plain word without folder and suffix is refused.
    marks = {os.sep, os.altsep or os.sep, "~"}.intersection(os.fspath(value))
    if isinstance(value, str) and value not in MEMORY_SCOPES and not (marks or os.path.splitext(value)[1]):
        raise InvalidArgumentError(
            f'{name}={value!r} is neither "request" nor "process"; for a file of this name write '
            f"{os.path.join(os.curdir, value)!r}"
        )
    return value


def _choice(default: Any, check: _Check, **about: Any) -> Any:
    """Declare a field of the configuration.

    Args:
        default: Default value.
        check: Check of given values; a default of `None` is not checked.
        **about: `presets` that use the field, by default all; `chosen`, the value of a field that was not given;
            `least`, `most` and `meaning` of a number; `choices`, or the `requirement` in words. For the command line:
            `help`, which makes the field an option, its `short` name and `metavar`, the default `shown` in the help,
            and `runs`, whether the option concerns running rather than drafting.
    """
    return field(default=default, metadata={"check": check, "presets": PRESETS, "most": None} | about)


def _size(minimum: int, chosen: int | None, preset: str, meaning: str, **about: Any) -> Any:
    """Declare a size of the method of one preset."""
    about = {"most": MAX_NODES_PER_STEP, "chosen": chosen, "least": minimum, "meaning": meaning} | about
    return _choice(None, _whole_number, presets=(preset,), **about)


def _share(chosen: float, preset: str, meaning: str) -> Any:
    """Declare a number of the method of one preset, at least 0."""
    return _choice(_CHOSEN, _number, presets=(preset,), chosen=chosen, meaning=meaning)


@dataclass(frozen=True)
class LookaheadConfig:
    """Options of drafting and of running steps. They change the number of steps, never the generated text.

    Args:
        preset: Drafting method. `"auto"` drafts from an n-gram memory of the model's predictions and from matches in
            the text, with the number of nodes that is fastest. `"paper"` is lookahead decoding as published (2-D window
            and n-gram pool, Algorithm 2), `"jacobi"` is Jacobi decoding (Algorithm 1). `"token_recycling"`
            (arXiv 2408.08696), `"suffix_decoding"` (arXiv 2411.04975) and `"racer"` (arXiv 2604.14885) are published
            by others. `"context_matches"` is our own: `"auto"` with matches in the text only, several in one tree.
            `"autoregressive"` drafts nothing: one token a step. The default follows from the given fields: the method
            of a given size, else `"auto"`. A field of another preset must keep its default.
        step_budget: For `"auto"` and the methods without sizes of the paper: nodes of a step, the root included, at
            least 1. A step has fewer if there are not enough drafts. With `None`, `"auto"` chooses the number with the
            most tokens per second, and the others use 64.
        memory: Lifetime of the n-gram memory of `"auto"`: this `"process"` (all calls with the same model and adapter),
            one `"request"` (a call), or the path of a file. Compare methods with `"request"`: other methods have no
            memory. The file is created if missing and written after each call. A single word is no path: write
            `"./word"`. The file holds token ids and no text.
        window_size: Paper: W, columns of the 2-D window, the number of future positions guessed in parallel
            (section 3.1). 15 if not given, at least 1.
        ngram_size: Paper: N, length of the n-grams in the pool; the window has N-1 rows (section 3.1). 5 if not
            given, at least 2.
        guess_set_size: Paper: G, number of n-grams that the pool keeps for each first token, and so the most candidates
            of a step (section 3.2). The paper suggests G = W. 15 if not given, at least 1.
        pool_from_prompt: Paper: fill the pool with the n-grams of the prompt before the first step (the paper's
            "prompt as reference", Table 3).
        pool_from_output: Paper: fill the pool with the n-grams of the generated text as it grows. `None` follows
            `pool_from_prompt`: the authors' evaluation has both or neither.
        share_pool: Paper: let the rows of one call share one pool, so that each row drafts from the n-grams of all.
        block_size: Jacobi decoding only: m, number of positions guessed at once (Algorithm 1). 16 if not given, at
            least 1.
        max_iterations: Jacobi decoding only: steps after which a block that has not converged is replaced.
            `None` means `block_size`, the most steps that Jacobi iteration can need.
        suffix_factor: Suffix decoding: most drafted tokens for each matching token (section 3). 1 if not given, as in
            the authors' code.
        suffix_offset: Suffix decoding: most drafted tokens besides. 0 if not given.
        suffix_min_probability: Suffix decoding: least relative frequency of a drafted path. 0.1 if not given.
        suffix_depth: Suffix decoding: most tokens of a suffix and its continuation. 64 if not given.
        racer_ngram_size: RACER: tokens of the stored n-grams (section 3). 10 if not given, at least 3.
        racer_breadth: RACER: likeliest tokens kept after each token. 8 if not given.
        racer_capacity: RACER: most nodes of the stored n-grams. 10,000 if not given.
        seed: Seed of the random prompt tokens that the window and the Jacobi blocks start from. It does not affect
            sampling.
        sources: For `"auto"`: classes or functions that make additional sources of drafts, called once for each
            sequence. See `docs/extending.md`.
        drafter: Class or function that makes your own drafter, instead of a preset; called once for each sequence.
            `step_budget` is the most nodes of its drafts, 128 if not given. See `docs/extending.md`.
        pack_weights: On a CPU, keep a second copy of the linear layers' weights in the order of multiplication. A short
            trial decides whether all steps, steps of several tokens, or no steps use it. The trial runs once for each
            kind of model, processor and number of threads. The copy takes as much memory as the weights; it is made at
            the first call and kept with the model. `invariant=True` always uses the copy, so that bits do not depend on
            timing. See `docs/options.md`.
        invariant: Compute each token's logits so that their bits depend only on its own text: not on drafts, nodes of a
            step, other rows, or the splitting of the prompt. The text then equals that of `preset="autoregressive"`
            with the same settings, also in bfloat16 and float16; see `docs/precision.md`. Measured on CPUs. On CUDA
            steps are static for every `engine`, and not yet measured. Unsupported models are refused with the reason.
        engine: Execution of steps. `"dynamic"` sends each step at its own size, which is right on a CPU. `"static"`
            allocates memory for the longest text of the call (`max_length` or `max_new_tokens`: choose them with care),
            pads steps to a few sizes and, on CUDA, captures a graph of each. Buffers and graphs are kept for later
            calls. Long prompts, and models with hooks, adapters or positions that change with the length of the text,
            run dynamically. `"auto"` is dynamic on CPUs and in an `Engine`. On CUDA it is static with growing buffers.
            It captures a size if enough tokens are left to save time, and warns of a model that runs dynamically.
            `Statistics.engine` names the engine of a call.
        fallback: Treatment of models and arguments that are not supported. `"refuse"`: an error. `"plain"`: a
            `LookaheadWarning` with the reason, and decoding by transformers' own `generate`, so that code for many
            models needs no branch. An `Engine` runs an unsupported model without drafts if that is exact. Not allowed
            with `invariant=True`, which plain decoding cannot guarantee.
        compile_in_background: If drafting loops are not compiled yet, as in the first call after an installation, let
            another process compile them, and decode without drafts until then. The text is the same; the number of
            steps is not known in advance. `False`: the call waits for the compilation.
        trace: A `lookahead.Trace`, which records the drafts of every step, their sources, and the accepted tokens; see
            `docs/trace.md`.

    Raises:
        InvalidArgumentError: A value has the wrong type, is out of range, or belongs to another preset.
    """

    preset: Preset = _choice(
        *(_CHOSEN, _one_of_choices),
        choices=PRESETS,
        help=f"Drafting method: {', '.join(PRESETS)}.",
        metavar="NAME",
        label="auto, or the method of the given sizes",
    )
    step_budget: int | None = _choice(
        *(None, _whole_number),
        presets=(*BUDGETED, OWN),
        least=1,
        most=MAX_NODES_PER_STEP,
        meaning="nodes of a step, the root included",
        help="Nodes of every step, the root included.",
        label="the fastest number",
    )
    memory: str | os.PathLike[str] = _choice(
        *("process", _scope_or_file),
        presets=("auto",),
        help="Keep the n-gram memory of the model's predictions in this file, and draft from it.",
        metavar="FILE",
        label="none, start empty each time",
    )
    window_size: int = _size(
        *(1, 15, "paper", "W, the columns of the window"), short="-W", help="Columns of the lookahead window."
    )
    ngram_size: int = _size(
        *(2, 5, "paper", "N; an n-gram needs a first token and one that follows it"),
        short="-N",
        help="Length of the n-grams in the pool.",
    )
    guess_set_size: int = _size(
        *(1, 15, "paper", "G, the n-grams kept for each first token"),
        short="-G",
        help="N-grams kept for each first token, and so the most candidates of a step.",
    )
    pool_from_prompt: bool = _choice(
        *(_CHOSEN, _yes_or_no),
        presets=("paper",),
        chosen=False,
        help="Fill the pool with the n-grams of the prompt first.",
        label="no",
    )
    pool_from_output: bool | None = _choice(
        *(None, _yes_or_no),
        presets=("paper",),
        requirement="must be True, False, or None to follow pool_from_prompt",
        help="Fill the pool with the n-grams of the generated text as well.",
        label="as --pool-from-prompt",
    )
    share_pool: bool = _choice(_CHOSEN, _yes_or_no, presets=("paper",), chosen=False)
    block_size: int = _size(
        1, 16, "jacobi", "the positions that Jacobi decoding guesses at once", most=MAX_NODES_PER_STEP - 1
    )
    max_iterations: int | None = _size(1, None, "jacobi", "the steps that a Jacobi block may take", most=None)
    suffix_factor: float = _share(1.0, "suffix_decoding", "the most drafted tokens for each matching token")
    suffix_offset: float = _share(0.0, "suffix_decoding", "the most drafted tokens besides")
    suffix_min_probability: float = _share(0.1, "suffix_decoding", "the least relative frequency of a drafted path")
    suffix_depth: int = _size(2, 64, "suffix_decoding", "the most tokens of a suffix and its continuation")
    racer_ngram_size: int = _size(3, 10, "racer", "the tokens of the stored n-grams")
    racer_breadth: int = _size(1, 8, "racer", "the likeliest tokens kept after each token")
    racer_capacity: int = _size(1, 10_000, "racer", "the most nodes of the stored n-grams", most=_MAX_NUMBER)
    seed: int = _choice(
        *(0, _whole_number),
        presets=("paper", "jacobi"),
        least=0,
        meaning="the seed of the window's first tokens",
        help="Seed of the window's first tokens.",
    )
    sources: tuple[Callable[[], Any], ...] = _choice((), _factories, presets=("auto",))
    drafter: Callable[[], Any] | None = _choice(None, _factory, presets=(OWN,))
    pack_weights: bool = _choice(
        *(False, _yes_or_no),
        help="On a CPU, keep a second copy of the weights in the order of multiplication, where that is faster.",
        runs=True,
    )
    invariant: bool = _choice(
        *(False, _yes_or_no), help="Compute logits with the same bits whatever else a step holds.", runs=True
    )
    engine: EngineName = _choice("auto", _one_of_choices, choices=ENGINES)
    fallback: Fallback = _choice(
        *("refuse", _one_of_choices),
        choices=FALLBACKS,
        help="If drafts cannot be exact: refuse, or decode without them (plain).",
        metavar="|".join(FALLBACKS),
        runs=True,
    )
    compile_in_background: bool = _choice(
        *(True, _yes_or_no),
        help="Compile drafting loops in the background, and decode without drafts until then; otherwise wait.",
        label="yes",
        runs=True,
    )
    trace: Any = _choice(None, _recorder)

    def __post_init__(self) -> None:
        if self.preset is None:
            object.__setattr__(self, "preset", self._preset_of_fields())
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name == "preset" and value == OWN and self.drafter is not None:
                continue
            if value is None:
                value = spec.metadata.get("chosen")
            if value is not None or spec.default is not None:
                value = spec.metadata["check"](spec.name, value, spec.metadata)
            object.__setattr__(self, spec.name, value)
        if self.preset != "auto" and self.memory == "process":  # other methods keep nothing
            object.__setattr__(self, "memory", "request")
        for spec in fields(self):
            value, presets = getattr(self, spec.name), spec.metadata["presets"]
            is_given = value not in (spec.metadata.get("chosen", spec.default), "request")
            if is_given and presets != PRESETS and self.preset not in presets:
                raise InvalidArgumentError(
                    f"{spec.name}={value!r} applies to preset {' or '.join(map(repr, presets))} only, but the preset "
                    f"is {self.preset!r}; leave one of the two out"
                )
        if self.invariant and self.fallback == "plain":
            raise InvalidArgumentError(
                "fallback='plain' cannot be combined with invariant=True, as plain decoding is not invariant; drop one"
            )
        if self.max_nodes > MAX_NODES_PER_STEP:  # possible although each field is in its range
            raise InvalidArgumentError(
                f"window_size={self.window_size}, ngram_size={self.ngram_size}, guess_set_size={self.guess_set_size} "
                f"ask for up to {self.max_nodes} nodes in one step; the most is {MAX_NODES_PER_STEP}: choose smaller "
                "sizes"
            )

    def _preset_of_fields(self) -> str:
        """Return the method of the given sizes, else `"auto"`."""
        if self.drafter is not None:
            return OWN
        for preset in ("paper", "jacobi", "suffix_decoding", "racer"):
            sizes = [field for field in fields(self) if field.metadata["presets"] == (preset,)]
            if any(getattr(self, field.name) is not None for field in sizes):
                return preset
        return "auto"

    @property
    def chooses_nodes(self) -> bool:
        """Whether the number of nodes of each step is chosen by expected tokens and measured time."""
        return self.preset == "auto" and self.step_budget is None

    @property
    def max_nodes(self) -> int:
        """Most nodes of a step after the prompt, the root included."""
        if self.preset in (*BUDGETED, OWN):
            return self.step_budget or MOST_CHOSEN_NODES
        if self.preset == "paper":
            longest = self.window_size + self.ngram_size - 2
            # A window with few columns is largest during warm-up.
            window = max((longest - row) * (row + 1) for row in range(self.ngram_size - 1))
            return window + self.guess_set_size * (self.ngram_size - 1)
        if self.preset == "jacobi":
            return 1 + self.block_size
        return 1

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LookaheadConfig:
        """Build a configuration from a dictionary of field names and values.

        Raises:
            InvalidArgumentError: A name is no field, or a value is invalid.
        """
        require(isinstance(values, Mapping), "values", values, "must be a dictionary of fields of LookaheadConfig")
        names = {field.name for field in fields(cls)}
        for name in values:
            if name not in names:
                raise InvalidArgumentError(
                    f"{name!r} is no field of LookaheadConfig; it has {', '.join(sorted(names))}"
                )
        return cls(**values)


def check_config(config: object) -> LookaheadConfig:
    """Return the configuration of a call; for `None` the default one.

    Raises:
        InvalidArgumentError: `config` is no `LookaheadConfig`.
    """
    if config is None:
        return LookaheadConfig()
    is_config = isinstance(config, LookaheadConfig)
    require(is_config, "lookahead_config", config, "must be a lookahead.LookaheadConfig, or None for the default one")
    return cast(LookaheadConfig, config)
