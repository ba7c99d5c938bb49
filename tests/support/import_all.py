"""Import every module of the package, and print the versions of its dependencies."""

from __future__ import annotations

from importlib import import_module
from pkgutil import walk_packages

import torch
import transformers

import lookahead

if __name__ == "__main__":
    names = [module.name for module in walk_packages(lookahead.__path__, "lookahead.")]
    for name in names:
        if not name.endswith(".__main__"):
            try:
                import_module(name)
            except ModuleNotFoundError as error:
                # torch for CPUs has no Triton, and MLX is an extra
                if (error.name or "").partition(".")[0] not in ("triton", "mlx", "mlx_lm"):
                    raise
    print(f"{len(names)} modules with transformers {transformers.__version__}, torch {torch.__version__}")
