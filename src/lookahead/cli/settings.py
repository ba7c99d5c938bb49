"""What the options of each command add up to, and all that there is to be said about them."""
# ruff: noqa: RUF009, as `option` and `argument` make dataclass fields

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from lookahead.cli import process
from lookahead.cli.inputs import FoundModel
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


def _dtype(default: str) -> Any:
    about = "Type of the weights; 'auto' is the one they were saved in."
    return option("--dtype", RUN, about, dtype, default)


def _drawing(names: str, about: str, parser: Any, shown: str = "the model's") -> Any:
    return option(names, SAMPLING, about, parser, shown=shown)


def _max_new_tokens(default: int) -> Any:
    return option("--max-new-tokens -n", RUN, "Most tokens to generate.", positive_whole_number, default)


def _json(about: str = "Print one JSON object and nothing else.") -> Any:
    return option("--json", OUTPUT, about, default=False)


def _device() -> Any:
    about = "Device to run on, such as cpu, cuda or cuda:1."
    return option("--device NAME", RUN, about, not_empty, shown="cuda where there is one, else cpu")


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """Settings of the commands that load a model."""

    model: str | None = option(
        "--model -m NAME",
        SOURCE,
        "Model of the Hugging Face Hub, such as Qwen/Qwen3-0.6B, or folder of a causal language model with its "
        "tokenizer. A GGUF file: its path, or OWNER/REPOSITORY:FILE.",
        not_empty,
        shown="the demonstration model",
    )
    revision: str | None = option(
        "--revision NAME", SOURCE, "Branch, tag or commit of a model of the Hub.", not_empty, shown="main"
    )
    trust_remote_code: bool = option(
        "--trust-remote-code", SOURCE, "Run the Python code that a model brings. Read it first.", default=False
    )
    allow_pickle: bool = option(
        "--allow-pickle", SOURCE, "Load weights that are pickles, which can run code as well.", default=False
    )
    found: FoundModel | None = None  # the model, once it is on this machine
    dtype: str = _dtype("auto")
    device: str | None = _device()


@dataclass(frozen=True, kw_only=True)
class TextSettings(ModelSettings):
    """Settings of the commands that make texts, of GGUF files as well."""

    gpu_layers: int = option(
        "--gpu-layers",
        RUN,
        "Layers of a GGUF model to keep on a GPU, -1 for all; llama-cpp-python must have been built for one.",
        layers,
        0,
    )
    fast_kv: bool = option(
        "--fast-kv",
        RUN,
        "Keep keys and values of a GGUF model in float16, with the attention that llama.cpp chooses: faster, but "
        "near-ties may be decided otherwise.",
        default=False,
    )
    config: LookaheadConfig
    learning: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # by preset, what is chosen for options not given

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Any:
        """Settings from the values of all options.

        Raises:
            InvalidArgumentError: Some of them make no sense together.
        """
        return super().of({**options, "config": cls.configuration(options)})

    @classmethod
    def configuration(cls, options: Mapping[str, Any]) -> LookaheadConfig:
        """How to draft; options that were not given keep the library's defaults."""
        declared = [field.name for field in fields(LookaheadConfig) if "help" in field.metadata]
        given = {name: options[name] for name in declared if options.get(name) is not None}
        config = LookaheadConfig.from_dict(given)
        chosen = cls.learning.get(config.preset)
        return LookaheadConfig.from_dict({**chosen, **given}) if chosen else config


@dataclass(frozen=True, kw_only=True)
class DecodingSettings(TextSettings):
    """Settings of the commands that decode. What is `None` is left to the model's own generation configuration."""

    sample: bool = option(
        "--sample/--greedy",
        SAMPLING,
        "Sample tokens, or take the likeliest ones. Options below that are not given come from the model's own "
        "generation configuration.",
        default=False,
        shown="greedy",
    )
    temperature: float | None = _drawing(
        "--temperature", "Divides the logits; below 1 favours likely tokens.", positive
    )
    top_p: float | None = _drawing(
        "--top-p", "Draw from the likeliest tokens that together are at least this probable.", probability
    )
    top_k: int | None = _drawing("--top-k", "Draw from this many of the likeliest tokens, 0 for all.", count)
    min_p: float | None = _drawing(
        "--min-p", "Draw from tokens that are at least this share as probable as the likeliest one.", probability
    )
    sampling_seed: int | None = _drawing("--sampling-seed", "Seed of all draws.", seed, shown="a new one every time")
    repetition_penalty: float | None = _drawing(
        "--repetition-penalty",
        "Above 1, tokens that the text already has become less likely, in greedy decoding as well.",
        positive,
    )
    stop: list[str] | None = option(
        "--stop TEXT", RUN, "End after this text; give it several times for several.", not_empty, shown="the model's"
    )
    max_new_tokens: int = _max_new_tokens(128)
    json: bool = _json()
    page: Path | None = None  # of a trace

    def __post_init__(self) -> None:
        for name in (*DRAWING, "sampling_seed"):
            if not self.sample and (value := getattr(self, name)) is not None:
                given = f"--{name.replace('_', '-')} {value}"
                raise InvalidArgumentError(f"{given} is about sampling, but decoding is greedy; add --sample")

    @property
    def sampling(self) -> dict[str, Any] | None:
        """How tokens are sampled, as far as that was said; `None` for greedy decoding."""
        if not self.sample:
            return None
        given = {name: getattr(self, name) for name in DRAWING}
        return {name: value for name, value in given.items() if value is not None}


DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""Settings of sampling, as `generate` calls them."""


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """Where a prompt comes from: the argument, where `-` stands for standard input, or a file."""

    prompt: str | None = argument("PROMPT", "Text to continue, taken as it is; '-' reads standard input.", None)
    file: Path | None = option("--file -f PATH", SOURCE, "Read the prompt from this UTF-8 file.")


@dataclass(frozen=True, kw_only=True)
class GenerateSettings(DecodingSettings, PromptSource):
    """Settings of `lookahead generate`."""

    parallel: int | None = option(
        "--parallel",
        RUN,
        "Decode on this many processes of this machine, each with the model on a device of its own. Sizes grow "
        "with it where none is given. For several machines start this command with torchrun instead.",
        positive_whole_number,
        shown="this process alone",
    )

    @classmethod
    def configuration(cls, options: Mapping[str, Any]) -> LookaheadConfig:
        """How to draft, on as many devices as there are ranks."""
        config = super().configuration(options)
        sized = any(options[name] is not None for name in ("step_budget", "window_size", "guess_set_size"))
        return config if sized else process.scaled(config, options["parallel"])


@dataclass(frozen=True, kw_only=True)
class TraceSettings(DecodingSettings, PromptSource):
    """Settings of `lookahead trace`."""

    page: Path = option("--output -o FILE", OUTPUT, "The page.", output_file, Path("trace.html"))


@dataclass(frozen=True, kw_only=True)
class CompareSettings(DecodingSettings, PromptSource):
    """Settings of `lookahead compare`."""

    dtype: str = _dtype("float32")
    repeats: int = option("--repeats", RUN, "Timed runs of each side; medians are shown.", positive_whole_number, 3)


@dataclass(frozen=True, kw_only=True)
class ChatSettings(DecodingSettings):
    """Settings of `lookahead chat`."""

    system: str | None = option("--system TEXT", CONVERSATION, "System message before the first turn.")
    template: Path | None = option(
        "--template FILE", CONVERSATION, "Chat template in Jinja, instead of the one that comes with the tokenizer."
    )
    raw: bool = option(
        "--raw",
        CONVERSATION,
        "Use no chat template: append every turn on a new line. The default for the demonstration model, which has "
        "none.",
        default=False,
    )
    max_new_tokens: int = _max_new_tokens(512)
    json: bool = _json("Print one JSON object for each turn.")
    page: Path | None = option(
        "--trace FILE",
        OUTPUT,
        "Write a page that shows every step, as `lookahead trace` does.",
        output_file,
        shown=False,
    )
    # Turns learn from each other, and answers repeat what was said before.
    learning: ClassVar = {"auto": {"memory": "process"}, "paper": {"pool_from_prompt": True}}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(TextSettings):
    """Settings of the commands that decode many texts at once."""

    max_rows: int = option("--max-rows", RUN, "Most answers decoded at once.", positive_whole_number, 16)
    kv_bytes: int | None = option(
        "--kv-bytes",
        RUN,
        "Most bytes of keys and values that are held at once.",
        positive_whole_number,
        shown="any number; a server takes half of the free memory",
    )
    # Requests learn from each other, unless a memory is given.
    learning: ClassVar = {"auto": {"memory": "process"}}


@dataclass(frozen=True, kw_only=True)
class BatchSettings(DecodingSettings, EngineSettings):
    """Settings of `lookahead batch`."""

    prompts: Path = argument("PROMPTS", "JSON lines with an `id`, and a text in `prompt`.")
    output: Path = option("--output -o PATH", OUTPUT, "JSON lines, one for each prompt.", output_file, ...)
    restart: bool = option("--restart", OUTPUT, "Throw the answers of an existing file away.", default=False)
    json: bool = _json("Print one JSON object with counts at the end, and nothing else.")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(EngineSettings):
    """Settings of `lookahead serve`."""

    name: str | None = option(
        "--name TEXT", SOURCE, "What clients call the model.", shown="its name on the Hub, or that of its folder"
    )
    lora: list[str] | None = option(
        "--lora NAME=PATH",
        SOURCE,
        "Serve the model with this LoRA adapter as well, as model NAME; give it several times for several.",
        shown=False,
    )
    host: str = option("--host ADDRESS", NETWORK, "Address to listen on; 0.0.0.0 for all.", default="127.0.0.1")
    port: int = option("--port", NETWORK, "Port to listen on, 0 for any that is free.", port, 8000)
    api_key_file: Path | None = option(
        "--api-key-file FILE", NETWORK, "Keys of which clients must send one, one a line.", shown="no keys"
    )
    cors_origin: list[str] | None = option(
        "--cors-origin ORIGIN",
        NETWORK,
        "Let web pages of this origin (https://example.org) read answers; several times for several, * for all.",
        shown="none",
    )
    queue: int = option("--queue", LIMITS, "Most requests that wait for their turn.", count, 128)
    timeout: float = option("--timeout", LIMITS, "Seconds after which a request is given up.", positive, 600.0)
    read_timeout: float = option(
        "--read-timeout", LIMITS, "Seconds in which a request must have arrived.", positive, 30.0
    )
    max_prompt_tokens: int | None = option(
        "--max-prompt-tokens", LIMITS, "Most tokens of a prompt.", positive_whole_number, shown="the model's context"
    )
    max_new_tokens: int = option(
        "--max-new-tokens -n", LIMITS, "Most tokens of an answer.", positive_whole_number, 16384
    )
    image_host: list[str] | None = option(
        "--image-host HOST",
        LIMITS,
        "Fetch images from this host (with :PORT, if it has one), for models that see; several times for several.",
        shown="none; images come as data URLs",
    )
    max_image_bytes: int = option(
        "--max-image-bytes", LIMITS, "Most bytes of an image that is fetched.", positive_whole_number, 8 * 2**20
    )
    max_body_bytes: int = option(
        "--max-body-bytes", LIMITS, "Most bytes of a request.", positive_whole_number, 8 * 2**20
    )
    prompt_tokens: int = option(
        "--prompt-tokens", RUN, "Most tokens of prompts in one step.", positive_whole_number, 512
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
        "Tokens of text before the step; give it several times for several lengths.",
        positive_whole_number,
        shown="128, 512 and 2048, as far as the model has room",
    )
    nodes: list[int] | None = option(
        "--nodes",
        RUN,
        "Tokens of one step; give it several times for several sizes. A step of 1 is always measured.",
        positive_whole_number,
        shown="1, 2, 4, ... 128",
    )
    repeats: int = option(
        "--repeats", RUN, "Timed steps of each size at each length; medians count.", positive_whole_number, 7
    )
    pack_weights: bool = option(
        "--pack-weights",
        RUN,
        "Measure with `pack_weights=True`, on CPUs only; curves with and without are kept apart.",
        default=False,
    )
    store: bool = option(
        "--store/--no-store", OUTPUT, "Keep the curve for later runs; `lookahead cache show` says where.", default=True
    )
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class WarmUpSettings(TextSettings):
    """Settings of `lookahead warm-up`."""

    price: bool = option("--price/--no-price", RUN, "Measure what steps cost, as `tune` does in short.", default=True)
    json: bool = _json()


@dataclass(frozen=True, kw_only=True)
class BenchSettings(Settings):
    """Settings of `lookahead bench run`."""

    suite: Path = argument("SUITE", "TOML file that names models, tasks and methods.")
    output: Path = option(
        "--output -o FILE",
        OUTPUT,
        "Raw results as JSON lines; what the file has already is not measured again.",
        output_file,
        default=...,
    )
    data: Path | None = option("--data FOLDER", SOURCE, "Folder of the prompt files.", shown="the folder of SUITE")
    limit: int | None = option(
        "--limit", SOURCE, "Take only the first so many prompts of each task.", positive_whole_number
    )
    restart: bool = option("--restart", OUTPUT, "Throw earlier results in the file away.", default=False)
    device: str | None = _device()
    threads: int | None = option(
        "--threads", RUN, "CPU threads.", positive_whole_number, shown="as many as torch takes"
    )


@dataclass(frozen=True, kw_only=True)
class LawSettings(Settings):
    """Settings of `lookahead bench law`."""

    results: Path = argument("RESULTS", "Rows of `bench run` (JSON lines, also as .gz).")
