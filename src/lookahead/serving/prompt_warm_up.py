"""How much of a prompt is read for drafting: the model's predictions inside of it fill the memory from the start."""

from __future__ import annotations

from transformers import PreTrainedModel

from lookahead.backends.transformers.model_state import state_of

MOST_READ = 512
"""Most tokens of a prompt that are read."""

MOST_LOGITS = 1 << 24
"""Most logits that reading makes: 64 MiB of them. A vocabulary of 128,000 leaves 131 tokens."""

_AFFORDED = 0.1
"""By how much reading may lengthen the pass over the prompt, where time decides."""


def warm_up_tokens(model: PreTrainedModel, prompt: int, time_decides: bool) -> int:
    """How many of the last tokens of a prompt to read.

    The pass over the prompt runs through all layers anyhow; what reading adds is the product with the vocabulary. That
    is little for a large model, and much for a small one with a large vocabulary.

    Args:
        model: The model.
        prompt: Length of the prompt, in tokens.
        time_decides: Read no more than lengthens the pass over the prompt by a tenth. Otherwise steps are what counts.
    """
    inputs = getattr(model.get_input_embeddings(), "weight", None)
    outputs = getattr(model.get_output_embeddings(), "weight", None)
    if inputs is None or outputs is None or outputs.ndim != 2:
        return 0
    most = min(MOST_READ, MOST_LOGITS // int(outputs.shape[0]))
    if not time_decides:
        return most
    state = state_of(model)
    if state.layer_weights is None:
        weights = (weight for weight in model.parameters() if weight is not inputs and weight is not outputs)
        state.layer_weights = sum(weight.numel() for weight in weights)
    return min(most, int(_AFFORDED * prompt * state.layer_weights / outputs.numel()))
