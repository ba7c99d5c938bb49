"""A tiny random model of the same class as a large one, on which that is tried, and what it says along a text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from lookahead.backends.transformers.encoder_decoder import is_encoder_decoder, tried_source
from lookahead.backends.transformers.miniature.config import miniature_config
from lookahead.backends.transformers.miniature.sizes import VOCABULARY

_SPREAD = 4.0
"""Standard deviation of the logits: peaked, so that what is seen and what is not shows."""


def build_miniature(kind: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model of class `kind` with `config` but for its sizes, in float32 on the CPU, in evaluation mode.

    Its random weights follow from `seed`.

    Raises:
        Exception: Whatever the class raises at sizes that do not go together.
    """
    attention = config._attn_implementation
    if attention not in ("eager", "sdpa"):
        attention = "sdpa" if kind._supports_sdpa else "eager"
    # The caller's random numbers, device and memory are not ours to touch.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.inference_mode(False), quiet():
        small: PreTrainedModel = kind._from_config(
            miniature_config(config), attn_implementation=attention, dtype=torch.float32
        )
        with torch.no_grad():
            _draw_weights(small.eval(), torch.Generator().manual_seed(seed))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(small.generation_config, token, None)
    return small


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that the sizes of a miniature give rise to."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _draw_weights(model: PreTrainedModel, random: torch.Generator) -> None:
    """Random weights under which attention matters; all are set, since some models leave theirs uninitialised."""
    embedding = model.get_input_embeddings()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=random)
            if module is embedding:
                parameter.copy_(2 * noise)
            elif isinstance(module, torch.nn.Embedding):  # learned positions
                parameter.copy_(0.3 * noise)
            elif parameter.dim() < 2:
                parameter.copy_(_middle(name, parameter) + 0.1 * noise)
            else:
                fan_in = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
                parameter.copy_(1.3 * noise / fan_in**0.5)
    weight = getattr(model.get_output_embeddings(), "weight", None)
    tokens = torch.randint(1, VOCABULARY, (2, 16), generator=random)
    arguments = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if is_encoder_decoder(model):
        arguments = {**tried_source(model), "decoder_input_ids": tokens[:1]}
    for _ in range(3):  # more than once, as a soft cap on the logits is not linear
        logits = model(**arguments, use_cache=False).logits
        deviation = float(logits.std())
        if weight is not None and math.isfinite(deviation) and deviation > 0:
            weight.mul_(min(max(_SPREAD / deviation, 1e-3), 1e3))


def _middle(name: str, parameter: torch.Tensor) -> float:
    """What a vector stays near: its initial value, if it has one value that is not odd."""
    if "bias" in name or "sink" in name or not parameter.numel():
        return 0.0
    first = float(parameter.flatten()[0])
    return first if math.isfinite(first) and abs(first) <= 4 and bool((parameter == first).all()) else 1.0


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
