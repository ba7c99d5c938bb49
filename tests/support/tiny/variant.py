"""Random choices about a model besides its family."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from lookahead.backends.transformers.miniature import VOCABULARY

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


@dataclass(frozen=True)
class Variant:
    """One model of a family.

    Attributes:
        seed: Seed of the weights.
        layers: Number of layers.
        pick: Seed for the choice of layers, if the default configuration has several kinds.
        key_value_heads: Number of key-value heads, with grouped-query attention.
        window: Length of sliding windows, and other limits of a layer's attention.
        context: Length of the position table, or maximum length of RoPE.
        rope: Kind of RoPE, if the family supports it.
        rope_context: Length limit of the factors for short texts in scaled RoPE.
        embedding_gain: Standard deviation of the token embeddings.
        spread: Standard deviation of the logits.
        experts: Implementation of mixtures of experts.
        biases: Whether linear layers have biases, if the family supports both.
        vocabulary: Size of the vocabulary.
    """

    seed: int = 0
    layers: int = 2
    pick: int = 0
    key_value_heads: int = 2
    window: int = 8
    context: int = 1024
    rope: str = "default"
    rope_context: int = 32
    embedding_gain: float = 2.0
    spread: float = 4.0
    experts: str = "grouped_mm"
    biases: bool = False
    vocabulary: int = VOCABULARY


def draw_variant(random: Random) -> Variant:
    """Draw a variant."""
    rope = random.choice(ROPE_KINDS) if random.random() < 0.5 else "default"
    rope_context = random.choice((16, 32, 64))
    context = random.choice((48, 80, 120)) if random.random() < 0.15 else 1024
    if rope == "dynamic":
        context = rope_context  # this RoPE reads the field
    elif rope != "default":
        context = 4 * rope_context
    return Variant(
        seed=random.randrange(1 << 16),
        layers=random.choice((2, 2, 3)),
        pick=random.randrange(1 << 16),
        key_value_heads=random.choice((1, 2, 2, 4)),
        window=random.choice((3, 5, 8, 12, 16, 24, 32, 64)),
        context=context,
        rope=rope,
        rope_context=rope_context,
        embedding_gain=random.choice((0.6, 1.0, 2.0, 3.0)),
        spread=random.choice((1.5, 3.0, 4.0, 4.0, 8.0)),
        experts=random.choice(("grouped_mm", "eager")),
        biases=random.random() < 0.2,
    )
