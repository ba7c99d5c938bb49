"""Models, tasks and methods of a benchmark, and the reader of its file (keys: docs/benchmarks.md)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.errors import InvalidArgumentError
from lookahead.values import read_text, require

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEMO = "demo"
DTYPES = ("float32", "bfloat16", "float16")

_NOT_FOR_METHODS = (
    *("input_ids", "attention_mask", "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p"),
    *("repetition_penalty", "assistant_model", "return_dict_in_generate", "custom_generate", "num_beams"),
)
"""Arguments of `generate` that methods cannot set, as tasks or the benchmark set them."""

_RULES: dict[type, tuple[Callable[[Any, Mapping[str, Any]], bool], str]] = {
    bool: (lambda value, _: isinstance(value, bool), "true or false"),
    int: (
        lambda value, about: type(value) is int and value >= about["minimum"],
        "a whole number of at least {minimum}",
    ),
    float: (
        lambda value, about: type(value) in (int, float) and about["above"] < value <= about["maximum"],
        "a number above {above:g} and at most {maximum:g}",
    ),
    str: (lambda value, about: isinstance(value, str) and value in about.get("choices", [value or None]), "{words}"),
    tuple: (
        lambda value, _: isinstance(value, list) and all(isinstance(text, str) for text in value),
        "a list of texts in quotes",
    ),
    dict: (lambda value, _: isinstance(value, dict), "a table"),
    list: (lambda value, _: isinstance(value, list) and bool(value), "at least one table; begin it with [[{name}]]"),
}
"""Check of a key's value and description of valid values, by the kind of the key."""


def _key(kind: type, default: Any = MISSING, **about: Any) -> Any:
    """Declare a field that is a key of the file; `minimum`, `above`, `maximum` and `choices` limit its values."""
    choices = about.get("choices", ())
    words = f"one of {', '.join(choices)}" if choices else "a text in quotes"
    metadata = {"kind": kind, "minimum": 1, "maximum": float("inf"), "words": words} | about
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelSpec:
    """Model to measure: from a folder, or a Llama with random weights if `path` is `None`."""

    name: str = _key(str)
    path: Path | str | None = _key(str, None)
    random: Mapping[str, Any] = _key(dict, {})
    seed: int = _key(int, 0, minimum=0)
    tokenizer: Path | str | None = _key(str, None)
    dtype: str = _key(str, "float32", choices=DTYPES)
    exact: bool = _key(bool, True)

    def settings(self) -> dict[str, Any]:
        """Settings that affect the figures, except the weights; without local paths."""
        random = {"random": dict(self.random), "seed": self.seed} if self.path is None else {}
        return {"name": self.name, "dtype": self.dtype, "exact": self.exact, **random}


@dataclass(frozen=True)
class SamplingSpec:
    """Sampling arguments of `generate`; prompt n of a task is sampled with seed + n."""

    temperature: float = _key(float, 1.0, above=0)
    top_k: int = _key(int, 0, minimum=0)
    top_p: float = _key(float, 1.0, above=0, maximum=1)
    repetition_penalty: float = _key(float, 1.0, above=0)
    seed: int = _key(int, 0, minimum=0)


@dataclass(frozen=True)
class TaskSpec:
    """Prompts, and settings of their continuation; greedy without `sampling`."""

    name: str = _key(str)
    data: Path = _key(str)
    field: str | None = _key(str, None)
    only: str | None = _key(str, None)
    every: int = _key(int, 1)
    prompts: int | None = _key(int, None)
    max_new_tokens: int = _key(int, 128)
    max_prompt_tokens: int | None = _key(int, None)
    keep: str = _key(str, "end", choices=("end", "beginning"))
    sampling: SamplingSpec | None = _key(dict, None)
    models: tuple[str, ...] | None = _key(tuple, None)

    def settings(self) -> dict[str, Any]:
        """Settings that affect the figures, except the prompts."""
        return {
            "name": self.name,
            "data": self.data.name,
            "max_new_tokens": self.max_new_tokens,
            "max_prompt_tokens": self.max_prompt_tokens,
            "keep": self.keep,
            "sampling": None if self.sampling is None else asdict(self.sampling),
        }


@dataclass(frozen=True)
class MethodSpec:
    """Decoding method: this library, or transformers' own `generate` with further arguments.

    `assistant` is the folder of the draft model for transformers' assisted generation, or `"demo"`.
    """

    name: str = _key(str)
    lookahead: LookaheadConfig | None = _key(dict, None)
    transformers: Mapping[str, Any] = _key(dict, {})
    assistant: Path | str | None = _key(str, None)

    @property
    def is_reference(self) -> bool:
        """Whether this is plain `model.generate`, the reference for all outputs."""
        return self.lookahead is None and not self.transformers and self.assistant is None

    @property
    def has_memory(self) -> bool:
        """Whether the method learns from earlier prompts, so that their order matters."""
        return self.lookahead is not None and self.lookahead.memory != "request"

    def keeps_draws(self, task: TaskSpec) -> bool:
        """Whether the output must equal the reference. With sampling, drafts of transformers change the draws."""
        return task.sampling is None or self.lookahead is not None or self.is_reference

    def settings(self) -> dict[str, Any]:
        """Settings that affect the figures."""
        if self.lookahead is not None:
            return {
                "name": self.name,
                "lookahead": asdict(self.lookahead) | {"sources": []},
            }  # objects, which a file cannot name
        assistant = None if self.assistant is None else Path(self.assistant).name
        return {"name": self.name, "transformers": dict(self.transformers), "assistant": assistant}


@dataclass(frozen=True)
class Suite:
    """Benchmark of every method on every task and model; exactly one method is the reference.

    Attributes:
        models: Models to measure.
        tasks: Tasks with their prompts.
        methods: Methods to compare.
        repeats: Number of passes over the prompts.
        exact: Whether differing outputs are errors; default of the models' own `exact`.
    """

    models: tuple[ModelSpec, ...] = _key(list)
    tasks: tuple[TaskSpec, ...] = _key(list)
    methods: tuple[MethodSpec, ...] = _key(list)
    repeats: int = _key(int, 1)
    exact: bool = _key(bool, True)

    def tasks_of(self, model: ModelSpec) -> list[TaskSpec]:
        """Tasks to measure on a model."""
        return [task for task in self.tasks if task.models is None or model.name in task.models]


def read_suite(path: Path, data: Path | None = None) -> Suite:
    """Read a benchmark from a TOML file; `docs/benchmarks.md` describes the format.

    Args:
        path: TOML file. Paths in it are relative to its folder.
        data: Folder of the prompt files, and a second base folder for models, besides the folder of `path`.

    Raises:
        InvalidArgumentError: The file cannot be read, or a value is invalid; the message names the key.
    """
    try:
        values = tomllib.loads(read_text(path, "the benchmark"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidArgumentError(f"{path} is not a TOML file: {error}") from error
    folder = path.resolve().parent
    root = _arguments(Suite, {"models": [], "tasks": [], "methods": [], **values}, "")
    exact = root.get("exact", True)
    readers: dict[str, Callable[[dict[str, Any], str], Any]] = {
        "models": lambda table, where: _model({"exact": exact, **table}, where, folder, data or folder),
        "tasks": lambda table, where: _task(table, where, data or folder, folder),
        "methods": lambda table, where: _method(table, where, folder),
    }
    for name, read in readers.items():
        specs = [read(table, where) for table, where in _tables(root[name], name)]
        names = [spec.name for spec in specs]
        for number, spec in enumerate(specs):
            if spec.name in names[:number]:
                raise InvalidArgumentError(f"{name}[{number}].name={spec.name!r} occurs twice; give each its own name")
        root[name] = tuple(specs)
    suite = Suite(**root)
    models = {model.name for model in suite.models}
    for task in suite.tasks:
        if not models.issuperset(task.models or ()):
            raise InvalidArgumentError(f"tasks: {task.name!r} has models={list(task.models or ())}; known are {models}")
    references = [method.name for method in suite.methods if method.is_reference]
    if len(references) != 1:
        raise InvalidArgumentError(
            f"methods needs exactly one plain method, transformers = {{}}, to compare the others with; it has "
            f"{', '.join(map(repr, references)) or 'none'}"
        )
    return suite


def _arguments(kind: type, values: Any, where: str) -> dict[str, Any]:
    """Check a table of the file against the fields of `kind`, and return its values."""
    require(isinstance(values, dict), where, values, "must be a table")
    keys = {key.name: key for key in fields(kind)}
    for name, value in values.items():
        path = f"{where}.{name}" if where else name
        if name not in keys:
            raise InvalidArgumentError(f"{path} is not a key of a benchmark; known keys are {', '.join(keys)}")
        about = keys[name].metadata
        is_allowed, words = _RULES[about["kind"]]
        require(is_allowed(value, about), path, value, f"must be {words.format(name=name, **about)}")
    for name, key in keys.items():
        if name not in values and key.default is MISSING and key.default_factory is MISSING:
            raise InvalidArgumentError(f"{where}.{name} is missing")
    return dict(values)


def _tables(tables: list[Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the tables of an array, with their names for errors. A table with `each` becomes one table per entry."""
    for index, table in enumerate(tables):
        where = f"{name}[{index}]"
        require(isinstance(table, dict), where, table, f"must be a table; begin it with [[{name}]]")
        variants = table.pop("each", None)
        if variants is None:
            yield table, where
            continue
        if not isinstance(variants, dict) or not variants or "name" in table:
            raise InvalidArgumentError(f"{where} must have a name, or names and further values in `each`")
        for variant, values in variants.items():
            require(isinstance(values, dict), f"{where}.each.{variant}", values, "must be a table")
            yield _merged({**table, "name": variant}, values), where


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two tables and their nested tables; values of `more` win."""
    inside = {key: _merged(base[key], more[key]) for key in more if isinstance(base.get(key), dict)}
    return {**base, **more, **inside}


def _model(table: dict[str, Any], where: str, *folders: Path) -> ModelSpec:
    arguments = _arguments(ModelSpec, table, where)
    if ("path" in table) == ("random" in table):
        raise InvalidArgumentError(f"{where} must have one of `path` and `random`")
    if "random" in table:
        from transformers import LlamaConfig  # late: the import takes seconds

        allowed = LlamaConfig().to_dict().keys() - {"model_type"}
        if unknown := [name for name in table["random"] if name not in allowed]:
            raise InvalidArgumentError(f"{where}.random.{unknown[0]} is not an argument of LlamaConfig")
    keys = [key for key in ("path", "tokenizer") if key in table]
    sources: dict[str, Any] = {key: _source(table[key], f"{where}.{key}", *folders) for key in keys}
    return ModelSpec(**arguments | sources)


def _source(text: str, where: str, *folders: Path) -> Path | str:
    """Path of a model folder or GGUF file, relative to the first of `folders` that has it; or `DEMO`."""
    paths = [folder / Path(text).expanduser() for folder in folders]
    for path in paths:
        is_tokenizer = where.endswith("tokenizer") and path.is_dir()
        if (path / "config.json").is_file() or is_tokenizer or (path.suffix.lower() == ".gguf" and path.is_file()):
            return path
    if text == DEMO:
        return text
    raise InvalidArgumentError(
        f"{where}={text!r} is not a model folder ({paths[0]} has no config.json); give a path relative to the "
        f'benchmark file or to --data, or "{DEMO}"'
    )


def _task(table: dict[str, Any], where: str, *folders: Path) -> TaskSpec:
    arguments = _arguments(TaskSpec, table, where)
    paths = [folder / Path(table["data"]).expanduser() for folder in folders]
    arguments["data"] = path = next(filter(Path.is_file, paths), paths[0])
    if not path.is_file():
        raise InvalidArgumentError(
            f"{where}.data={table['data']!r}: there is no file {path}; give the folder of the prompts with --data"
        )
    if "sampling" in table:
        sampling = _arguments(SamplingSpec, table["sampling"], f"{where}.sampling")
        floats = {key: float(value) for key, value in sampling.items() if key not in ("top_k", "seed")}
        arguments["sampling"] = SamplingSpec(**sampling | floats)
    return TaskSpec(**arguments | {"models": tuple(table.get("models", ())) or None})


def _method(table: dict[str, Any], where: str, folder: Path) -> MethodSpec:
    arguments = _arguments(MethodSpec, table, where)
    if ("lookahead" in table) == ("transformers" in table):
        raise InvalidArgumentError(
            f"{where} ({table['name']!r}) must have one of `lookahead` (fields of LookaheadConfig) and `transformers` "
            "(arguments of generate)"
        )
    if "lookahead" in table:
        if "assistant" in table:
            raise InvalidArgumentError(f"{where}.assistant applies to methods of transformers only")
        return MethodSpec(table["name"], _lookahead(table["lookahead"], f"{where}.lookahead"))
    for argument in table["transformers"]:
        if argument in _NOT_FOR_METHODS:
            raise InvalidArgumentError(
                f"{where}.transformers.{argument} cannot be set in a method: tasks set lengths and sampling, and "
                "`assistant` names the draft model"
            )
    if "assistant" in table:
        arguments["assistant"] = _source(table["assistant"], f"{where}.assistant", folder)
    return MethodSpec(**arguments)


def _lookahead(values: dict[str, Any], where: str) -> LookaheadConfig:
    """Return the configuration of a method, with a memory of one request unless it names another."""
    try:
        config = LookaheadConfig.from_dict({"memory": "request", **values})
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error
    if config.memory not in MEMORY_SCOPES:
        raise InvalidArgumentError(
            f'{where}.memory={config.memory!r} must be "request" or "process" here: with a file a run would depend on '
            "earlier runs"
        )
    return config
