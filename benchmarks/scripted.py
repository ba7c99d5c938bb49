"""A Llama that writes recorded texts: after the tokens of a text, the next recorded token has the largest logit.

It is a usual model of transformers. Its pass computes everything, and then looks up the next token on the device, from
the tokens and positions of the pass. So texts need no logits processor, and passes are captured like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, LlamaForCausalLM

from cases import Case
from models import RANDOM, TOKENS

LOGIT = 20.0
"""Logit of the next token. Those of random weights are below 7, so sampling selects it at temperatures up to 0.5."""


class ScriptedLlama(LlamaForCausalLM):  # type: ignore[misc]
    """Llama that writes the texts of `scripted`; without texts it is a Llama.

    Text k has its own token ids: `size` ids from 1 + k * size on. After another token than the recorded one, the next
    token is unrelated to the text, so drafts cannot read the text from the model's other predictions.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.ids = config.vocab_size - 1  # token 0 pads
        self.register_buffer("script", None, persistent=False)  # token ids [texts, positions]

    @wraps(LlamaForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See transformers; arguments are given by name."""
        output = super().forward(*args, **kwargs)
        tokens, positions = kwargs.get("input_ids"), kwargs.get("position_ids")
        if self.script is None or tokens is None or positions is None:
            return output
        keep = kwargs.get("logits_to_keep", 0)
        selection = slice(-keep or None, None) if isinstance(keep, int) else keep
        follows = self._next(tokens[:, selection], positions.expand_as(tokens)[:, selection])
        output.logits.scatter_(-1, follows[..., None], LOGIT)
        return output

    def _next(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the token after each of `tokens` at `positions`, both `[rows, nodes]`."""
        texts, length = self.script.shape
        text = ((tokens - 1).clamp(min=0) // (self.ids // texts)).clamp(max=texts - 1)
        positions = positions.clamp(max=length - 2)
        is_recorded = self.script[text, positions] == tokens
        return torch.where(is_recorded, self.script[text, positions + 1], 1 + tokens * 7 % self.ids)


def scripted_model(name: str, dtype: str, device: str) -> ScriptedLlama:
    """Return a model in the shapes of `RANDOM`, with random weights made on the device, without texts."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(**RANDOM[name], **TOKENS)
    with torch.device(device):
        model: ScriptedLlama = ScriptedLlama._from_config(config, dtype=getattr(torch, dtype)).eval()
    return model


def scripted(
    model: ScriptedLlama, cases: Sequence[Case], vocabulary: int | None = None
) -> tuple[ScriptedLlama, list[Case]]:
    """Return a model with the same weights that writes the answers, and the cases in its token ids.

    The new model has no learned predictions and step times.

    Args:
        model: Model with the weights.
        cases: Recorded texts. If one has more different tokens than there are ids for it, some get the same id.
        vocabulary: Use ids below this one; all of the model by default.
    """
    ids_of_all = (vocabulary or model.config.vocab_size) - 1
    size = ids_of_all // len(cases)
    script = np.zeros((len(cases), max(len(case.prompt) + len(case.answer) for case in cases) + 1), dtype=np.int64)
    renamed = []
    for number, case in enumerate(cases):
        ids = np.unique([*case.prompt, *case.answer, *case.expected], return_inverse=True)[1] % size + 1 + number * size
        prompt, answer, expected = np.split(ids, np.cumsum([len(case.prompt), len(case.answer)]))
        script[number, : len(prompt) + len(answer)] = ids[: len(prompt) + len(answer)]
        renamed.append(replace(case, prompt=prompt.tolist(), answer=answer.tolist(), expected=expected.tolist()))
    tensors = [*model.parameters(), *model.buffers()]
    copied = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    copied.ids = ids_of_all
    copied.script = torch.from_numpy(script).to(model.device)
    return copied, renamed
