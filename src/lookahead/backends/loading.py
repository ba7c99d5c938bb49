"""Loading a model of transformers, llama.cpp or mlx-lm from this machine, and the faster of its number types."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.nn.functional import linear
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

from lookahead.backends.llama_cpp.model import GGUFModel, load_gguf
from lookahead.backends.machine import free_bytes
from lookahead.backends.mlx import is_mlx_folder
from lookahead.backends.mlx.model import MLXModel, load_mlx
from lookahead.backends.session import open_session
from lookahead.backends.transformers.limits import Limits
from lookahead.errors import InvalidArgumentError

_SAMPLING_FLAGS = ("temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
"""Settings that a model may ship for sampling; they have no place in greedy decoding."""

_LONGEST_REASON = 100
"""Maximum length of torch's message about a missing device; longer messages are about torch's own code."""


@dataclass(frozen=True)
class LoadedModel:
    """A model with its tokenizer.

    Attributes:
        path: Folder or GGUF file of the model.
        model: The model, set to greedy decoding.
        tokenizer: Its tokenizer.
        sampling: Sampling settings of its own generation configuration.
        processor: Processor of images, if the model accepts images.
        origin: `NAME@COMMIT` of a model of the Hub.
    """

    path: Path
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    sampling: dict[str, Any] = field(default_factory=dict)
    processor: Any = None
    origin: str | None = None

    @property
    def title(self) -> str:
        """Name on the Hub, or name of the folder or file."""
        return self.origin.rpartition("@")[0] if self.origin else self.path.resolve().name

    @property
    def is_gguf(self) -> bool:
        """Whether llama.cpp runs it."""
        return isinstance(self.model, GGUFModel)

    @property
    def is_transformers(self) -> bool:
        """Whether transformers runs it."""
        return not isinstance(self.model, (GGUFModel, MLXModel))

    @property
    def context_length(self) -> int | None:
        """Maximum number of positions; `None` if the configuration has no limit."""
        return Limits(self.model.config).context

    @property
    def fixed_positions(self) -> int | None:
        """Longest text that reads every token as a shorter one did; `None` if no length changes how tokens are read."""
        return Limits(self.model.config).changes_after

    @property
    def dtype(self) -> str:
        """Name of the number type of the model; for a GGUF file, the types of its weights."""
        return open_session(self.model).number_type


def load_model(
    path: Path,
    dtype: str | torch.dtype = "auto",
    device: torch.device | None = None,
    tokenizer: Path | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **gguf: Any,
) -> LoadedModel:
    """Load a model.

    Args:
        path: A folder of transformers or mlx-lm, or a GGUF file. llama.cpp and MLX choose types and devices.
        dtype: Type of the weights; `"auto"` for the type in the files.
        device: Device of the model; the CPU by default.
        tokenizer: Folder of the tokenizer; `path` by default.
        trust_remote_code: Whether to run code from the folder.
        allow_pickle: Whether to read pickled weights.
        **gguf: Further arguments of `load_gguf`, for a GGUF file.

    Raises:
        InvalidArgumentError: It cannot be loaded.
    """
    if path.is_file():
        gguf_model = load_gguf(path, **gguf)
        return LoadedModel(path, gguf_model, gguf_model.tokenizer)
    if is_mlx_folder(path):
        mlx_model = load_mlx(path)
        return LoadedModel(path, mlx_model, mlx_model.tokenizer)
    part = "its tokenizer"
    # trust_remote_code=False refuses code instead of asking at the terminal.
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    try:
        read_tokenizer = AutoTokenizer.from_pretrained(tokenizer or path, **options)
        part = "the model"
        sees = type(AutoConfig.from_pretrained(path, **options)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        processor = AutoProcessor.from_pretrained(path, **options) if sees else None
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        options["use_safetensors"] = None if allow_pickle else True
        model, report = kind.from_pretrained(path, dtype=dtype, **options)
    except Exception as error:  # whatever a broken file makes transformers raise
        if is_out_of_memory(error):
            raise
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise InvalidArgumentError(
                f"{part} is made of Python code that comes with it; read that code, then run it with "
                "--trust-remote-code"
            ) from error
        raise InvalidArgumentError(
            f"{part} cannot be loaded ({summary(error)}); copy all of its files into this folder"
        ) from error
    _check_shapes(report["mismatched_keys"])
    _check_token_ids(path, model.generation_config)
    sampling = _make_greedy(model.generation_config)
    missing = sorted(report["missing_keys"])
    if missing:  # transformers would start them at random
        more = ", …" if len(missing) > 1 else ""
        raise InvalidArgumentError(f"it lacks {len(missing)} weights ({missing[0]}{more}); copy the model again")
    return LoadedModel(path, model.to(device or "cpu"), read_tokenizer, sampling, processor)


def _check_shapes(mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]) -> None:
    """Refuse weights of other shapes than `config.json` says; transformers would put random ones in their place."""
    if not mismatched:
        return
    name, stored, expected = min(mismatched)
    more = f", and {len(mismatched) - 1} more tensors" if len(mismatched) > 1 else ""
    raise InvalidArgumentError(
        f"config.json does not fit the weights: {name} has the shape {tuple(stored)} in the weights, "
        f"but {tuple(expected)} by the sizes in config.json{more}; correct the sizes"
    )


def _check_token_ids(path: Path, generation_config: GenerationConfig) -> None:
    for field_name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(generation_config, field_name)
        several = field_name == "eos_token_id" and isinstance(value, list)
        if not all(isinstance(token, int) for token in (value if several else [value]) if token is not None):
            files = [name for name in ("generation_config.json", "config.json") if (path / name).exists()]
            what = "a token id or a list of token ids" if field_name == "eos_token_id" else "a token id"
            raise InvalidArgumentError(f"{files[0]}: {field_name}={value!r} must be {what}")


def _make_greedy(generation_config: GenerationConfig) -> dict[str, Any]:
    """Remove the settings of a model for sampling and beam search, and return its sampling settings."""
    shipped = {flag: getattr(generation_config, flag, None) for flag in _SAMPLING_FLAGS}
    for flag in (*_SAMPLING_FLAGS, "num_beams"):
        setattr(generation_config, flag, None)
    generation_config.do_sample = False
    return {flag: value for flag, value in shipped.items() if value is not None}


def with_adapter(loaded: LoadedModel, path: Path) -> LoadedModel:
    """Return a model with a LoRA adapter, another object with the weights of `loaded`.

    Raises:
        InvalidArgumentError: The adapter cannot be loaded.
        UnsupportedModelError: The model cannot be run with it.
    """
    if find_spec("peft") is None:
        raise InvalidArgumentError(f"--lora {path} needs peft, which is not installed: pip install peft")
    if not loaded.is_transformers:
        raise InvalidArgumentError(
            f"--lora {path} is about models of transformers; --model {loaded.title} is a model of another engine"
        )
    model = open_session(loaded.model).sharing_weights()
    try:
        model.load_adapter(str(path))
    except Exception as error:  # whatever a broken or foreign adapter makes peft raise
        raise InvalidArgumentError(f"--lora {path}: cannot be loaded: {summary(error)}") from error
    open_session(model).check()
    return replace(loaded, model=model)


def check_device(name: str | None) -> torch.device:
    """Return the device called `name`, or the best one; refuse a device that this machine does not have."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.empty(0, device=name).device
        if device.type != "meta" and torch.device(name).index in (None, device.index):
            return device
        missing = f"it is {device}"
    except (RuntimeError, AssertionError, ImportError) as error:  # no such name or device, or a torch without it
        missing = summary(error)
        if len(missing) > _LONGEST_REASON:
            missing = "torch has no such device here"
    choices = ["cpu"]
    if (accelerator := torch.accelerator.current_accelerator(check_available=True)) is not None:
        choices += [f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count())]
    raise InvalidArgumentError(f"--device {name} is not available here; choose {' or '.join(choices)} ({missing})")


def summary(error: Exception) -> str:
    """Return an error of another library in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip(': ')}" if lines else type(error).__name__


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a device or the machine is out of memory; torch has no error type for some devices."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


_ROWS = 8
"""Rows of the timed product: nodes of a typical step."""

_ELEMENTS = 2**24
"""Most weights of the timed product."""

_REPEATS = 5
"""Timed products of each type; the fastest one counts."""

_GAIN = 1.2
"""Smallest ratio of the times that decides for float32. Processors with bfloat16 instructions have at most 0.85."""


def use_faster_type(model: Any) -> str | None:
    """Convert a 16-bit model to float32 if products in float32 are faster on this processor.

    Processors without instructions for a 16-bit type convert each weight in each product of several rows. The values
    of the weights stay the same.

    Args:
        model: Any model; only those of transformers on a CPU are converted.

    Returns:
        Description of the choice in one line, or `None` if the model stays as it is.
    """
    if not isinstance(model, torch.nn.Module) or getattr(model, "hf_quantizer", None) is not None:
        return None
    layers = [module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)]
    dtypes = {parameter.dtype for parameter in model.parameters()}
    dtype = next(iter(dtypes), None)
    if len(dtypes) > 1 or dtype not in (torch.bfloat16, torch.float16) or not layers:
        return None
    size = sum(parameter.nbytes for parameter in model.parameters())
    if any(layer.device.type != "cpu" for layer in layers) or free_bytes(layers[0].device) < 2 * size:
        return None
    gain = _gain(max(layers, key=torch.Tensor.numel).detach())
    if gain < _GAIN:
        return None
    model.to(torch.float32)
    model.config.dtype = torch.float32
    name = str(dtype).removeprefix("torch.")
    return f"float32: steps are {gain:.1f} times as fast on this CPU as in {name}, and exact; --dtype {name} keeps it"


def _gain(weight: torch.Tensor) -> float:
    """Return the time of a product with 16-bit weights, in times of the same product in float32."""
    part = weight[: max(_ELEMENTS // weight.shape[1], 1)]
    return _seconds(part) / _seconds(part.float())


@torch.inference_mode()
def _seconds(weight: torch.Tensor) -> float:
    rows = weight.new_ones(_ROWS, weight.shape[1])
    times = []
    for _ in range(_REPEATS + 1):  # the first one prepares the kernel
        begin = perf_counter()
        linear(rows, weight)
        times.append(perf_counter() - begin)
    return min(times[1:])
