"""A loss that makes a model's own loops less likely.

Greedy text of a small model falls into cycles, and each repetition makes the next one likelier. Therefore the model
regularly continues prompts of the training data greedily, and tokens in a repeated cycle are made less likely
(sequence-level unlikelihood, Welleck et al. 2020, section 5.2). Generation costs more than learning, but additional
rows cost little. So a set of texts is generated at once and used in several steps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional
from transformers import LlamaForCausalLM

from lookahead.bench.summary import repeated_cycles

PROMPT_TOKENS = (16, 96)
"""Shortest and longest prompt."""

LONGEST_PERIOD = 64


def own_text_loss(model: LlamaForCausalLM, text: torch.Tensor, prompt_length: int) -> torch.Tensor:
    """Return the sum of -log(1 - p) over own tokens in a cycle, divided by all own tokens; `text` is [R, P + N]."""
    inside = in_repeated_cycle(text)[:, prompt_length:]  # [R, N]
    logits = model(input_ids=text[:, :-1], use_cache=False).logits[:, prompt_length - 1 :]  # [R, N, V]
    written = text[:, prompt_length:, None]
    probability = functional.softmax(logits.float(), dim=-1).gather(-1, written)[..., 0]  # [R, N]
    # A probability rounded to 1 would have an infinite loss.
    unlikelihood = -torch.log((1 - probability).clamp_min(1e-5))
    return (unlikelihood * inside).mean()


@torch.no_grad()
def own_text(
    model: LlamaForCausalLM, windows: torch.Tensor, tokens: int, random: np.random.Generator
) -> tuple[torch.Tensor, int]:
    """Return prompts with greedy continuations, [R, P + N], and P; prompts are random parts of `windows`, [R, S]."""
    size = windows.shape[1]
    length = min(int(random.integers(*PROMPT_TOKENS, endpoint=True)), size)
    begin = int(random.integers(0, size - length, endpoint=True))
    prompts = windows[:, begin : begin + length]
    text = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=tokens,
        min_new_tokens=tokens,  # all rows have N tokens: the end of a file must not end a loop
        do_sample=False,
        pad_token_id=0,
    )
    return text, prompts.shape[1]


def in_repeated_cycle(text: torch.Tensor) -> torch.Tensor:
    """Mark tokens that repeat the block before them: [R, T] ids to [R, T] bool.

    `lookahead.bench.summary` defines cycles; the first copy of the block does not count.
    """
    inside = torch.zeros_like(text, dtype=torch.bool)
    for row, tokens in enumerate(text.tolist()):
        for start, end, period in repeated_cycles(tokens, LONGEST_PERIOD):
            inside[row, start + period : end] = True
    return inside
