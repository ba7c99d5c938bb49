"""Make torchvision work with a torch without CUDA: import this before transformers.

Wheels of torchvision are compiled for CUDA, and their operators cannot be loaded without it. timm only uses Python
code of torchvision, but its import needs two operators, which are declared here.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

LIBRARY: torch.library.Library | None = None
if torch.version.cuda is None and find_spec("torchvision") is not None:
    LIBRARY = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        LIBRARY.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
