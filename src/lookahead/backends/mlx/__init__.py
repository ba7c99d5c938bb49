"""Backend for models of mlx-lm. This file imports neither torch nor MLX: the command line knows folders by it."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

_LONGEST_HEADER = 100_000_000
"""Most bytes of a header of safetensors."""


def is_mlx_folder(path: Path) -> bool:
    """Return whether mlx-lm wrote the weights in `path`, and should run them in this process.

    transformers loads weights that are not quantised as well, and does so where mlx-lm is not installed.
    """
    try:
        config = json.loads((path / "config.json").read_bytes())
        with min(path.glob("model*.safetensors")).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")  # of a broken file it may be anything
            header = json.loads(file.read(min(size, _LONGEST_HEADER)))
        is_written_by_mlx = header["__metadata__"]["format"] == "mlx"
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return is_written_by_mlx and (find_spec("mlx_lm") is not None or "quantization" in config)
