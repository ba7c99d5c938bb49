"""What must be the same on all ranks before a call can begin, and what is made the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import numpy as np
import torch
import transformers
from transformers import GenerationConfig

from lookahead.errors import ParallelError
from lookahead.parallel.exchange import Bytes, Exchange
from lookahead.version import __version__

_DIGEST = 12
"""Bytes of each digest that is compared."""


def digest(value: object) -> bytes:
    """A few bytes that differ where `value` does: a tensor, or something with a `repr` that is the same everywhere."""
    if isinstance(value, torch.Tensor):
        data = np.ascontiguousarray(value.detach().cpu().numpy()).tobytes() + str(tuple(value.shape)).encode()
    else:
        data = repr(value).encode()
    return hashlib.sha256(data).digest()[:_DIGEST]


def versions() -> str:
    """Versions that decide what is computed."""
    return f"lookahead {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


def settings(config: GenerationConfig) -> str:
    """What a generation configuration says, whatever objects it holds."""
    values = {name: value for name, value in config.to_dict().items() if name != "transformers_version"}
    return json.dumps(values, sort_keys=True, default=lambda value: type(value).__name__)


def agree(exchange: Exchange, values: Mapping[str, object], names: list[int]) -> int:
    """Compare `values` between the ranks.

    Args:
        exchange: Communication with the other ranks.
        values: What must be the same, by name.
        names: What messages call each rank.

    Returns:
        Bytes that were sent to each other rank.

    Raises:
        ParallelError: Something differs; the message says what, and on which ranks. The same on all ranks.
    """
    own = np.frombuffer(b"".join(digest(value) for value in values.values()), dtype=np.uint8)
    received = exchange.gather(own)
    problems = []
    for place, name in enumerate(values):
        part = slice(place * _DIGEST, (place + 1) * _DIGEST)
        others = [
            rank for rank, message in enumerate(received) if message[part].tobytes() != received[0][part].tobytes()
        ]
        if others:
            ranks = ", ".join(str(names[rank]) for rank in others)
            problems.append(f"{name} on rank {ranks} differs from that on rank {names[0]}")
    if problems:
        raise ParallelError(f"{'; '.join(problems)}: start every rank with the same model, versions and arguments")
    return len(own)


def share_random_state(exchange: Exchange, device: torch.device) -> int:
    """Give all ranks the random state of rank 0, which tokens on `device` are sampled with.

    Returns:
        Bytes that were sent to each other rank.
    """
    cuda = device.type == "cuda"
    state = torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state()
    shared: Bytes = exchange.gather(state.numpy())[0]
    tensor = torch.from_numpy(shared.copy())
    if cuda:
        torch.cuda.set_rng_state(tensor, device)
    else:
        torch.set_rng_state(tensor)
    return len(shared)
