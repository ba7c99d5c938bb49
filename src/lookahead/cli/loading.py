"""Loading a model from a local folder, quietly and never from the network."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from lookahead.backends.base import Recorded
from lookahead.backends.llama_cpp.model import load_gguf
from lookahead.backends.session import open_session
from lookahead.cli import process
from lookahead.cli.inputs import is_gguf, model_folder
from lookahead.cli.rendering import spinner
from lookahead.cli.settings import BatchSettings, ModelSettings, ServeSettings, TextSettings
from lookahead.config import LookaheadConfig
from lookahead.core.compiled import on_first_compilation
from lookahead.drafting.warm_up import compile_loops
from lookahead.errors import InvalidArgumentError, LookaheadError, LookaheadWarning


class StartUp:
    """The phases of a start, in their order.

    Args:
        notes: Where to say what goes on; nothing is said without.

    Attributes:
        seconds: Wall time of each phase.
    """

    def __init__(self, notes: Console | None = None) -> None:
        self._notes = Console(quiet=True) if notes is None else notes
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show the name of a phase on a terminal until it is over."""
        start = perf_counter()
        with spinner(self._notes, name):
            yield
        self.seconds[name] = perf_counter() - start

    def tell(self, *graphs: Recorded) -> None:
        """Name all phases and their seconds on a terminal, and what capturing the `graphs` of engines took."""
        if self._notes.is_terminal:
            parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in self.seconds.items())
            self._notes.print(f"started in {sum(self.seconds.values()):.2f} s ({parts})", style="dim")
        for taken in graphs:
            if taken.count:
                told = f"{taken.count} CUDA graphs captured in {taken.seconds:.1f} s, {taken.bytes >> 20} MiB"
                self._notes.print(told, style="dim")

    def compile_drafting(self) -> None:
        """Have the drafting loops compiled before anything is timed; says so where none are kept from earlier."""
        announce = "compiling the drafting loops (once)"
        with self.phase("compilation"), on_first_compilation(lambda: self._notes.print(announce)):
            compile_loops()

    def check(self, model: PreTrainedModel) -> None:
        """Check the model, as its first call would.

        Raises:
            UnsupportedModelError: It cannot be run.
        """
        with self.phase("model check"):
            open_session(model).check()

    def prepare(self, model: PreTrainedModel, config: LookaheadConfig) -> None:
        """Make the module that runs the model, as its first call would, and try it.

        Raises:
            LookaheadError: The model cannot be run as `config` has it.
        """
        with self.engine(config):
            open_session(model).prepare(config)

    def engine(self, config: LookaheadConfig) -> AbstractContextManager[None]:
        """The phase in which what runs a model is made; most of it are trials where passes are to be invariant."""
        return self.phase("invariance trials" if config.invariant else "engine")


_SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that a model may ship for sampling; they have no place in greedy decoding."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes:
        path: The folder it came from.
        model: The model, set to greedy decoding.
        tokenizer: Its tokenizer.
        sampling: What its own generation configuration says about sampling.
        processor: Makes inputs of images, if the model sees any.
        start_up: What was done before it could be used.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: dict[str, Any] = field(default_factory=dict)
    processor: Any = None
    start_up: StartUp = field(default_factory=StartUp)

    @property
    def context_length(self) -> int | None:
        """Most positions the model knows, `None` when its configuration names no limit."""
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return length if isinstance(length, int) and length > 0 else None

    @property
    def fixed_positions(self) -> int | None:
        """Longest text that reads every token as a shorter one did; `None` if no length changes how tokens are read.

        Long and dynamic RoPE turn all tokens of a longer text by other angles.
        """
        config = self.model.config.get_text_config()
        rope = getattr(config, "rope_parameters", None) or {}
        kinds = [kind for kind in (rope, *rope.values()) if isinstance(kind, dict) and "rope_type" in kind]
        lengths = [
            kind.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or self.context_length
            for kind in kinds
            if kind["rope_type"] == "longrope" or "dynamic" in str(kind["rope_type"])
        ]
        return min((length for length in lengths if length), default=None)

    @property
    def dtype(self) -> str:
        """Name of the type the model runs in; of a GGUF file, the types of its weights."""
        return open_session(self.model).number_type


def load_model(settings: ModelSettings, notes: Console) -> LoadedModel:
    """Load the model that the settings name; a spinner shows that something happens."""
    device = check_device(settings.device)
    path = model_folder(settings.model)
    if isinstance(settings, TextSettings) and not is_gguf(path):
        _check_options(path, settings)
    memory = memory_errors_explained(
        f"on {device} while loading the model", "--dtype bfloat16, a smaller model or another --device"
    )
    with spinner(notes, f"loading {path.resolve().name}"), memory:
        if is_gguf(path):
            return _load_gguf(path, settings)
        return _load(path, settings, device, notes)


def _check_options(path: Path, settings: TextSettings) -> None:
    """Refuse options that are about GGUF models, for a model of transformers.

    Raises:
        InvalidArgumentError: There is one.
    """
    for option, given in (("--gpu-layers", settings.gpu_layers), ("--fast-kv", settings.fast_kv)):
        if given:
            value = "" if given is True else f" {given}"
            raise InvalidArgumentError(
                f"{option}{value} is about GGUF models, but --model {path} is a folder; leave {option} out"
            )


def with_adapter(loaded: LoadedModel, path: Path) -> LoadedModel:
    """A model with a LoRA adapter: an object of its own that shares the weights of `loaded`.

    Raises:
        InvalidArgumentError: The adapter cannot be loaded.
        UnsupportedModelError: The model cannot be run with it.
    """
    if find_spec("peft") is None:
        raise InvalidArgumentError(f"--lora {path} needs peft, which is not installed: pip install peft")
    if is_gguf(loaded.path):
        raise InvalidArgumentError(
            f"--lora {path} is about models of transformers; --model {loaded.path} is a GGUF file"
        )
    model = open_session(loaded.model).sharing_weights()
    try:
        model.load_adapter(str(path))
    except Exception as error:  # whatever a broken or foreign adapter makes peft raise
        raise InvalidArgumentError(f"--lora {path}: cannot be loaded: {summary(error)}") from error
    loaded.start_up.check(model)
    return replace(loaded, model=model)


def load_for_decoding(settings: TextSettings, notes: Console) -> LoadedModel:
    """Load and check the model, compile what drafts for it, and let Ctrl-C raise: from here on there is something to
    show. On a terminal one line says how long each part took; where an `Engine` is to be made, that says it."""
    start_up, start = StartUp(notes), perf_counter()
    loaded = replace(load_model(settings, notes), start_up=start_up)
    start_up.seconds["loading"] = perf_counter() - start
    makes_engine = isinstance(settings, (BatchSettings, ServeSettings))
    with memory_errors_explained(f"on {loaded.model.device} while preparing the model", "a smaller model"):
        start_up.check(loaded.model)
        if not makes_engine:
            start_up.prepare(loaded.model, settings.config)
    start_up.compile_drafting()
    if not makes_engine:
        start_up.tell()
    process.raise_on_interrupt()
    return loaded


def check_device(name: str | None) -> torch.device:
    """The device called `name`, or the best one there is; refuses what this machine does not have."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InvalidArgumentError(f"--device {name} is not known; choose {_choices()}") from None
    counts = _device_counts()
    if counts.get(device.type, 0) == 0:
        raise InvalidArgumentError(f"--device {name} is not available here; choose {_choices()}")
    if (device.index or 0) >= counts[device.type]:
        raise InvalidArgumentError(
            f"--device {name} is not available here (devices of type {device.type}: {counts[device.type]}, "
            f"counted from 0); choose {_choices()}"
        )
    return device


def _device_counts() -> dict[str, int]:
    return {
        "cpu": 1,
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "xpu": torch.xpu.device_count() if torch.xpu.is_available() else 0,
    }


def _choices() -> str:
    names = []
    for kind, count in _device_counts().items():
        names += [kind] if count == 1 else [f"{kind}:{index}" for index in range(count)]
    return " or ".join(names)


def _load(path: Path, settings: ModelSettings, device: torch.device, notes: Console) -> LoadedModel:
    # trust_remote_code=False refuses a model that brings its own code instead of asking at the terminal.
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **local)
        sees = type(AutoConfig.from_pretrained(path, **local)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        processor = AutoProcessor.from_pretrained(path, **local) if sees else None
        model, report = kind.from_pretrained(
            path, dtype=settings.dtype, output_loading_info=True, ignore_mismatched_sizes=True, **local
        )
    except Exception as error:  # whatever a broken file makes transformers raise
        if is_out_of_memory(error):
            raise
        raise InvalidArgumentError(f"--model {path}: cannot be loaded: {summary(error)}") from error
    _check_shapes(path, report["mismatched_keys"])
    _check_token_ids(path, model.generation_config)
    _check_missing(path, sorted(report["missing_keys"]), settings.allow_missing, notes)
    shipped = {flag: getattr(model.generation_config, flag, None) for flag in _SAMPLING_FLAGS}
    for flag in (*_SAMPLING_FLAGS, "num_beams"):
        setattr(model.generation_config, flag, None)
    model.generation_config.do_sample = False
    sampling = {flag: value for flag, value in shipped.items() if value is not None}
    return LoadedModel(path, model.to(device), tokenizer, sampling, processor)


def _load_gguf(path: Path, settings: ModelSettings) -> LoadedModel:
    if not isinstance(settings, TextSettings):
        raise InvalidArgumentError(
            f"--model {path}: tune measures models of transformers; what a step of a GGUF model costs is learned as it "
            "runs"
        )
    if settings.dtype not in ("auto", "float32"):
        raise InvalidArgumentError(
            f"--dtype {settings.dtype} is about models of transformers; the weights of a GGUF file have types of their "
            "own"
        )
    if settings.device not in (None, "cpu"):
        raise InvalidArgumentError(
            f"--device {settings.device} is about models of transformers; --gpu-layers puts layers of a GGUF on a GPU"
        )
    model = load_gguf(path, n_gpu_layers=settings.gpu_layers, fast_kv=settings.fast_kv)
    return LoadedModel(path, model, model.tokenizer)


def _check_shapes(path: Path, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse weights of other shapes than `config.json` says; transformers would put random ones in their place."""
    if not mismatched:
        return
    name, stored, expected = min(mismatched)
    more = f", and {len(mismatched) - 1} more tensors" if len(mismatched) > 1 else ""
    raise InvalidArgumentError(
        f"--model {path}: config.json does not fit the weights: {name} has the shape {tuple(stored)} in the weights, "
        f"but {tuple(expected)} by the sizes in config.json{more}; correct the sizes"
    )


def _check_missing(path: Path, missing: Sequence[str], allowed: bool, notes: Console) -> None:
    """Refuse a model that lacks weights, for which transformers has put random ones in, unless that is allowed."""
    if not missing:
        return
    lacks = f"--model {path}: lacks {len(missing)} weights ({missing[0]}{', …' if len(missing) > 1 else ''})"
    if not allowed:
        raise InvalidArgumentError(f"{lacks}; copy the model again, or add --allow-missing to start them at random")
    notes.print(f"note: {lacks}, which start at random")


def _check_token_ids(path: Path, generation_config: GenerationConfig) -> None:
    for field_name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(generation_config, field_name)
        several = field_name == "eos_token_id" and isinstance(value, list)
        if not all(isinstance(token, int) for token in (value if several else [value]) if token is not None):
            files = [name for name in ("generation_config.json", "config.json") if (path / name).exists()]
            what = "a token id or a list of token ids" if field_name == "eos_token_id" else "a token id"
            raise InvalidArgumentError(f"--model {path}: {files[0]}: {field_name}={value!r} must be {what}")


def summary(error: Exception) -> str:
    """An error of another library on one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep warnings, logs and progress bars of the libraries below off the terminal for a while.

    What this library itself warns of is said in one line on standard error.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", LookaheadWarning)
            warnings.showwarning = _say_warning
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _say_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    print("warning:", " ".join(str(message).split()), file=sys.stderr)


class OutOfMemoryError(LookaheadError):
    """The device has no memory left for what was asked."""


@contextmanager
def memory_errors_explained(where: str, advice: str) -> Iterator[None]:
    """Turn running out of memory into an `OutOfMemoryError` that says what to try."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"tried to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        detail = f" (tried to allocate {asked[1]})" if asked else ""
        raise OutOfMemoryError(f"out of memory {where}{detail}: try {advice}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or the machine itself, has no memory left; torch has no type of error for some of them."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)
