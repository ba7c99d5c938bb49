"""Which model it is: a name for its weights, for files that are of use to no other."""

from __future__ import annotations

import hashlib
import json

import torch
from transformers import PreTrainedModel

_SAMPLED, _VALUES = 16, 64
_INCIDENTAL = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def model_identity(model: PreTrainedModel) -> str:
    """A short name that two models share only if they have the same configuration and the same weights.

    Made from the configuration and from values out of some of the weights. A model keeps its name in another number
    type if that holds the same values; another size, other layers or a fine-tuning change it.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in _INCIDENTAL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    weights = sorted(model.named_parameters(), key=lambda item: item[0])
    for name, weight in weights[:: max(1, len(weights) // _SAMPLED)]:
        # Of a weight that is shared out among processes (a DTensor), this process's part.
        part = weight.to_local() if hasattr(weight, "to_local") else weight
        values = part.detach().flatten()
        sample = values[:: max(1, values.numel() // _VALUES)].to(torch.float32).tolist()
        digest.update(f"{name} {tuple(weight.shape)} {sample}".encode())
    return f"{type(model).__name__}-{digest.hexdigest()[:24]}"
