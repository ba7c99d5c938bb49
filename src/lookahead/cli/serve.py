"""`lookahead serve`: an OpenAI-compatible server."""

from __future__ import annotations

from lookahead.backends.free_memory import free_bytes
from lookahead.cli import process
from lookahead.cli.inputs import is_gguf, read_api_keys
from lookahead.cli.loading import LoadedModel, load_for_decoding, quiet_libraries
from lookahead.cli.rendering import Consoles
from lookahead.cli.settings import ServeSettings
from lookahead.errors import InvalidArgumentError
from lookahead.serving import Engine
from lookahead.serving.kv_memory import PREFIX_BYTES

DEMO_NAME = "demo"

_SHORTEST = 64
"""Tokens of a text that there has to be room for, at least."""

_SHARE = 2
"""Part of the free memory that keys and values take where nothing is said about it."""


def run(settings: ServeSettings) -> int:
    """Serve until a signal ends it, and return the exit code."""
    try:
        from lookahead.server.process import bind, serve
        from lookahead.server.served_model import ServedModel
    except ImportError as error:
        raise InvalidArgumentError(
            f"serve needs {error.name}, which is not installed: pip install 'lookahead-decoding[serve]'"
        ) from error
    from lookahead.server.guard import ServerSettings
    from lookahead.server.plan import Limits

    consoles = Consoles.create(no_color=settings.no_color)
    server = ServerSettings(
        host=settings.host,
        port=settings.port,
        api_keys=read_api_keys(settings.api_key_file),
        limits=Limits(settings.max_prompt_tokens, settings.max_new_tokens),
        body_bytes=settings.max_body_bytes,
        queue=settings.queue,
        timeout=settings.timeout,
        read_timeout=settings.read_timeout,
        rows=settings.max_rows,
    )
    with quiet_libraries(), bind(server) as listener:
        loaded = load_for_decoding(settings, consoles.notes)
        with loaded.start_up.engine(settings.config):
            engine = _engine(settings, loaded)
        loaded.start_up.tell()
        context = min(most for most in (loaded.context_length, _longest_text(engine)) if most is not None)
        served = ServedModel(
            name=settings.name or (DEMO_NAME if settings.model is None else loaded.path.resolve().name),
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            engine=engine,
            config=settings.config,
            sampling=loaded.sampling,
            context_length=context,
        )
        serve(served, server, listener)
    return process.OK


def _engine(settings: ServeSettings, loaded: LoadedModel) -> Engine:
    given = most = settings.kv_bytes
    if given is None and not is_gguf(loaded.path):  # llama.cpp takes its room at once, no more than can be used
        most = free_bytes(loaded.model.device) // _SHARE
    return Engine(
        loaded.model,
        settings.config,
        max_rows=settings.max_rows,
        kv_bytes=most,
        prefix_bytes=PREFIX_BYTES if given is None else None,
        prompt_tokens=settings.prompt_tokens,
        prefix_cache=settings.prefix_cache,
    )


def _longest_text(engine: Engine) -> int:
    """Most tokens of a text that the memory for keys and values has room for."""
    longest, kv_bytes = engine.longest_text or 0, engine.load.most_kv_bytes
    if longest < _SHORTEST:
        raise InvalidArgumentError(f"--kv-bytes: {kv_bytes} bytes have room for a text of {longest} tokens; give more")
    return longest
