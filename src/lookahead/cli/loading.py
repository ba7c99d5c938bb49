"""Loading a model from a local folder, quietly and never from the network."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
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

from lookahead.backends.llama_cpp.model import load_gguf
from lookahead.backends.session import open_session
from lookahead.backends.transformers.limits import Limits
from lookahead.cli import process
from lookahead.cli.inputs import is_gguf, model_folder
from lookahead.cli.rendering import spinner
from lookahead.cli.settings import BatchSettings, ModelSettings, ServeSettings, TextSettings
from lookahead.core.compiled import on_first_compilation
from lookahead.drafting.warm_up import compile_loops
from lookahead.errors import InvalidArgumentError, LookaheadError, LookaheadWarning


def compile_drafting(notes: Console) -> None:
    """Have the drafting loops compiled before anything is timed; says so where none are kept from earlier."""
    announce = "compiling the drafting loops (once)"
    with spinner(notes, "compiling"), on_first_compilation(lambda: notes.print(announce)):
        compile_loops()


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
    """

    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: dict[str, Any] = field(default_factory=dict)
    processor: Any = None

    @property
    def context_length(self) -> int | None:
        """Most positions the model knows, `None` when its configuration names no limit."""
        return Limits(self.model.config).context

    @property
    def fixed_positions(self) -> int | None:
        """Longest text that reads every token as a shorter one did; `None` if no length changes how tokens are read."""
        return Limits(self.model.config).changes_after

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
    open_session(model).check()
    return replace(loaded, model=model)


def load_for_decoding(settings: TextSettings, notes: Console) -> LoadedModel:
    """Load and check the model, compile what drafts for it, and let Ctrl-C raise: from here on there is something to
    show. Where no `Engine` is to be made, what runs the model is made as well, as its first call would."""
    loaded = load_model(settings, notes)
    session = open_session(loaded.model)
    memory = memory_errors_explained(f"on {loaded.model.device} while preparing the model", "a smaller model")
    with memory, spinner(notes, "preparing the model"):
        session.check()
        if not isinstance(settings, (BatchSettings, ServeSettings)):
            session.prepare(settings.config)
    compile_drafting(notes)
    process.raise_on_interrupt()
    return loaded


def check_device(name: str | None) -> torch.device:
    """The device called `name`, or the best one there is; refuses what this machine does not have."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type != "meta" and torch.device(name).index in (None, device.index):
            return device
        missing = f"it is {device}"
    except (RuntimeError, AssertionError, ImportError) as error:  # no such name or device, or a torch without it
        missing = summary(error)
    choices = ["cpu"]
    if (found := torch.accelerator.current_accelerator(check_available=True)) is not None:
        choices += [f"{found.type}:{index}" for index in range(torch.accelerator.device_count())]
    raise InvalidArgumentError(f"--device {name} is not available here; choose {' or '.join(choices)} ({missing})")


def _load(path: Path, settings: ModelSettings, device: torch.device, notes: Console) -> LoadedModel:
    # trust_remote_code=False refuses a model that brings its own code instead of asking at the terminal.
    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    part = "its tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **local)
        part = "the model"
        sees = type(AutoConfig.from_pretrained(path, **local)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        processor = AutoProcessor.from_pretrained(path, **local) if sees else None
        model, report = kind.from_pretrained(
            path, dtype=settings.dtype, output_loading_info=True, ignore_mismatched_sizes=True, **local
        )
    except Exception as error:  # whatever a broken file makes transformers raise
        if is_out_of_memory(error):
            raise
        raise InvalidArgumentError(
            f"--model {path}: {part} cannot be loaded ({summary(error)}); copy all of its files into this folder"
        ) from error
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
    return f"{type(error).__name__}: {lines[0].rstrip(': ')}" if lines else type(error).__name__


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
