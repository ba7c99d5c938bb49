"""Import every module of the package, and say beside which versions."""

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
            import_module(name)
    print(f"{len(names)} modules with transformers {transformers.__version__}, torch {torch.__version__}")
