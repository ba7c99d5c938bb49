"""Settings of each command, with the declarations and help texts of its options."""
# ruff: noqa: RUF009, as `option` and `argument` make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from lookahead.cli.model_files import FoundModel, find_model
from lookahead.cli.options import (
    CONVERSATION,
    LIMITS,
    NETWORK,
    OUTPUT,
    RUN,
    SAMPLING,
    SOURCE,
    Settings,
    argument,
    count,
    dtype,
    layers,
    not_empty,
    option,
    output_file,
    port,
    positive,
    positive_whole_number,
    probability,
    seed,
)
from lookahead.config import LookaheadConfig
from lookahead.errors import InvalidArgumentError
from lookahead.parallel import scale_config
from lookahead.parallel.launcher import environment_number, started_together


def _dtype(default: str) -> Any:
    about = "Type of the weights; 'auto' is the type in the file."
    return option("--dtype", RUN, about, dtype, default)


def _drawing(names: str, about: str, parser: Any, label: str = "the model's") -> Any:
    return option(names, SAMPLING, about, parser, label=label)


def _max_new_tokens(default: int) -> Any:
    return option("--max-new-tokens -n", RUN, "Maximum number of tokens to generate.", positive_whole_number, default)


def _json(about: str = "Print one JSON object and nothing else.") -> Any:
    return option("--json", OUTPUT, about, default=False)


def _device() -> Any:
    about = "Device to run on, such as cpu, cuda or cuda:1."
    return option("--device NAME", RUN, about, not_empty, label="cuda if available, else cpu")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Settings of the commands that load a model."""

    model: str | None = option(
        "--model -m NAME",
        SOURCE,
        "Model of the Hugging Face Hub, such as Qwen/Qwen3-0.6B, or folder of a causal language model with its "
        "tokenizer. For a GGUF file, its path or OWNER/REPOSITORY:FILE.",
        not_empty,
        label="the demonstration model",
    )
    revision: str | None = option(
        "--revision NAME", SOURCE, "Branch, tag or commit of a model of the Hub.", not_empty, label="main"
    )
    trust_remote_code: bool = option(
        "--trust-remote-code", SOURCE, "Run Python code from the model's folder. Read it first.", default=False
    )
    allow_pickle: bool = option(
        "--allow-pickle", SOURCE, "Load weights in pickle format, which can run code too.", default=False
    )
    local_model: FoundModel | None = None  # local files of the model, once found or downloaded
    dtype: str = _dtype("auto")
    device: str | None = _device()

    def find_model(self, notes: Console) -> FoundModel:
        """Find or download the model; see `model_files.find_model`."""
        return find_model(self.model, self.revision, self.trust_remote_code, self.allow_pickle, notes)


@dataclass(frozen=True, kw_only=True)
class TextSettings(ModelSettings):
    """Settings of the commands that generate text, with transformers models or GGUF files."""

    gpu_layers: int = option(
        "--gpu-layers",
        RUN,
        "Layers of a GGUF model to keep on a GPU, -1 for all; needs a GPU build of llama-cpp-python.",
        layers,
        0,
    )
    fast_kv: bool = option(
        "--fast-kv",
        RUN,
        "Keep keys and values of a GGUF model in float16, with llama.cpp's own choice of attention: faster, but "
        "tokens may differ at near-ties.",
        default=False,
    )
    config: LookaheadConfig
    learning: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # by preset, defaults of options not given

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Any:
        """Make settings from the values of all options.

        Raises:
            InvalidArgumentError: Options contradict each other.
        """
        return super().of({**options, "config": cls.configuration(options)})

    @classmethod
    def configuration(cls, options: Mapping[str, Any]) -> LookaheadConfig:
        """Configuration of drafting; options that were not given keep the library's defaults."""
        declared = [field.name for field in fields(LookaheadConfig) if "help" in field.metadata]
        values = {name: options[name] for name in declared if options.get(name) is not None}
        config = LookaheadConfig.from_dict(values)
        defaults = cls.learning.get(config.preset)
        return LookaheadConfig.from_dict({**defaults, **values}) if defaults else config


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(TextSettings):
    """Settings of the commands that decode. `None` means the value of the model's generation configuration."""

    sample: bool = option(
        "--sample/--greedy",
        SAMPLING,
        "Sample tokens, or always take the most likely one. Defaults of the options below come from the model's "
        "generation configuration.",
        default=False,
        label="greedy",
    )
    temperature: float | None = _drawing(
        "--temperature", "Divisor of the logits; below 1 favours likely tokens.", positive
    )
    top_p: float | None = _drawing(
        "--top-p", "Draw from the most likely tokens with at least this total probability.", probability
    )
    top_k: int | None = _drawing("--top-k", "Draw from this number of most likely tokens, 0 for all.", count)
    min_p: float | None = _drawing(
        "--min-p", "Draw from tokens with at least this fraction of the highest probability.", probability
    )
    sampling_seed: int | None = _drawing("--sampling-seed", "Seed of all draws.", seed, label="a new seed in each run")
    repetition_penalty: float | None = _drawing(
        "--repetition-penalty",
        "Above 1, tokens that are already in the text become less likely, also in greedy decoding.",
        positive,
    )
    stop: list[str] | None = option(
        "--stop TEXT", RUN, "End after this text; repeat for several.", not_empty, label="the model's"
    )
    max_new_tokens: int = _max_new_tokens(128)
    json: bool = _json()
    page: Path | None = None  # output file of a trace

    def __post_init__(self) -> None:
        for name in (*DRAWING, "sampling_seed"):
            if not self.sample and (value := getattr(self, name)) is not None:
                option = f"--{name.replace('_', '-')} {value}"
                raise InvalidArgumentError(f"{option} applies to sampling only, but decoding is greedy; add --sample")

    @property
    def sampling(self) -> dict[str, Any] | None:
        """Sampling options that were given, by name; `None` for greedy decoding."""
        if not self.sample:
            return None
        values = {name: getattr(self, name) for name in DRAWING}
        return {name: value for name, value in values.items() if value is not None}


DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""Names of sampling options, which are also arguments of `generate`."""


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Sources of a prompt: an argument, where `-` is standard input, or a file."""

    prompt: str | None = argument("PROMPT", "Text to continue, unchanged; '-' reads standard input.", None)
    file: Path | None = option("--file -f PATH", SOURCE, "Read the prompt from this UTF-8 file.")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(DecodingSettings, PromptSource):
    """Settings of `lookahead generate`."""

    parallel: int | None = option(
        "--parallel",
        RUN,
        "Number of processes on this machine, each with the model on its own device. Without size options, the sizes "
        "grow with it. For several machines start this command with torchrun instead.",
        positive_whole_number,
        label="this process only",
    )

    @classmethod
    def configuration(cls, options: Mapping[str, Any]) -> LookaheadConfig:
        """Configuration of drafting, scaled to the number of ranks unless sizes are given."""
        config = super().configuration(options)
        sized = any(options[name] is not None for name in ("step_budget", "window_size", "guess_set_size"))
        ranks = options["parallel"] or (environment_number("WORLD_SIZE", 1) if started_together() else 1)
        return config if sized or ranks == 1 else scale_config(config, ranks)


@dataclass(frozen=True, kw_only=True)
class TraceSettings(DecodingSettings, PromptSource):
    """Settings of `lookahead trace`."""

    page: Path = option("--output -o FILE", OUTPUT, "HTML file to write.", output_file, Path("trace.html"))


@dataclass(frozen=True, kw_only=True)
class CompareSettings(DecodingSettings, PromptSource):
    """Settings of `lookahead compare`."""

    dtype: str = _dtype("float32")
    repeats: int = option("--repeats", RUN, "Timed runs of each side; medians are shown.", positive_whole_number, 3)
    # Later runs would know the text.
    learning: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"memory": "request"}}


@dataclass(frozen=True, kw_only=True)
class ChatSettings(DecodingSettings):
    """Settings of `lookahead chat`."""

    system: str | None = option("--system TEXT", CONVERSATION, "System message before the first turn.")
    template: Path | None = option(
        "--template FILE", CONVERSATION, "Chat template in Jinja, instead of the tokenizer's own."
    )
    raw: bool = option(
        "--raw",
        CONVERSATION,
        "Use no chat template: append every turn on a new line. This is the default for the demonstration model.",
        default=False,
    )
    max_new_tokens: int = _max_new_tokens(512)
    json: bool = _json("Print one JSON object for each turn.")
    page: Path | None = option(
        "--trace FILE",
        OUTPUT,
        "Write a page that shows every step, as `lookahead trace` does.",
        output_file,
        label=False,
    )
    # Answers repeat text of earlier turns.
    learning: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"pool_from_prompt": True}}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(TextSettings):
    """Settings of the commands that decode many texts at once."""

    max_rows: int = option("--max-rows", RUN, "Maximum number of answers decoded at once.", positive_whole_number, 16)
    kv_bytes: int | None = option(
        "--kv-bytes", RUN, "Maximum bytes of keys and values.", positive_whole_number, label="half of the free memory"
    )


@dataclass(frozen=True, kw_only=True)
class BatchSettings(DecodingSettings, EngineSettings):
    """Settings of `lookahead batch`."""

    prompts: Path = argument("PROMPTS", "JSON lines with the fields `id` and `prompt`.")
    output: Path = option("--output -o PATH", OUTPUT, "JSON lines to write, one for each prompt.", output_file, ...)
    restart: bool = option("--restart", OUTPUT, "Discard the answers in an existing output file.", default=False)
    json: bool = _json("Print one JSON object with counts at the end, and nothing else.")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(EngineSettings):
    """Settings of `lookahead serve`."""

    name: str | None = option(
        "--name TEXT", SOURCE, "Name of the model for clients.", label="its name on the Hub, or its folder's name"
    )
    lora: list[str] | None = option(
        "--lora NAME=PATH",
        SOURCE,
        "Also serve the model with this LoRA adapter, as model NAME; repeat for several.",
        label=False,
    )
    host: str = option("--host ADDRESS", NETWORK, "Address to listen on; 0.0.0.0 for all.", default="127.0.0.1")
    port: int = option("--port", NETWORK, "Port to listen on, 0 for any free port.", port, 8000)
    api_key_file: Path | None = option(
        "--api-key-file FILE", NETWORK, "File of keys, one per line; clients must send one.", label="no keys"
    )
    memory_per_key: bool = option(
        "--memory-per-key",
        NETWORK,
        "Keep predictions, keys and values of each API key apart, so that no time reveals texts of another key.",
        default=False,
    )
    cors_origin: list[str] | None = option(
        "--cors-origin ORIGIN",
        NETWORK,
        "Let web pages of this origin (https://example.org) read answers; repeat for several, * for all.",
        label="none",
    )
    otlp_traces_endpoint: str | None = option(
        "--otlp-traces-endpoint URL",
        NETWORK,
        "Send OpenTelemetry spans there over HTTP, such as http://localhost:4318/v1/traces; needs the extra 'otel'.",
        not_empty,
        label="none",
    )
    queue: int = option("--queue", LIMITS, "Maximum number of waiting requests.", count, 128)
    timeout: float = option(
        "--timeout", LIMITS, "Maximum seconds for a request; later it is cancelled.", positive, 600.0
    )
    read_timeout: float = option("--read-timeout", LIMITS, "Maximum seconds for a request to arrive.", positive, 30.0)
    max_prompt_tokens: int | None = option(
        "--max-prompt-tokens", LIMITS, "Maximum tokens of a prompt.", positive_whole_number, label="the model's context"
    )
    max_new_tokens: int = option(
        "--max-new-tokens -n", LIMITS, "Maximum tokens of an answer.", positive_whole_number, 16384
    )
    image_host: list[str] | None = option(
        "--image-host HOST",
        LIMITS,
        "Fetch images from this host (with :PORT, if it has one), for vision models; repeat for several.",
        label="none; images must be data URLs",
    )
    max_image_bytes: int = option(
        "--max-image-bytes", LIMITS, "Maximum bytes of a fetched image.", positive_whole_number, 8 * 2**20
    )
    max_body_bytes: int = option(
        "--max-body-bytes", LIMITS, "Maximum bytes of a request.", positive_whole_number, 8 * 2**20
    )
    prompt_tokens: int = option(
        "--prompt-tokens", RUN, "Maximum tokens of prompts in one step.", positive_whole_number, 512
    )
    prefix_cache: bool = option(
        "--prefix-cache/--no-prefix-cache",
        RUN,
        "Keep keys and values of finished texts for requests with a common prefix.",
        default=True,
    )


@dataclass(frozen=True, kw_only=True)
class TuneSettings(ModelSettings):
    """Settings of `lookahead tune`."""

    context: list[int] | None = option(
        "--context -c",
        RUN,
        "Tokens of text before the step; repeat for several lengths.",
        positive_whole_number,
        label="128, 512 and 2048, if the model's context allows",
    )
    nodes: list[int] | None = option(
        "--nodes",
        RUN,
        "Tokens of one step; repeat for several sizes. A step of 1 is always measured.",
        positive_whole_number,
        label="1, 2, 4, ... 128",
    )
    repeats: int = option(
        "--repeats", RUN, "Timed steps of each size at each length; the median is used.", positive_whole_number, 7
    )
    pack_weights: bool = option(
        "--pack-weights",
        RUN,
        "Measure with `pack_weights=True`, on CPUs only; its curve is stored separately.",
        default=False,
    )
    store: bool = option(
        "--store/--no-store",
        OUTPUT,
        "Keep the curve for later runs; `lookahead cache show` prints the folder.",
        default=True,
    )
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class WarmUpSettings(TextSettings):
    """Settings of `lookahead warm-up`."""

    price: bool = option("--price/--no-price", RUN, "Measure step times, like a short `tune`.", default=True)
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Settings of `lookahead bench run`."""

    suite: Path = argument("SUITE", "TOML file that names models, tasks and methods.")
    output: Path = option(
        "--output -o FILE",
        OUTPUT,
        "Raw results as JSON lines; results that are already in the file are not measured again.",
        output_file,
        default=...,
    )
    data: Path | None = option("--data FOLDER", SOURCE, "Folder of the prompt files.", label="the folder of SUITE")
    limit: int | None = option("--limit", SOURCE, "Number of prompts to take from each task.", positive_whole_number)
    restart: bool = option("--restart", OUTPUT, "Discard earlier results in the file.", default=False)
    device: str | None = _device()
    threads: int | None = option("--threads", RUN, "CPU threads.", positive_whole_number, label="torch's own number")


@dataclass(frozen=True, kw_only=True)
class LawSettings(Settings):
    """Settings of `lookahead bench law`."""

    results: Path = argument("RESULTS", "Rows of `bench run` (JSON lines, also as .gz).")
