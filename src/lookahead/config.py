"""What a user may choose about lookahead decoding."""
# ruff: noqa: RUF009, as `_choice` makes dataclass fields

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast, get_args

from lookahead.errors import InvalidArgumentError
from lookahead.values import check_path, require, whole_number

Preset = Literal["auto", "paper", "jacobi", "token_recycling", "context_matches", "autoregressive"]
PRESETS: tuple[Preset, ...] = get_args(Preset)

BUDGETED = ("auto", "token_recycling", "context_matches")
"""Presets whose steps are filled up to a number of nodes."""

OWN = "own"
"""What `preset` says where a `drafter` of the user's own is given."""

EngineName = Literal["auto", "dynamic", "static"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)

Fallback = Literal["refuse", "plain"]
FALLBACKS: tuple[Fallback, ...] = get_args(Fallback)

MEMORY_SCOPES = ("request", "process")

MAX_NODES_PER_STEP = 4096
"""Largest token tree that a configuration may ask for, in nodes; far above what pays on any device."""

_CHOSEN: Any = None  # a default that depends on the other fields

MOST_CHOSEN_NODES = 128
"""Nodes, the root included, of a step whose number of nodes is chosen by what they bring. On most devices a node
costs its full price from here on."""

_Check = Callable[[str, Any, Mapping[str, Any]], Any]
"""Takes a field's name, value and metadata; refuses the value, or returns what the field is to hold."""


def _whole_number(name: str, value: Any, about: Mapping[str, Any]) -> int:
    return whole_number(name, value, about["least"], about["most"], about["meaning"])


def _that(fits: Callable[[Any], bool], requirement: str) -> _Check:
    """A check of values that have but one `requirement`, which a field may word otherwise."""

    def check(name: str, value: Any, about: Mapping[str, Any]) -> Any:
        require(fits(value), name, value, about.get("requirement", requirement))
        return value

    return check


_yes_or_no = _that(lambda value: isinstance(value, bool), "must be True or False")
_factory = _that(callable, "must be callable and make a new drafter for each sequence: its class, or a function")
_recorder = _that(
    lambda value: callable(getattr(value, "begin", None)),
    "records nothing; give a lookahead.Trace, as in LookaheadConfig(trace=lookahead.Trace())",
)


def _factories(name: str, value: Any, about: Mapping[str, Any]) -> tuple[Callable[[], Any], ...]:
    are_factories = isinstance(value, (tuple, list)) and all(map(callable, value))
    require(
        are_factories,
        name,
        value,
        "must be a tuple of what makes a new source for each sequence: classes, or functions",
    )
    return tuple(value)


def _one_of_choices(name: str, value: Any, about: Mapping[str, Any]) -> Any:
    is_known = isinstance(value, str) and value in about["choices"]
    require(is_known, name, value, f"is not known; choose one of {', '.join(about['choices'])}")
    return value


def _scope_or_file(name: str, value: Any, about: Mapping[str, Any]) -> Any:
    check_path(name, value, 'must be "request", "process", or the path of a file to keep the memory in')
    # One wrong letter in "process" must not make a file; nobody takes a text without folders and ending for one.
    marks = {os.sep, os.altsep or os.sep, "~"}.intersection(os.fspath(value))
    if isinstance(value, str) and value not in MEMORY_SCOPES and not (marks or os.path.splitext(value)[1]):
        raise InvalidArgumentError(
            f'{name}={value!r} is neither "request" nor "process"; for a file of this name write '
            f"{os.path.join(os.curdir, value)!r}"
        )
    return value


def _choice(default: Any, check: _Check, **about: Any) -> Any:
    """A field, with all that is to be known about it.

    Args:
        default: Its default.
        check: What its values have to pass; `None` passes where it is the default.
        **about: `presets`, those that it is about, if not all are; `chosen`, what a field that was not given holds;
            `least`, `most` and `meaning` of a number; `choices`, or the `requirement` in words. For the command line
            `help`, which makes it an option, its `short` name and `metavar`, the default as `shown` in the help,
            and `runs`, whether it is about running rather than drafting.
    """
    return field(default=default, metadata={"check": check, "presets": PRESETS, "most": None} | about)


def _size(least: int, chosen: int | None, preset: str, meaning: str, **about: Any) -> Any:
    """A size in the method of one preset."""
    about = {"most": MAX_NODES_PER_STEP, "chosen": chosen, "least": least, "meaning": meaning} | about
    return _choice(None, _whole_number, presets=(preset,), **about)


@dataclass(frozen=True)
class LookaheadConfig:
    """How tokens are drafted. Nothing in here can change the text that is generated, only the number of steps.

    Args:
        preset: The drafting method. `"auto"` drafts from an n-gram memory of the model's predictions and from matches
            in the text, as many nodes as pay. `"paper"` is lookahead decoding as published (2-D window and n-gram pool,
            Algorithm 2), `"jacobi"` is Jacobi decoding (Algorithm 1), `"token_recycling"` and `"context_matches"` are
            two other published methods, and `"autoregressive"` drafts nothing: one token a step. By default it is the
            method whose sizes are given, else `"auto"`. A field of another preset must keep its default.
        step_budget: For `"auto"`, `"token_recycling"` and `"context_matches"`: nodes of a step, the root included, at
            least 1. Steps are filled up to it as far as there is anything to draft. With `None`, `"auto"` chooses the
            number that gives the most tokens per second, and the others take 64.
        memory: How long the n-gram memory of `"auto"` lives: one `"request"` (a call), this `"process"` (all calls with
            the same model), or a file, given by its path. The file is created if missing and written after each call. A
            single word is no path: write `"./word"`. It holds token ids and no text.
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
        max_iterations: Jacobi decoding only: steps after which a block that has not converged is dropped for a new one.
            `None` means `block_size`, the most that Jacobi iteration can need.
        seed: Seed of the random prompt tokens that the window and the Jacobi blocks start from. It has
            nothing to do with sampling.
        sources: For `"auto"`: what makes more sources of drafts, called once for each sequence. See
            `docs/extending.md`.
        drafter: Makes a drafter of your own, instead of one of the presets; called once for each sequence, so give
            the class, or a function. `step_budget` is the most nodes that it may send, 128 if not given. See
            `docs/extending.md`.
        pack_weights: On a CPU, keep a second copy of the linear layers' weights in the order of multiplication. A short
            trial, once for a kind of model, processor and number of threads, decides whether all steps, those of
            several tokens, or none use it. The copy takes as much memory as the weights; it is made at the first call
            and kept with the model. `invariant=True` always uses it, so that no timing decides bits. See
            `docs/options.md`.
        invariant: Compute each token's logits so that their bits depend on its own text alone, not on drafts, nodes of
            a step, other rows, or how a prompt was split. The text is then that of `preset="autoregressive"` with the
            same settings, also in bfloat16 and float16; see `docs/precision.md`. Measured on CPUs; on CUDA steps are
            static, whatever `engine` says, and not yet measured. A model that cannot be run so is refused with the
            reason.
        engine: How steps run. `"dynamic"` sends each step at its own size, which is right on a CPU. `"static"`
            allocates memory for the longest text of the call (`max_length` or `max_new_tokens`: choose them with care),
            pads steps to a few sizes and, on CUDA, captures a graph of each. Buffers and graphs are kept for later
            calls. Long prompts, and models with hooks, adapters or positions that change with the length of the text,
            run dynamically. `"auto"` is dynamic on CPUs and in an `Engine`. On CUDA it is static with buffers that
            grow, captures a size where enough tokens are left to pay for it, and warns of a model that runs
            dynamically. `Statistics.engine` says which engine ran.
        fallback: What becomes of a model or an argument that is not supported. `"refuse"`: an error. `"plain"`: a
            `LookaheadWarning` that says why, and transformers' own `generate` decodes, so that code for many models
            needs no branch. An `Engine` runs such a model without drafts if that is exact. Not with `invariant=True`,
            which plain decoding does not keep.
        compile_in_background: Where loops of drafting are not compiled yet, as at the first call after an
            installation, have another process compile them, and decode without drafts until then. The text is the same;
            the number of steps is not known beforehand. `False`: the call waits for them.
        trace: A `lookahead.Trace`, which keeps what every step sent, where it came from and what became of it; see
            `docs/trace.md`.

    Raises:
        InvalidArgumentError: A value has the wrong type, is out of its range, or is about another preset.
    """

    preset: Preset = _choice(
        *(_CHOSEN, _one_of_choices),
        choices=PRESETS,
        help=f"Drafting method: {', '.join(PRESETS)}.",
        metavar="NAME",
        shown="auto, or the method whose sizes are given",
    )
    step_budget: int | None = _choice(
        *(None, _whole_number),
        presets=(*BUDGETED, OWN),
        least=1,
        most=MAX_NODES_PER_STEP,
        meaning="nodes of a step, the root included",
        help="Nodes of every step, the root included.",
        shown="as many as pay",
    )
    memory: str | os.PathLike[str] = _choice(
        *("request", _scope_or_file),
        presets=("auto",),
        help="Keep what is learned about the model's predictions in this file, and draft from it.",
        metavar="FILE",
        shown="none, begin anew each time",
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
        help="N-grams kept for each first token, and so most candidates a step.",
    )
    pool_from_prompt: bool = _choice(
        *(_CHOSEN, _yes_or_no),
        presets=("paper",),
        chosen=False,
        help="Fill the pool with the n-grams of the prompt first.",
        shown="no",
    )
    pool_from_output: bool | None = _choice(
        *(None, _yes_or_no),
        presets=("paper",),
        requirement="must be True, False, or None to follow pool_from_prompt",
        help="Fill the pool with the n-grams of the generated text as well.",
        shown="as --pool-from-prompt",
    )
    share_pool: bool = _choice(_CHOSEN, _yes_or_no, presets=("paper",), chosen=False)
    block_size: int = _size(
        1, 16, "jacobi", "the positions that Jacobi decoding guesses at once", most=MAX_NODES_PER_STEP - 1
    )
    max_iterations: int | None = _size(1, None, "jacobi", "the steps that a Jacobi block may take", most=None)
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
        *(False, _yes_or_no), help="Compute logits whose bits do not depend on what else is sent.", runs=True
    )
    engine: EngineName = _choice("auto", _one_of_choices, choices=ENGINES)
    fallback: Fallback = _choice(
        *("refuse", _one_of_choices),
        choices=FALLBACKS,
        help="Where drafts cannot be exact: refuse, or decode without them (plain).",
        metavar="|".join(FALLBACKS),
        runs=True,
    )
    compile_in_background: bool = _choice(
        *(True, _yes_or_no),
        help="Compile drafting loops in the background, and decode without drafts until then; else wait for them.",
        shown="yes",
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
        for spec in fields(self):
            value, presets = getattr(self, spec.name), spec.metadata["presets"]
            is_given = value != spec.metadata.get("chosen", spec.default)
            if is_given and presets != PRESETS and self.preset not in presets:
                raise InvalidArgumentError(
                    f"{spec.name}={value!r} is about preset {' or '.join(map(repr, presets))}, but the preset is "
                    f"{self.preset!r}, which has no use for it; leave one of the two out"
                )
        if self.invariant and self.fallback == "plain":
            raise InvalidArgumentError("fallback='plain' does not keep what invariant=True promises; drop one of them")
        if self.max_nodes > MAX_NODES_PER_STEP:  # which the bounds of single fields do not see to
            raise InvalidArgumentError(
                f"window_size={self.window_size}, ngram_size={self.ngram_size}, guess_set_size={self.guess_set_size} "
                f"ask for up to {self.max_nodes} nodes in one step; the most is {MAX_NODES_PER_STEP}: choose smaller "
                "sizes"
            )

    def _preset_of_fields(self) -> str:
        """Whoever sets sizes of a method means that method."""
        if self.drafter is not None:
            return OWN
        for preset in ("paper", "jacobi"):
            sizes = [field for field in fields(self) if field.metadata["presets"] == (preset,)]
            if any(getattr(self, field.name) is not None for field in sizes):
                return preset
        return "auto"

    @property
    def chooses_nodes(self) -> bool:
        """Whether the nodes of each step are chosen by what they bring and cost."""
        return self.preset == "auto" and self.step_budget is None

    @property
    def max_nodes(self) -> int:
        """Most nodes that one step may send after the prompt, the root included."""
        if self.preset in (*BUDGETED, OWN):
            return self.step_budget or MOST_CHOSEN_NODES
        if self.preset == "paper":
            longest = self.window_size + self.ngram_size - 2
            # of few columns a window is largest while it is warmed up
            window = max((longest - row) * (row + 1) for row in range(self.ngram_size - 1))
            return window + self.guess_set_size * (self.ngram_size - 1)
        if self.preset == "jacobi":
            return 1 + self.block_size
        return 1

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LookaheadConfig:
        """Build a configuration from a dictionary, refusing names that are no field of it."""
        require(isinstance(values, Mapping), "values", values, "must be a dictionary of fields of LookaheadConfig")
        names = {field.name for field in fields(cls)}
        for name in values:
            if name not in names:
                raise InvalidArgumentError(
                    f"{name!r} is no field of LookaheadConfig; it has {', '.join(sorted(names))}"
                )
        return cls(**values)


_DEFAULT = LookaheadConfig()


def check_config(config: object) -> LookaheadConfig:
    """The configuration of a call; the default one for `None`.

    Raises:
        InvalidArgumentError: It is no `LookaheadConfig`.
    """
    if config is None:
        return _DEFAULT
    is_config = isinstance(config, LookaheadConfig)
    require(is_config, "lookahead_config", config, "must be a lookahead.LookaheadConfig, or None for the default one")
    return cast(LookaheadConfig, config)
