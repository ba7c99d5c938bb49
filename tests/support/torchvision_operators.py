"""torchvision beside a torch without CUDA: import this before transformers.

Wheels of torchvision are compiled for CUDA, and without it their operators cannot be loaded. What timm takes of
torchvision is Python, but importing it asks for two of them, which are declared here.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

LIBRARY: torch.library.Library | None = None
if torch.version.cuda is None and find_spec("torchvision") is not None:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
