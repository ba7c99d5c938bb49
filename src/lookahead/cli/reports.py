"""Results as plain numbers, strings and lists, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lookahead.cli.decoding import Recording
from lookahead.cli.loading import LoadedModel
from lookahead.cli.prompt import Prompt
from lookahead.cli.settings import DecodingSettings
from lookahead.cli.text import Tokenizer, decode
from lookahead.cli.versions import versions


def run_report(tokenizer: Tokenizer, recording: Recording) -> dict[str, Any]:
    """What one run generated, counted and took."""
    statistics = recording.statistics
    parts = asdict(statistics.seconds)
    return {
        "text": decode(tokenizer, recording.tokens),
        "tokens": recording.tokens,
        "steps": statistics.steps,
        "step_compression": statistics.step_compression,
        "nodes_per_step": statistics.nodes_per_step,
        "accepted_lengths": statistics.accepted_lengths,
        "tokens_per_second": recording.tokens_per_second,
        "seconds": {
            "wall": recording.wall_seconds,
            "cpu": recording.cpu_seconds,
            # The times by part come with the finished output only.
            **(parts if recording.complete else dict.fromkeys(parts)),
        },
    }


def request_report(settings: DecodingSettings, loaded: LoadedModel, prompt: Prompt) -> dict[str, Any]:
    """What was asked for, and of whom."""
    return {
        "prompt": prompt.text,
        "prompt_tokens": prompt.input_ids.shape[1],
        "max_new_tokens": prompt.max_new_tokens,
        "model": str(loaded.path),
        "dtype": loaded.dtype,
        "device": str(loaded.model.device),
        "preset": settings.config.preset,
        "sampling": None if settings.sampling is None else asdict(settings.sampling),
        "repetition_penalty": settings.repetition_penalty,
        "stop": settings.stop or [],
        "config": asdict(settings.config) | {"memory": str(settings.config.memory)},
        "versions": versions(),
    }
