"""What plain decoding of a miniature says along a given text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from lookahead.backends.transformers.encoder_decoder import is_encoder_decoder, tried_source
from lookahead.backends.transformers.miniature.sizes import VOCABULARY


class _Forced(LogitsProcessor):  # type: ignore[misc]
    """Makes `generate` write given texts, `[batch, tokens]`, whatever the model predicts."""

    def __init__(self, texts: torch.Tensor) -> None:
        self._texts = texts

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        forced = torch.full_like(scores, -torch.inf)
        forced.scatter_(1, self._texts[:, input_ids.shape[1], None], 0.0)
        return forced  # type: ignore[return-value]


def draw_text(tokens: int, seed: int) -> list[int]:
    """A text that repeats itself here and there, as texts do."""
    random = torch.Generator().manual_seed(seed)
    few = torch.randint(3, VOCABULARY - 16, (12,), generator=random)
    return [int(few[place]) for place in torch.randint(len(few), (tokens,), generator=random)]


@torch.no_grad()
def plain_logits(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], prompt: int, hidden: Sequence[Sequence[int]] | None = None
) -> torch.Tensor:
    """The logits from which `model.generate` selects each token of texts of one length after their prompts.

    Args:
        model: A miniature.
        texts: Token ids, hidden ones included.
        prompt: Tokens of each text that are its prompt.
        hidden: Places of each text that the attention mask hides.

    Returns:
        `[batch, tokens - prompt, vocabulary]` float32.

    Raises:
        ArithmeticError: The model's `generate` does not write the given texts.
    """
    ids = torch.tensor(texts)
    mask = torch.ones_like(ids)
    for row, places in enumerate(hidden or []):
        mask[row, list(places)] = 0
    arguments: dict[str, Any] = {"input_ids": ids[:, :prompt], "attention_mask": mask[:, :prompt]}
    if is_encoder_decoder(model):
        starts = [text[0] for text in texts]
        arguments = {**tried_source(model), "decoder_input_ids": ids[:, :prompt], "decoder_start_token_id": starts}
    output = GenerationMixin.generate(  # some classes have one of their own, which calls this
        model,
        **arguments,
        max_new_tokens=ids.shape[1] - prompt,
        do_sample=False,
        logits_processor=LogitsProcessorList([_Forced(ids)]),
        output_logits=True,
        return_dict_in_generate=True,
    )
    if not torch.equal(output.sequences, ids):
        raise ArithmeticError("this class generates in a way of its own")
    return torch.stack(output.logits, dim=1).float()
