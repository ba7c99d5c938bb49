"""`lookahead serve`: an OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from lookahead.backends.loading import LoadedModel, with_adapter
from lookahead.backends.machine import SHARE, free_bytes
from lookahead.cli.loading import load_for_decoding
from lookahead.cli.settings import ServeSettings
from lookahead.cli.signals import OK
from lookahead.cli.terminal import Consoles
from lookahead.config import MEMORY_SCOPES, LookaheadConfig
from lookahead.errors import InvalidArgumentError, extra_hint
from lookahead.serving import Engine
from lookahead.serving.kv_memory import PREFIX_BYTES
from lookahead.values import read_text

DEMO_NAME = "demo"

_SHORTEST = 64
"""Minimum capacity of the key-value memory, in tokens of one text."""


def run(settings: ServeSettings, consoles: Consoles) -> int:
    """Serve until a signal arrives, and return the exit code."""
    try:
        from lookahead.server.process import bind, serve
        from lookahead.server.served_model import ServedModel
        from lookahead.server.tracing import open_tracing
    except ImportError as error:
        raise InvalidArgumentError(
            f"serve needs {error.name}, which is not installed; {extra_hint('serve')}"
        ) from error
    from lookahead.server.guard import ServerSettings

    values = {field.name: getattr(settings, field.name) for field in fields(ServerSettings) if field.name != "api_keys"}
    server = ServerSettings(**values, api_keys=read_api_keys(settings.api_key_file))
    tracing = None if settings.otlp_traces_endpoint is None else open_tracing(settings.otlp_traces_endpoint)
    if server.memory_per_key and (not server.api_keys or settings.config.memory not in MEMORY_SCOPES):
        raise InvalidArgumentError("--memory-per-key needs --api-key-file, and keeps no file; leave --memory out")
    adapters = adapter_folders(settings.lora)
    with bind(server) as listener:
        main = load_for_decoding(settings, consoles.notes)
        if (rounding := _rounding(main, settings.config)) is not None:
            consoles.notes.print(rounding, style="dim")
        name = settings.name or (DEMO_NAME if settings.model is None else main.title)
        if name in adapters:
            raise InvalidArgumentError(f"--lora {name}={adapters[name]}: the model has this name; choose another one")
        all_loaded = {name: main} | {name: with_adapter(main, path) for name, path in adapters.items()}
        room = settings.kv_bytes
        if room is None and not main.is_gguf:  # llama.cpp allocates its memory at load
            room = free_bytes(main.model.device) // SHARE
        room = None if room is None else room // len(all_loaded)
        models = []
        for name, loaded in all_loaded.items():
            config = settings.config if loaded is main else _of_adapter(settings.config, name)
            engine = Engine(
                loaded.model,
                config,
                max_rows=settings.max_rows,
                kv_bytes=room,
                prefix_bytes=PREFIX_BYTES if settings.kv_bytes is None else None,
                prompt_tokens=settings.prompt_tokens,
                prefix_cache=settings.prefix_cache,
            )
            if (graphs := engine.statistics.graphs).count:
                captured = f"{graphs.count} CUDA graphs captured in {graphs.seconds:.1f} s, {graphs.bytes >> 20} MiB"
                consoles.notes.print(captured, style="dim")
            longest = min(limit for limit in (loaded.context_length, _longest_text(engine)) if limit is not None)
            models.append(ServedModel(**vars(loaded), name=name, engine=engine, config=config, max_length=longest))
        serve(models, server, listener, tracing)
    return OK


def _rounding(loaded: LoadedModel, config: LookaheadConfig) -> str | None:
    """Return the note that drafts may change texts in 16 bits, if it applies."""
    if loaded.dtype not in ("bfloat16", "float16") or config.invariant or config.preset == "autoregressive":
        return None
    remedy = "--invariant or --dtype float32" if loaded.model.device.type == "cpu" else "--dtype float32"
    return f"{loaded.dtype}: drafts may select the other of two nearly equally likely tokens; {remedy} prevents it"


def _of_adapter(config: LookaheadConfig, name: str) -> LookaheadConfig:
    """Configuration with the adapter's own memory file, as its predictions differ from the model's."""
    if config.memory in MEMORY_SCOPES:
        return config
    path = Path(config.memory)
    return replace(config, memory=path.with_name(f"{path.stem}-{name}{path.suffix}"))


def _longest_text(engine: Engine) -> int:
    """Maximum length of a text in the memory for keys and values, in tokens."""
    longest, kv_bytes = engine.longest_text or 0, engine.load.kv_limit_bytes
    if longest < _SHORTEST:
        raise InvalidArgumentError(
            f"--kv-bytes: {kv_bytes} bytes hold a text of {longest} tokens, at least {_SHORTEST} are needed; give more"
        )
    return longest


def adapter_folders(options: Sequence[str] | None) -> dict[str, Path]:
    """Folders of LoRA adapters by name, from texts `NAME=PATH`.

    Raises:
        InvalidArgumentError: A text is malformed, a name occurs twice, or a folder has no adapter.
    """
    folders: dict[str, Path] = {}
    for text in options or ():
        name, _, path = text.partition("=")
        if not (name and path):
            raise InvalidArgumentError(f"--lora {text}: give NAME=PATH, the name for clients and the folder")
        if name in folders:
            raise InvalidArgumentError(f"--lora {text}: another adapter has this name; choose another name")
        if not (Path(path) / "adapter_config.json").is_file():
            raise InvalidArgumentError(
                f"--lora {text}: {path} is not a folder with an adapter_config.json, as peft saves it"
            )
        folders[name] = Path(path)
    return folders


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """Read API keys from a file, one per line; lines that begin with `#` are comments. No keys without a file.

    Raises:
        InvalidArgumentError: The file cannot be read, has no key, or has a key that is not valid in an HTTP header.
    """
    if path is None:
        return ()
    lines = [line.strip() for line in read_text(path, "the keys from --api-key-file").splitlines()]
    for number, line in enumerate(lines, 1):
        if line[:1] != "#" and not (line.isascii() and line.isprintable()):
            raise InvalidArgumentError(
                f"--api-key-file {path}: line {number} has characters that cannot be sent in a header; use printable "
                "ASCII characters"
            )
    keys = tuple(line for line in lines if line and line[0] != "#")
    if not keys:
        raise InvalidArgumentError(f"--api-key-file {path}: contains no key; write one per line")
    return keys
