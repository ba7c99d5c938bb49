"""What a benchmark consists of: models, tasks and methods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lookahead.config import LookaheadConfig

DTYPES = ("float32", "bfloat16", "float16")

_LATER_OPTIONS = ("drafter", "sources", "invariant", "trace")
"""Options of drafting that there have not always been: rows name them only where they are set, so that older rows stay
those of the same method."""


@dataclass(frozen=True)
class ModelSpec:
    """A model to measure on.

    Attributes:
        name: What to call it.
        path: Folder of the model, `"demo"` for the one that comes with the package, `None` for a random one.
        random: Of a model with random weights: arguments of its configuration, and its `model_type` if it is no Llama.
        seed: Of a model with random weights: what they are drawn with.
        tokenizer: Folder of the tokenizer, or `"demo"`; `None` for the one in `path`.
        dtype: Name of the type of the weights.
        exact: Whether an output that differs is an error; in float32 it is one, in shorter types rounding decides.
    """

    name: str
    path: Path | str | None
    random: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    tokenizer: Path | str | None = None
    dtype: str = "float32"
    exact: bool = True

    def settings(self) -> dict[str, Any]:
        """What the measured figures depend on, but for the weights; no path of this machine."""
        made = {"random": dict(self.random), "seed": self.seed} if self.path is None else {}
        return {"name": self.name, "dtype": self.dtype, "exact": self.exact, **made}


@dataclass(frozen=True)
class SamplingSpec:
    """How tokens are sampled.

    Attributes:
        temperature: Divides the logits.
        top_k: Sample from this many of the likeliest tokens, 0 for all.
        top_p: Sample from the likeliest tokens that together are at least this probable.
        repetition_penalty: Divides the logits of tokens that the text has already, 1 for none.
        seed: The draws after the prompt number n of a task, counted from 0, are those of seed + n.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def settings(self) -> dict[str, Any]:
        """What the draws depend on; what older results do not name is left out where it changes nothing."""
        penalty = {"repetition_penalty": self.repetition_penalty} if self.repetition_penalty != 1 else {}
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, **penalty, "seed": self.seed}


@dataclass(frozen=True)
class TaskSpec:
    """Prompts, and how to go on from them.

    Attributes:
        name: What to call it.
        data: JSON lines, one prompt each.
        field: Where in a line the prompt is; `None` for `prompt`, or the first of `turns`.
        only: Take only the prompts whose `task` in the file is this, or begins with this and a slash.
        every: Take only every so many-th of these: 1 for all, 2 for the first, third, ...
        prompts: Take only the first so many of these, `None` for all.
        max_new_tokens: Most tokens to generate.
        max_prompt_tokens: Cut longer prompts, `None` for what the model has room for.
        keep: Which part of a prompt that is cut stays, `"end"` or `"beginning"`.
        sampling: How tokens are sampled, `None` for greedy decoding.
        models: Names of the models to measure on, `None` for all.
    """

    name: str
    data: Path
    field: str | None = None
    only: str | None = None
    every: int = 1
    prompts: int | None = None
    max_new_tokens: int = 128
    max_prompt_tokens: int | None = None
    keep: str = "end"
    sampling: SamplingSpec | None = None
    models: tuple[str, ...] | None = None

    def settings(self) -> dict[str, Any]:
        """What the measured figures depend on, but for the prompts themselves."""
        return {
            "name": self.name,
            "data": self.data.name,
            "max_new_tokens": self.max_new_tokens,
            "max_prompt_tokens": self.max_prompt_tokens,
            "keep": self.keep,
            "sampling": None if self.sampling is None else self.sampling.settings(),
        }


@dataclass(frozen=True)
class MethodSpec:
    """A way to decode: with this library, or with transformers' own `generate`.

    Attributes:
        name: What to call it.
        lookahead: How this library drafts, `None` for transformers.
        transformers: Further arguments of `model.generate`.
        assistant: Folder of the model that drafts for transformers' assisted generation, or `"demo"`.
    """

    name: str
    lookahead: LookaheadConfig | None = None
    transformers: Mapping[str, Any] = field(default_factory=dict)
    assistant: Path | str | None = None

    @property
    def is_reference(self) -> bool:
        """Whether this is plain `model.generate`, whose output all others must equal."""
        return self.lookahead is None and not self.transformers and self.assistant is None

    @property
    def has_memory(self) -> bool:
        """Whether it carries what it learned from prompt to prompt, so that prompts have to come in order."""
        return self.lookahead is not None and self.lookahead.memory != "request"

    def keeps_draws(self, task: TaskSpec) -> bool:
        """Whether it promises the reference's very tokens; transformers' drafting methods draw in another way."""
        return task.sampling is None or self.lookahead is not None or self.is_reference

    def settings(self) -> dict[str, Any]:
        """What the measured figures depend on."""
        if self.lookahead is not None:
            options = {**asdict(self.lookahead), "memory": str(self.lookahead.memory)}
            chosen = {name: value for name, value in options.items() if value or name not in _LATER_OPTIONS}
            return {"name": self.name, "lookahead": chosen}
        assistant = None if self.assistant is None else Path(self.assistant).name
        return {"name": self.name, "transformers": dict(self.transformers), "assistant": assistant}


@dataclass(frozen=True)
class Suite:
    """A benchmark: every method on every task on every model.

    Attributes:
        models: The models.
        tasks: The tasks.
        methods: The methods; exactly one is the reference.
        repeats: How often everything is measured.
    """

    models: tuple[ModelSpec, ...]
    tasks: tuple[TaskSpec, ...]
    methods: tuple[MethodSpec, ...]
    repeats: int = 1

    def tasks_of(self, model: ModelSpec) -> list[TaskSpec]:
        """The tasks to measure on a model."""
        return [task for task in self.tasks if task.models is None or model.name in task.models]

    @property
    def reference(self) -> MethodSpec:
        """Plain `model.generate`."""
        return next(method for method in self.methods if method.is_reference)
