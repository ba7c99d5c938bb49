"""Caches of chains: transformers' own, with a restore to the state before a pass; and outputs of encoders."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import BaseModelOutput

from lookahead.backends.base import TextRow, vocabulary_size
from lookahead.backends.transformers.cache_names import CACHE, CACHE_ARGUMENTS, cache_name
from lookahead.backends.transformers.limits import limits_of
from lookahead.backends.transformers.snapshots import replace_items
from lookahead.errors import UnsupportedArgumentError, UnsupportedModelError

Source = Mapping[str, Any]
"""Arguments that are equal for all passes over a text: the output of the encoder, and its mask."""

_OF_THE_ENCODER = ("encoder_outputs", "attention_mask", "global_attention_mask")
_TRIAL_LENGTH = 20
"""Length of the random encoder output in trials: more than the windows of a miniature."""


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Return whether `model` has an encoder for text, images or sound."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def take_source(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the encoder's arguments from `model_kwargs`, and return them.

    The decoder's arguments remain, with the names of models without an encoder.
    """
    source = {name: model_kwargs.pop(name) for name in _OF_THE_ENCODER if model_kwargs.get(name) is not None}
    for name in ("attention_mask", "position_ids"):
        if (value := model_kwargs.pop(f"decoder_{name}", None)) is not None:
            model_kwargs[name] = value
    return source


def source_of_row(source: Source, row: int, rows: int) -> Source:
    """Return the part of a batch of `rows` for one row."""
    return {name: _part(value, row, rows) for name, value in source.items()}


def _part(value: Any, row: int, rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[row : row + 1] if value.dim() and value.shape[0] == rows else value
    if isinstance(value, tuple):
        return tuple(_part(item, row, rows) for item in value)
    if isinstance(value, Mapping):  # outputs of modules
        return type(value)(**{name: _part(item, row, rows) for name, item in value.items()})
    return value


def source_tokens(model: PreTrainedModel, source: Source, ids: torch.Tensor | None, rows: int) -> list[list[int]]:
    """Return the visible token ids of the encoder's input for each row; none if they are of another vocabulary.

    Args:
        model: The model.
        source: Output of the encoder.
        ids: Input of the encoder, `[rows or a divisor of them, ...]`.
        rows: Rows of the call; each input has `num_return_sequences` of them.
    """
    if ids is None or ids.dim() != 2 or ids.is_floating_point() or rows % len(ids):
        return [[]] * rows
    if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary_size(model):
        return [[]] * rows
    mask = source.get("attention_mask")
    ids = ids.repeat_interleave(rows // len(ids), dim=0).cpu()
    if mask is None or mask.shape != ids.shape:
        return [[int(token) for token in row] for row in ids.tolist()]
    return [row[seen].tolist() for row, seen in zip(ids, mask.bool().cpu(), strict=True)]


class _Encoded(BaseModelOutput):  # type: ignore[misc]
    """Encoder output with empty fields that some decoders read."""

    router_logits = attention_mask = None


def trial_source(model: PreTrainedModel, rows: int = 1) -> Source:
    """Return a random encoder output, equal for each row, for trials of the decoder."""
    config = getattr(model.get_encoder(), "config", model.config).get_text_config()
    draws = torch.Generator().manual_seed(0)
    states = torch.randn(1, _TRIAL_LENGTH, config.hidden_size, generator=draws, device="cpu").repeat(rows, 1, 1)
    return {"encoder_outputs": _Encoded(last_hidden_state=states.to(model.device, model.dtype))}


_READ_WHOLE = ("openai-gpt",)
"""Model types without a cache; each pass needs the whole text."""

_FORGETFUL = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types with layers of Mamba 1: a pass over several tokens starts with zero states; see `chain_engine`."""

_RUNNING_STATES = ("conv_states", "recurrent_states")
"""Attributes of transformers' layers that passes write in place; others are replaced by new tensors."""

_COLUMNS = ("keys", "values", "indexer_keys")
"""Attributes of transformers' layers with an entry for each token, `[..., tokens, size]`."""


class SavedState:
    """Saved content of a cache, for `restore`.

    Running states are copied, because passes write them in place. Keys and values are replaced by longer tensors, so a
    reference is enough. For other caches than transformers' `Cache` (a list of tensors in RWKV) everything is copied.

    Attributes:
        copied_bytes: Bytes of copied states.
        total_bytes: Bytes of the whole cache.
    """

    def __init__(self, content: Any) -> None:
        self.copied_bytes = 0
        self.total_bytes = 0
        self._containers: list[tuple[Any, Any]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._visit(content, copies=not isinstance(content, Cache), opens=True)

    def restore(self) -> None:
        """Restore the cache.

        Raises:
            UnsupportedModelError: The model wrote into a tensor that was not copied.
        """
        for tensor, version in self._versions:
            if tensor._version != version:
                raise UnsupportedModelError("the model writes into a part of its cache that transformers only replaces")
        for container, content in self._containers:
            if isinstance(container, dict):
                replace_items(container, content)
            else:
                container[:] = content
        for tensor, saved in self._copies:
            tensor.copy_(saved)

    def _visit(self, value: Any, copies: bool, opens: bool = False) -> None:
        if isinstance(value, torch.Tensor):
            self.total_bytes += value.nbytes
            if copies:
                self._copies.append((value, value.clone()))
                self.copied_bytes += value.nbytes
            elif not value.is_inference():
                self._versions.append((value, value._version))
        elif isinstance(value, dict | list | tuple):
            if not isinstance(value, tuple):
                self._containers.append((value, copy.copy(value)))
            for item in value.values() if isinstance(value, dict) else value:
                self._visit(item, copies)
        elif value is not None and (
            opens or isinstance(value, Cache | CacheLayerMixin | LinearAttentionCacheLayerMixin)
        ):
            attributes = vars(value)
            self._containers.append((attributes, dict(attributes)))
            running = _RUNNING_STATES if isinstance(value, LinearAttentionCacheLayerMixin) else ()
            for name, item in attributes.items():
                self._visit(item, copies or name in running)


class ChainRow(TextRow):
    """One text on a model with running states, with transformers' own cache.

    Args:
        model: The model.
        content: Filled cache; an empty one if not given.
        before: Number of cached tokens before the decoded text.
        source: Output of the encoder for this text.

    Attributes:
        name: Name of the model's cache argument.
        content: The cache; `None` before the first pass of a model that makes its own.
        copied_bytes: Bytes of states that `save` has copied.
    """

    def __init__(
        self, model: PreTrainedModel, content: Cache | None = None, before: int = 0, source: Source | None = None
    ) -> None:
        self.name = cache_name(model)
        self.content: Any = empty_cache(model) if content is None else content
        self.length = 0 if content is None else content.get_seq_length()
        self.before = before
        self.shift = limits_of(model).first_position
        self.copied_bytes = 0
        self._source = source or {}
        self._whole = torch.empty(1, 0, dtype=torch.long, device=model.device) if reads_whole(model) else None
        self._saved: SavedState | None = None

    @property
    def bytes(self) -> int:
        """Bytes of states, keys and values."""
        return SavedState(self.content).total_bytes

    def declare_prompt(self, tokens: int) -> None:
        """See `TextRow`. These layers would take the first part for the whole prompt."""
        for layer in getattr(self.content, "layers", ()) if not self.length else ():
            if hasattr(layer, "set_prefill_length"):
                layer.set_prefill_length(tokens)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of a pass: cache and source."""
        return {**self._source} if self.content is None else {**self._source, self.name: self.content}

    def input(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the input of a pass over `tokens` `[1, nodes]`; the whole text for models without a cache."""
        if self._whole is None:
            return tokens
        self._input = torch.cat([self._whole, tokens], dim=1)
        return self._input

    def save(self) -> None:
        """Save the cache."""
        self._saved = SavedState(self.content)
        self.copied_bytes += self._saved.copied_bytes

    def settle(self, sent: int, accepted: int) -> None:
        """Keep the states after a pass over `sent` tokens if all are `accepted`; otherwise restore the saved cache.

        Raises:
            UnsupportedModelError: See `SavedState.restore`.
        """
        saved = self._saved
        self._saved = None
        if accepted == sent:
            self.length += sent
            if self._whole is not None:
                self._whole = self._input
        elif saved is not None:
            saved.restore()

    def keep(self, outputs: Any) -> None:
        """Take the cache from the outputs of the first pass, if the model makes its own."""
        if self.content is None:
            self.content = outputs.get(self.name)


def row_of_batch(cache: Cache, row: int, counted: torch.Tensor) -> Cache:
    """Copy one row of a batch's cache, without hidden columns.

    Args:
        cache: The cache, which stays unchanged.
        row: The row.
        counted: Mask of visible columns, `[columns]` bool; hidden ones come first.
    """
    row_cache = copy.deepcopy(cache)
    row_cache.reorder_cache(torch.tensor([row], device=counted.device))
    for layer in row_cache.layers:
        for name in _COLUMNS:
            states = getattr(layer, name, None)
            if states is not None and states.numel():
                setattr(layer, name, states[..., counted[-states.shape[-2] :].to(states.device), :])
        if hasattr(layer, "cumulative_length"):
            layer.cumulative_length -= int((~counted).sum())
    return row_cache


def has_running_state(kind: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Return whether a model of class `kind` has states beside keys and values of each token."""
    if getattr(kind, "_is_stateful", False):
        return True
    if not kind._supports_default_dynamic_cache():
        return any(name in inspect.signature(kind.forward).parameters for name in CACHE_ARGUMENTS)
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (AttributeError, ValueError):  # for example BLT's configuration, which has no layers
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def reads_whole(model: PreTrainedModel) -> bool:
    """Return whether each pass of `model` needs the whole text."""
    return model.config.model_type in _READ_WHOLE


def is_forgetful(model: PreTrainedModel) -> bool:
    """Return whether a pass of `model` over several tokens ignores the state before them."""
    return model.config.model_type in _FORGETFUL


def check_states(model: PreTrainedModel, cache: Cache) -> None:
    """Refuse a cache that decoding of `model` cannot continue.

    Raises:
        UnsupportedArgumentError: The cache lacks the model's states, or the model does not support one.
    """
    reasons = {
        "because each pass needs the whole text": reads_whole,
        "because its own passes over several tokens forget the state before them": is_forgetful,
    }
    for why, applies in reasons.items():
        if applies(model):
            raise UnsupportedArgumentError(f"{CACHE} is not supported for {type(model).__name__} {why}; leave it out")
    expected = empty_cache(model)
    layers = [] if expected is None else [type(layer) for layer in expected.layers]
    if not layers or cache.offloading or [type(layer) for layer in cache.layers] != layers:
        raise UnsupportedArgumentError(
            f"{CACHE}={type(cache).__name__} is not supported for {type(model).__name__}, which keeps a running state; "
            "pass DynamicCache(config=model.config), the cache of an earlier call, or none"
        )


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """Return transformers' initial cache; `None` if the model makes it in its first pass."""
    if is_encoder_decoder(model):  # some classes make its second part themselves
        made: dict[str, Any] = {}
        model._prepare_cache_for_generation(GenerationConfig(), made, GenerationMode.GREEDY_SEARCH, 1, 1)
        cache: Cache | None = made.get(cache_name(model))
        return cache
    if not model._supports_default_dynamic_cache():
        return None
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config)
