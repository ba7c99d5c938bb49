"""The file that describes a benchmark, and what can be wrong with it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lookahead.bench.suite import DTYPES, MethodSpec, ModelSpec, SamplingSpec, Suite, TaskSpec
from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.errors import InvalidArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEMO = "demo"

_NOT_FOR_METHODS = (
    *("input_ids", "attention_mask", "max_new_tokens", "max_length", "do_sample", "temperature", "top_k", "top_p"),
    *("repetition_penalty", "assistant_model", "return_dict_in_generate", "custom_generate", "num_beams"),
)
"""Arguments of `generate` that tasks decide about, or that are set here."""

_Named = TypeVar("_Named", ModelSpec, TaskSpec, MethodSpec)


class Table:
    """One table of the file; reading a key takes it out, so that what is left in the end is not known.

    Attributes:
        where: How errors call it.
        values: What was not taken yet.
    """

    def __init__(self, values: object, where: str) -> None:
        if not isinstance(values, dict):
            raise InvalidArgumentError(f"{where}={values!r} must be a table")
        self.where = where
        self.values: dict[str, Any] = dict(values)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def key(self, name: str) -> str:
        """The key as errors call it."""
        return f"{self.where}.{name}" if self.where else name

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key, whatever it is."""
        self._known.append(name)
        return self.values.pop(name, default)

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string that is not empty."""
        value = self.take(name, default)
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidArgumentError(f"{self.key(name)}={value!r} must be a text in quotes")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; an empty one if there is none."""
        values = self.take(name, [])
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise InvalidArgumentError(f"{self.key(name)}={values!r} must be a list of texts in quotes")
        return values

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """One of several strings."""
        value = self.take(name, default)
        if value not in choices:
            raise InvalidArgumentError(f"{self.key(name)}={value!r} is not known; choose one of {', '.join(choices)}")
        return str(value)

    def count(self, name: str, default: int | None, least: int = 1) -> int | None:
        """A whole number."""
        value = self.take(name, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise InvalidArgumentError(f"{self.key(name)}={value!r} must be a whole number of at least {least}")
        return value

    def number(self, name: str, default: float, above: float, most: float = float("inf")) -> float:
        """A number between two others, the smaller one excluded."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not above < value <= most:
            limit = "" if most == float("inf") else f" and at most {most:g}"
            raise InvalidArgumentError(f"{self.key(name)}={value!r} must be a number above {above:g}{limit}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{self.key(name)}={value!r} must be true or false")
        return value

    def finish(self) -> None:
        """Refuse the keys that nobody asked for."""
        for name in self.values:
            raise InvalidArgumentError(f"{self.key(name)} is no key of a benchmark; known are {', '.join(self._known)}")


def read_suite(path: Path, data: Path | None = None) -> Suite:
    """The benchmark that a TOML file describes; `docs/benchmarks.md` has the format.

    Args:
        path: The file. Paths in it are relative to its folder.
        data: Folder of the prompt files, if it is not that of `path`; models are looked for from there as well.

    Raises:
        InvalidArgumentError: The file cannot be read, or something in it is wrong; the message names the key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"cannot read the benchmark {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is no TOML file: {error}") from error
    folder = path.resolve().parent
    root = Table(values, "")
    exact = root.flag("exact", True)
    suite = Suite(
        repeats=root.count("repeats", 1) or 1,
        models=_named(root, "models", lambda table: _model(table, (folder, data or folder), exact)),
        tasks=_named(root, "tasks", lambda table: _task(table, folder if data is None else data)),
        methods=_named(root, "methods", lambda table: _method(table, folder)),
    )
    root.finish()
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


def _named(root: Table, name: str, read: Callable[[Table], _Named]) -> tuple[_Named, ...]:
    """The tables of one array, each with a name of its own."""
    tables = root.take(name)
    if not isinstance(tables, list) or not tables:
        raise InvalidArgumentError(f"{name} must hold at least one table: begin it with [[{name}]]")
    found: list[_Named] = []
    for table in (one for index, values in enumerate(tables) for one in _each(Table(values, f"{name}[{index}]"))):
        spec = read(table)
        table.finish()
        if spec.name in [other.name for other in found]:
            raise InvalidArgumentError(f"{table.key('name')}={spec.name!r} is there twice; give each its own")
        found.append(spec)
    return tuple(found)


def _each(table: Table) -> list[Table]:
    """The table, or those that its `each` makes of it: by name, what they have besides."""
    if "each" not in table:
        return [table]
    variants = Table(table.take("each"), table.key("each")).values
    if not variants or "name" in table:
        raise InvalidArgumentError(f"{table.where} must have a name, or names and further values in `each`")
    return [
        Table(_merged({**table.values, "name": name}, Table(values, f"{table.key('each')}.{name}").values), table.where)
        for name, values in variants.items()
    ]


def _merged(base: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both, tables inside of them as well."""
    found = dict(base)
    for key, value in more.items():
        inside = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = _merged(found[key], value) if inside else value
    return found


def _name(table: Table) -> str:
    name = table.text("name")
    if name is None:
        raise InvalidArgumentError(f"{table.key('name')} is missing; tables and plots need it")
    return name


def _source(table: Table, key: str, *folders: Path) -> Path | str | None:
    """A folder of a model, or a GGUF file, seen from the first of `folders` that has it; or the demonstration model."""
    text = table.text(key)
    if text is None or text == DEMO:
        return text
    paths = [folder / Path(text).expanduser() for folder in folders]
    for path in paths:
        if (path / "config.json").is_file() or (key == "tokenizer" and path.is_dir()):
            return path
        if key == "path" and path.suffix.lower() == ".gguf" and path.is_file():
            return path
    raise InvalidArgumentError(
        f"{table.key(key)}={text!r} is no model folder ({paths[0]} has no config.json); give the path of one, seen "
        f'from the benchmark file or from --data, or "{DEMO}"'
    )


def _model(table: Table, folders: tuple[Path, Path], exact: bool) -> ModelSpec:
    name = _name(table)
    if ("path" in table) == ("random" in table):
        raise InvalidArgumentError(f"{table.where} must have one of `path` and `random`")
    return ModelSpec(
        name=name,
        path=_source(table, "path", *folders),
        random=_random(Table(table.take("random", {}), table.key("random"))),
        seed=table.count("seed", 0, 0) or 0,
        tokenizer=_source(table, "tokenizer", *folders),
        dtype=table.choice("dtype", DTYPES, "float32"),
        exact=table.flag("exact", exact),
    )


def _random(table: Table) -> dict[str, Any]:
    from transformers import LlamaConfig  # late: it takes seconds, and what is wrong with a suite is said before

    arguments = LlamaConfig().to_dict()
    for name in table.values:
        if name not in arguments:
            raise InvalidArgumentError(f"{table.key(name)} is no argument of LlamaConfig, of which the model is made")
    return table.values


def _task(table: Table, folder: Path) -> TaskSpec:
    name = _name(table)
    data = table.text("data")
    if data is None:
        raise InvalidArgumentError(f"{table.key('data')} is missing; name the file with the prompts")
    path = folder / Path(data).expanduser()
    if not path.is_file():
        raise InvalidArgumentError(
            f"{table.key('data')}={data!r}: there is no file {path}; say with --data in which folder the prompts are"
        )
    sampling = _sampling(Table(table.take("sampling"), table.key("sampling"))) if "sampling" in table else None
    return TaskSpec(
        name=name,
        data=path,
        field=table.text("field"),
        only=table.text("only"),
        every=table.count("every", TaskSpec.every) or TaskSpec.every,
        prompts=table.count("prompts", None),
        max_new_tokens=table.count("max_new_tokens", TaskSpec.max_new_tokens) or TaskSpec.max_new_tokens,
        max_prompt_tokens=table.count("max_prompt_tokens", None),
        keep=table.choice("keep", ("end", "beginning"), TaskSpec.keep),
        sampling=sampling,
        models=tuple(table.texts("models")) or None,
    )


def _sampling(table: Table) -> SamplingSpec:
    spec = SamplingSpec(
        temperature=table.number("temperature", SamplingSpec.temperature, above=0),
        top_k=table.count("top_k", SamplingSpec.top_k, 0) or 0,
        top_p=table.number("top_p", SamplingSpec.top_p, above=0, most=1),
        repetition_penalty=table.number("repetition_penalty", SamplingSpec.repetition_penalty, above=0),
        seed=table.count("seed", SamplingSpec.seed, 0) or 0,
    )
    table.finish()
    return spec


def _method(table: Table, folder: Path) -> MethodSpec:
    name = _name(table)
    if ("lookahead" in table) == ("transformers" in table):
        raise InvalidArgumentError(
            f"{table.where} ({name!r}) must have one of `lookahead` (fields of LookaheadConfig) and `transformers` "
            "(arguments of generate)"
        )
    if "lookahead" in table:
        return MethodSpec(name, lookahead=_lookahead(table.take("lookahead"), table.key("lookahead")))
    arguments = Table(table.take("transformers"), table.key("transformers")).values
    for argument in arguments:
        if argument in _NOT_FOR_METHODS:
            raise InvalidArgumentError(
                f"{table.key('transformers')}.{argument} is not for a method to set: tasks say how much and how to "
                "generate, and `assistant` names the model that drafts"
            )
    return MethodSpec(name, transformers=arguments, assistant=_source(table, "assistant", folder))


def _lookahead(values: object, where: str) -> LookaheadConfig:
    try:
        config = LookaheadConfig.from_dict(Table(values, where).values)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"{where}: {error}") from error
    if config.memory not in MEMORY_SCOPES:
        raise InvalidArgumentError(
            f'{where}.memory={config.memory!r} must be "request" or "process" here: with a file a run would depend on '
            "those before it"
        )
    return config
