"""First pass over a prompt with inputs beside tokens, for example images: the model's own prefill."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from lookahead.backends.forward_result import PassResult, pass_result
from lookahead.backends.transformers.cache_names import cache_name, knows_its_length
from lookahead.backends.transformers.chain_cache import SavedState
from lookahead.backends.transformers.model_state import forward_arguments, model_setting, state_of
from lookahead.backends.transformers.runner import TransformersRunner
from lookahead.backends.transformers.snapshots import preserved_state
from lookahead.core.forest import Forest, Layout
from lookahead.core.protocols import Backend
from lookahead.core.results import Walks
from lookahead.core.token_tree import TokenTree
from lookahead.core.walk import walk_trees
from lookahead.errors import UnsupportedModelError

_MIN_TOLERANCE = 1e-3
"""Tolerance as a share of the largest logit; a wrong position or a missing input has a far larger effect."""
_TRIALS = 3
"""Number of tokens that must all show a difference, because rounding decides near-ties between experts."""


class PromptPass(Backend):
    """Backend for the first step of a call: the model's own prefill of a prompt with all its inputs.

    Later steps send only tokens, with the positions that the model counts from there. A trial, once for each model and
    kind of inputs, compares their logits with the model's own next step.

    Args:
        runner: Runner of the later steps.
        model: The model; the runner may use a clone.
        input_ids: The prompts, `[rows, tokens]`, padding included.
        mask: Mask of the whole text, `[rows, columns]` bool.
        arguments: Inputs that transformers would pass to the model, by name.
        shell: Module objects for the prefill, which may store values of the prompt; those in `model` if not given.
        walk: Walks the trees of the first step.
    """

    def __init__(
        self,
        runner: TransformersRunner,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        mask: torch.Tensor,
        arguments: Mapping[str, Any],
        shell: PreTrainedModel | None = None,
        walk: Callable[..., Walks] = walk_trees,
    ) -> None:
        self.walk = walk
        self._runner = runner
        self.serving = runner.serving
        self._model = model
        self._shell = model if shell is None else shell
        self._ids = input_ids
        self._mask = mask
        self._arguments = dict(arguments)
        self._cache_name = cache_name(model)

    def idle_tree(self) -> TokenTree:
        """Raise an error: no row is finished before its first step."""
        raise AssertionError("a row was finished before its prompt was read")

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """Return the tokens of the prompt as a tree without capacity for drafts."""
        pending = self._runner.begin_tree(row, text).tokens
        return TokenTree(pending, len(pending) - 1)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Return `True`: drafters may read the prompt, although `tree` has no capacity."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult:
        """Run the prefill; arguments as for `ModelRunner.forward`."""
        forest = Forest.of(trees)
        columns = [self._columns(row, forest.layout(row)) for row in range(len(forest))]
        keep = -min(int(places[0]) for places in columns)
        logits = self._read(keep).logits.float()
        width = logits.shape[1]
        rows = [(row + 1) * width + places for row, places in enumerate(columns)]
        return pass_result(forest, logits.flatten(0, 1), top_k, np.concatenate(rows))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Do nothing: the prefill kept the whole prompt."""

    def read(self) -> None:
        """Run the prefill without a step of ours. The last token will be sent again, so windows must keep all tokens.

        Raises:
            UnsupportedModelError: A window drops tokens, or steps of only tokens differ from the model's own.
        """
        cache: Any = self._arguments.get(self._cache_name)
        windows = [
            layer.sliding_window for layer in getattr(cache, "layers", ()) if getattr(layer, "is_sliding", False)
        ]
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        elif windows and self._mask.shape[1] >= min(windows):
            raise self._refusal("this version of transformers forgets what the last token, which is sent again, sees")
        self._read(1)

    def _columns(self, row: int, layout: Layout) -> NDArray[np.int64]:
        """Return the columns of the slots to read, counted from the end of the prompts: -1 is the last column."""
        width = self._ids.shape[1]
        visible = self._mask[row, -width:].nonzero()[:, 0].cpu().numpy()[-len(layout.order) :]
        return np.asarray(visible[layout.read_slots] - width, dtype=np.int64)

    def _read(self, keep: int) -> Any:
        """Run the model on the prompts, with the logits of at least the last `keep` columns.

        The caller's cache is restored afterwards, unless the runner continues with it.
        """
        arguments = self._arguments
        cache = self._arguments.get(self._cache_name)
        if "logits_to_keep" in forward_arguments(self._model):
            arguments["logits_to_keep"] = keep
        cached = cache.get_seq_length() if cache is not None and knows_its_length(cache) else 0
        # A mask of the prompts' length means that these repeat the cached text.
        new = self._ids.shape[1] - cached if cached and self._mask.shape[1] == self._ids.shape[1] else None
        inputs = self._shell.prepare_inputs_for_generation(
            self._ids, next_sequence_length=new, is_first_iteration=True, **arguments
        )
        saved = None if self._runner.chains else SavedState(cache)
        try:
            outputs = self._shell(**inputs, return_dict=True)
            self._hand_over(outputs)
        finally:
            if saved is not None:
                saved.restore()
        return outputs

    def _hand_over(self, outputs: Any) -> None:
        """Pass the cache of the prompt and the next positions to the runner.

        Raises:
            UnsupportedModelError: Steps of only tokens differ from the model's own.
        """
        model = self._model
        arguments = dict(self._arguments)
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = 1
        arguments = self._shell._update_model_kwargs_for_generation(outputs, arguments)
        cache = arguments[self._cache_name]
        if not knows_its_length(cache) or cache.get_seq_length() != self._mask.shape[1]:
            raise self._refusal("its cache and its prompt have different lengths")
        likely = outputs.logits[:, -1].float().topk(min(_TRIALS, outputs.logits.shape[-1])).indices.tolist()
        kind = ("prompt", type(self._runner), len(self._mask) > 1, *self._names())
        tried = (*kind, *model_setting(model))
        made = state_of(model).trials.made
        tries = tried not in made
        trials = list(zip(*likely, strict=True))[: _TRIALS if tries else 1]
        steps = [self._step(arguments, tokens) for tokens in trials]
        shifts = self._shifts(steps[0].get("position_ids"))
        plain: list[torch.Tensor] = []
        if tries:
            with preserved_state(self._shell):
                plain = [self._plain_step(inputs) for inputs in steps]
        self._runner.take_prompt(cache, self._mask, shifts)
        if tries and not any(self._agrees(*trial) for trial in zip(trials, plain, strict=True)):
            raise self._refusal("steps of only tokens differ from the model's own")
        made[tried] = True

    def _step(self, arguments: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
        """Return the inputs that transformers would send next."""
        ids = torch.cat([self._ids, self._ids.new_tensor(tokens)[:, None]], dim=1)
        inputs = self._shell.prepare_inputs_for_generation(ids, next_sequence_length=1, **arguments)
        return dict(inputs)

    def _plain_step(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the model's own logits `[rows, vocabulary]` for these inputs, and restore the cache."""
        saved = SavedState(inputs[self._cache_name])
        logits: torch.Tensor = self._shell(**inputs, return_dict=True).logits[:, -1].float()
        saved.restore()
        return logits

    def _shifts(self, positions: torch.Tensor | None) -> list[int]:
        """Return position id minus index in the text for each row.

        Args:
            positions: Position ids of the next token, `[rows or 1, 1]`, or `[kinds, rows or 1, 1]` for time, height and
                width; the first of four kinds is the index in the text.

        Raises:
            UnsupportedModelError: Time, height and width differ.
        """
        indices = self._mask.sum(dim=1).tolist()
        if positions is None:
            return [0] * len(indices)
        kinds = positions if positions.dim() == 3 else positions[None]
        kinds = kinds[1:, :, -1] if len(kinds) == 4 else kinds[:, :, -1]
        if not bool((kinds == kinds[:1]).all()):
            raise self._refusal("the prompt ends inside of an image; let text follow it")
        following = kinds[0].expand(len(indices)).tolist()
        return [int(position) - index for position, index in zip(following, indices, strict=True)]

    def _agrees(self, tokens: Sequence[int], plain: torch.Tensor) -> bool:
        logits = self._runner.try_step(tokens)
        epsilon = torch.finfo(self._model.dtype).eps
        tolerance = max(_MIN_TOLERANCE, 8 * epsilon) * float(plain.abs().max())
        return float((logits - plain).abs().max()) <= tolerance  # false for NaN

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"model={type(self._model).__name__} does not support a prompt with {', '.join(self._names())}: {reason}. "
            "Use model.generate"
        )

    def _names(self) -> list[str]:
        """Return the names of the model's inputs."""
        names = []
        for name, value in sorted(self._arguments.items()):
            if isinstance(value, Mapping):
                names += [f"{name}[{key!r}]" for key in sorted(value) if value[key] is not None]
            elif isinstance(value, torch.Tensor):
                names.append(name)
        return names
