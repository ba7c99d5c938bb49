"""Counts the forward passes of a model while transformers decodes with it."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn
from transformers import PreTrainedModel


class ForwardCounter:
    """Notes, before each forward pass, how many tokens it reads and how many are cached already.

    From the two follow the tokens that each step of a drafting method sends and adds, for transformers itself reports
    neither. A context manager: it is on inside a `with` block.
    """

    def __init__(self, model: PreTrainedModel, prompt_tokens: int) -> None:
        """Nothing happens yet.

        Args:
            model: The model whose passes count.
            prompt_tokens: Length of the prompt.
        """
        self._model = model
        self._prompt = prompt_tokens
        self._passes: list[tuple[int, int]] = []

    def __enter__(self) -> ForwardCounter:
        self._hook = self._model.register_forward_pre_hook(self._note, with_kwargs=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._hook.remove()

    def steps(self, tokens: int) -> tuple[list[int], list[int]]:
        """The nodes that each step sent and the tokens that it added, `tokens` in all.

        Before a step all of the text is cached but its last token; before the first one nothing is.
        """
        cached = [length for _, length in self._passes[1:]]
        ends = [length + 1 - self._prompt for length in cached] + [tokens]
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        nodes = [sent for sent, _ in self._passes]
        if nodes:
            nodes[0] -= self._prompt - 1  # its last token is the root
        return nodes, lengths

    def _note(self, module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        cache = named.get("past_key_values")
        self._passes.append((named["input_ids"].shape[1], 0 if cache is None else int(cache.get_seq_length())))
