"""The pass over a prompt that is more than tokens, such as one with images: the model's own prefill, once."""

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

_LEAST_TOLERANCE = 1e-3
"""Of the largest logit. A wrong position or a missing input makes for far more."""
_TRIALS = 3
"""A difference counts if it shows after each of so many tokens: near-ties between experts are rounding's."""


class PromptPass(Backend):
    """A backend for the first step of a call: the model reads the prompt with all its inputs, as it does by itself.

    Later steps send tokens alone, at the positions that the model counts from there. Whether that is enough for this
    kind of inputs is tried once for each model: the model's own next step must give the same logits.

    Args:
        runner: Runs the steps to come.
        model: The model itself, which the runner may run as a clone.
        input_ids: The prompts, `[rows, tokens]`, padding included.
        mask: Which tokens of the whole text count, `[rows, columns]` bool.
        arguments: What transformers would hand to the model, by name.
        shell: The module objects that read the prompts and keep what the model notes of them; those of `model` if not
            given.
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
        self._model = model
        self._reads = model if shell is None else shell
        self._ids = input_ids
        self._mask = mask
        self._arguments = dict(arguments)
        self._cache_name = cache_name(model)

    def idle_tree(self) -> TokenTree:
        """No row is finished before its first step."""
        raise AssertionError("a row was finished before its prompt was read")

    def begin_tree(self, row: int, text: Sequence[int]) -> TokenTree:
        """The tokens of the prompt, without room for drafts."""
        pending = self._runner.begin_tree(row, text).tokens
        return TokenTree(pending, len(pending) - 1)

    def wants_draft(self, tree: TokenTree) -> bool:
        """Drafters are asked, as they may read the prompt, but `tree` has no room."""
        return True

    def forward(self, trees: Sequence[TokenTree], top_k: int = 0) -> PassResult:
        """Let the model read the prompts; arguments as those of `ModelRunner.forward`."""
        forest = Forest.of(trees)
        columns = [self._columns(row, forest.layout(row)) for row in range(len(forest))]
        keep = -min(int(places[0]) for places in columns)
        logits = self._read(keep).logits.float()
        width = logits.shape[1]
        rows = [(row + 1) * width + places for row, places in enumerate(columns)]
        return pass_result(forest, logits.flatten(0, 1), top_k, np.concatenate(rows))

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """All of the prompts was kept when it was read."""

    def read(self) -> None:
        """Let the model read the prompts for the steps to come, without one of them.

        Their last token is to be sent again. So layers with a window have to keep all of the prompt.

        Raises:
            UnsupportedModelError: They cannot, or steps of tokens alone are not what the model does.
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
        """Where the tokens that are read lie in the prompts, counted from their end: -1 is the last column."""
        width = self._ids.shape[1]
        counted = self._mask[row, -width:].nonzero()[:, 0].cpu().numpy()[-len(layout.order) :]
        return np.asarray(counted[layout.read_slots] - width, dtype=np.int64)

    def _read(self, keep: int) -> Any:
        """What the model gives for the prompts, with the logits of `keep` columns at least.

        The cache that it was handed is left as it was, unless steps go on with that itself.
        """
        arguments = self._arguments
        cache = self._arguments.get(self._cache_name)
        if "logits_to_keep" in forward_arguments(self._model):
            arguments["logits_to_keep"] = keep
        held = cache.get_seq_length() if cache is not None and knows_its_length(cache) else 0
        # A mask that is as long as the prompts says that these repeat what the cache holds.
        new = self._ids.shape[1] - held if held and self._mask.shape[1] == self._ids.shape[1] else None
        inputs = self._reads.prepare_inputs_for_generation(
            self._ids, next_sequence_length=new, is_first_iteration=True, **arguments
        )
        saved = None if self._runner.chains else SavedState(cache)
        try:
            outputs = self._reads(**inputs, return_dict=True)
            self._go_on(outputs)
        finally:
            if saved is not None:
                saved.restore()
        return outputs

    def _go_on(self, outputs: Any) -> None:
        """Give the runner the cache of the prompt and the positions after it.

        Raises:
            UnsupportedModelError: Steps of tokens alone are not what the model does.
        """
        model = self._model
        arguments = dict(self._arguments)
        if "logits_to_keep" in arguments:
            arguments["logits_to_keep"] = 1
        arguments = self._reads._update_model_kwargs_for_generation(outputs, arguments)
        cache = arguments[self._cache_name]
        if not knows_its_length(cache) or cache.get_seq_length() != self._mask.shape[1]:
            raise self._refusal("its cache has other columns than the prompt has tokens")
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
            with preserved_state(self._reads):
                plain = [self._plain_step(inputs) for inputs in steps]
        self._runner.take_prompt(cache, self._mask, shifts)
        if tries and not any(self._agrees(*trial) for trial in zip(trials, plain, strict=True)):
            raise self._refusal("steps of tokens alone differ from those that it makes by itself")
        made[tried] = True

    def _step(self, arguments: dict[str, Any], tokens: Sequence[int]) -> dict[str, Any]:
        """What transformers would send next."""
        ids = torch.cat([self._ids, self._ids.new_tensor(tokens)[:, None]], dim=1)
        inputs = self._reads.prepare_inputs_for_generation(ids, next_sequence_length=1, **arguments)
        return dict(inputs)

    def _plain_step(self, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits `[rows, vocabulary]` of that, which leaves no trace."""
        saved = SavedState(inputs[self._cache_name])
        logits: torch.Tensor = self._reads(**inputs, return_dict=True).logits[:, -1].float()
        saved.restore()
        return logits

    def _shifts(self, positions: torch.Tensor | None) -> list[int]:
        """By how much the position of a token of each row differs from its place in the text.

        Args:
            positions: Those of the next token, `[rows or 1, 1]`, or `[kinds, rows or 1, 1]` of a model that counts
                time, height and width apart; the first of four kinds is the place in the text.

        Raises:
            UnsupportedModelError: They differ by more than their kind.
        """
        places = self._mask.sum(dim=1).tolist()
        if positions is None:
            return [0] * len(places)
        kinds = positions if positions.dim() == 3 else positions[None]
        kinds = kinds[1:, :, -1] if len(kinds) == 4 else kinds[:, :, -1]
        if not bool((kinds == kinds[:1]).all()):
            raise self._refusal("the prompt ends inside of an image; let text follow it")
        following = kinds[0].expand(len(places)).tolist()
        return [int(position) - place for position, place in zip(following, places, strict=True)]

    def _agrees(self, tokens: Sequence[int], plain: torch.Tensor) -> bool:
        logits = self._runner.try_step(tokens)
        epsilon = torch.finfo(self._model.dtype).eps
        tolerance = max(_LEAST_TOLERANCE, 8 * epsilon) * float(plain.abs().max())
        return float((logits - plain).abs().max()) <= tolerance  # not if they are no numbers

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"model={type(self._model).__name__} cannot be run on a prompt with {', '.join(self._names())}: {reason}. "
            "Use model.generate"
        )

    def _names(self) -> list[str]:
        """What the model reads, by name."""
        names = []
        for name, value in sorted(self._arguments.items()):
            if isinstance(value, Mapping):
                names += [f"{name}[{key!r}]" for key in sorted(value) if value[key] is not None]
            elif isinstance(value, torch.Tensor):
                names.append(name)
        return names
