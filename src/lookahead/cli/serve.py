"""`lookahead serve`: an OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path

from lookahead.cli import process
from lookahead.cli.loading import LoadedModel, load_for_decoding, quiet_libraries
from lookahead.cli.rendering import Consoles
from lookahead.cli.settings import ServeSettings
from lookahead.errors import InvalidArgumentError
from lookahead.serving import Engine

DEMO_NAME = "demo"


def run(settings: ServeSettings) -> int:
    """Serve until a signal ends it, and return the exit code."""
    try:
        from lookahead.server.process import serve
        from lookahead.server.served_model import ServedModel
    except ImportError as error:
        raise InvalidArgumentError(
            f"serve needs {error.name}, which is not installed: pip install 'lookahead-decoding[serve]'"
        ) from error
    from lookahead.server.plan import Limits
    from lookahead.server.settings import ServerSettings

    consoles = Consoles.create(no_color=settings.no_color)
    keys = _read_keys(settings.api_key_file)
    with quiet_libraries():
        loaded = load_for_decoding(settings, consoles.notes)
        served = ServedModel(
            name=settings.name or (DEMO_NAME if settings.model is None else loaded.path.resolve().name),
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            engine=_engine(settings, loaded),
            config=settings.config,
            sampling=loaded.sampling,
            context_length=loaded.context_length,
        )
        serve(
            served,
            ServerSettings(
                host=settings.host,
                port=settings.port,
                api_keys=keys,
                limits=Limits(settings.max_prompt_tokens, settings.max_new_tokens),
                body_bytes=settings.max_body_bytes,
                queue=settings.queue,
                timeout=settings.timeout,
                read_timeout=settings.read_timeout,
                rows=settings.max_rows,
            ),
        )
    return process.OK


def _engine(settings: ServeSettings, loaded: LoadedModel) -> Engine:
    return Engine(
        loaded.model,
        settings.config,
        max_rows=settings.max_rows,
        kv_bytes=settings.kv_bytes,
        prompt_tokens=settings.prompt_tokens,
    )


def _read_keys(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"--api-key-file {path}: cannot be read: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise InvalidArgumentError(f"--api-key-file {path}: holds no key; write one a line")
    return keys
