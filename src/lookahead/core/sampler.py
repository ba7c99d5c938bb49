"""The protocol of what selects the tokens of a text."""

from __future__ import annotations

from typing import Any, Protocol

from lookahead.core.outputs import NodeOutputs
from lookahead.core.shaping import Shaping


class Sampler(Protocol):
    """Selects each next token as plain decoding would: one after another, each once and in order."""

    @property
    def samples(self) -> bool:
        """Whether tokens are sampled, instead of taking the likeliest ones."""

    @property
    def shaping(self) -> Shaping:
        """What sampling makes of the model's distribution, as far as it is known without the text."""

    @property
    def needs_logits(self) -> bool:
        """Whether more is wanted than the likeliest token of the raw logits."""

    def select(self, sequence: Any, outputs: NodeOutputs, node: int) -> int:
        """The token after `node`, to follow the text of `sequence`, a `SequenceState` of the sampler's own kind."""
