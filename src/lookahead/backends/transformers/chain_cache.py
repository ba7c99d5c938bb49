"""What chains go on from: the cache of a model with running states, transformers' own, with a way back to where it was
before a pass; and what an encoder gave, which goes into each pass of its decoder.
"""

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
"""Arguments of the forward pass that are the same for each pass over a text: what the encoder gave, and its mask."""

_OF_THE_ENCODER = ("encoder_outputs", "attention_mask", "global_attention_mask")
_TRIED_LENGTH = 20
"""Places of what stands for an encoder's output in trials: more than the windows of a miniature."""


def is_encoder_decoder(model: PreTrainedModel) -> bool:
    """Whether `model` reads a text, an image or sound with an encoder before it writes."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


def take_source(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take what is about the encoder out of what transformers would hand to the model.

    What is left is about the decoder, by the names of models without an encoder.
    """
    source = {name: model_kwargs.pop(name) for name in _OF_THE_ENCODER if model_kwargs.get(name) is not None}
    for name in ("attention_mask", "position_ids"):
        if (value := model_kwargs.pop(f"decoder_{name}", None)) is not None:
            model_kwargs[name] = value
    return source


def source_of_row(source: Source, row: int, rows: int) -> Source:
    """The part of a batch of `rows` that is about one of them."""
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
    """The token ids that the encoder read for each of `rows` rows, hidden ones left out; none where it read no tokens
    of the decoder's vocabulary.

    Args:
        source: What the encoder gave.
        ids: What was handed to it, `[rows or a part of them, ...]`.
        rows: Rows of the call: so many for each of `ids` as texts are to be returned.
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
    """An output without what some decoders ask of their encoder's."""

    router_logits = attention_mask = None


def trial_source(model: PreTrainedModel, rows: int = 1) -> Source:
    """What an encoder might give, the same for each row: random numbers, as trials are of the decoder."""
    config = getattr(model.get_encoder(), "config", model.config).get_text_config()
    draws = torch.Generator().manual_seed(0)
    states = torch.randn(1, _TRIED_LENGTH, config.hidden_size, generator=draws).repeat(rows, 1, 1)
    return {"encoder_outputs": _Encoded(last_hidden_state=states.to(model.device, model.dtype))}


_READ_WHOLE = ("openai-gpt",)
"""Model types without a cache, whose passes are given the whole text."""

_FORGETFUL = ("falcon_mamba", "jamba", "mamba", "zamba")
"""Model types with layers of Mamba 1, whose scan over several tokens begins with zeros; see `chain_engine`."""

_RUNNING_STATES = ("conv_states", "recurrent_states")
"""What layers of transformers write in place; everything else in them is replaced by new tensors."""

_COLUMNS = ("keys", "values", "indexer_keys")
"""What layers of transformers keep of each token, `[..., tokens, size]`."""


class SavedState:
    """What a cache holds when this is made, until `restore` puts it back.

    Running states are written in place, so they are copied. Keys and values are not: a pass puts longer tensors in
    their place, and keeping the old ones costs nothing. In caches that are not transformers' `Cache`, such as the list
    of tensors of RWKV, everything is copied.

    Attributes:
        copied_bytes: Bytes of states that were copied.
        held_bytes: Bytes of all that the cache holds.
    """

    def __init__(self, content: Any) -> None:
        self.copied_bytes = self.held_bytes = 0
        self._containers: list[tuple[Any, Any]] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._visit(content, copies=not isinstance(content, Cache), opens=True)

    def restore(self) -> None:
        """Put the cache back.

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
            self.held_bytes += value.nbytes
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
    """One text on a model that keeps running states: what plain decoding would decode with, the tokens in it counted.

    Args:
        model: The model that it belongs to.
        content: A cache that is filled already; an empty one if not given.
        before: How many tokens of it come before the text that is decoded.
        source: What an encoder gave for this text.

    Attributes:
        name: What the model calls its cache.
        content: The cache as the model takes it; `None` before the first pass of a model that makes its own.
        copied_bytes: Bytes of states that `save` copied so far.
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
        """Bytes that states, keys and values take."""
        return SavedState(self.content).held_bytes

    def arguments(self) -> dict[str, Any]:
        """What a pass takes of it."""
        return {**self._source} if self.content is None else {**self._source, self.name: self.content}

    def input(self, tokens: torch.Tensor) -> torch.Tensor:
        """What a pass over `tokens` `[1, nodes]` is given."""
        if self._whole is None:
            return tokens
        self._given = torch.cat([self._whole, tokens], dim=1)
        return self._given

    def save(self) -> None:
        """Remember the cache as it is."""
        self._saved = SavedState(self.content)
        self.copied_bytes += self._saved.copied_bytes

    def settle(self, sent: int, kept: int) -> None:
        """Keep what a pass over `sent` tokens did, if all of them are `kept`; else put back what the last `save` found.

        Raises:
            UnsupportedModelError: See `SavedState.restore`.
        """
        saved = self._saved
        self._saved = None
        if kept == sent:
            self.length += sent
            if self._whole is not None:
                self._whole = self._given
        elif saved is not None:
            saved.restore()

    def keep(self, outputs: Any) -> None:
        """Take the cache from what the first pass gave, if the model makes its own."""
        if self.content is None:
            self.content = outputs.get(self.name)


def row_of_batch(cache: Cache, row: int, counted: torch.Tensor) -> Cache:
    """What a cache of a batch holds of one row, without the columns of hidden tokens.

    Args:
        cache: The cache, which stays as it is.
        counted: Which columns count, `[columns]` bool; hidden ones come first.
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
    """Whether a model of class `kind` keeps something else of the text than keys and values of each token."""
    if getattr(kind, "_is_stateful", False):
        return True
    if not kind._supports_default_dynamic_cache():
        return any(name in inspect.signature(kind.forward).parameters for name in CACHE_ARGUMENTS)
    try:
        layers = DynamicCache(config=config.get_text_config(decoder=True)).layers
    except (AttributeError, ValueError):  # such as of BLT, whose configuration says nothing of layers
        return False
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


def reads_whole(model: PreTrainedModel) -> bool:
    """Whether each pass of `model` is given the whole text."""
    return model.config.model_type in _READ_WHOLE


def is_forgetful(model: PreTrainedModel) -> bool:
    """Whether a pass of `model` over several tokens forgets the state that it should go on from."""
    return model.config.model_type in _FORGETFUL


def check_states(model: PreTrainedModel, cache: Cache) -> None:
    """Refuse a cache that decoding of `model` cannot go on with.

    Raises:
        UnsupportedArgumentError: It has no room for the model's states, or they are elsewhere.
    """
    reasons = {
        "whose passes are given the whole text": reads_whole,
        "whose own passes over several tokens forget the state behind them": is_forgetful,
    }
    for why, applies in reasons.items():
        if applies(model):
            raise UnsupportedArgumentError(f"{CACHE} is not supported for {type(model).__name__}, {why}; leave it out")
    expected = empty_cache(model)
    layers = [] if expected is None else [type(layer) for layer in expected.layers]
    if not layers or cache.offloading or [type(layer) for layer in cache.layers] != layers:
        raise UnsupportedArgumentError(
            f"{CACHE}={type(cache).__name__} is not supported for {type(model).__name__}, which keeps a "
            "running state; pass DynamicCache(config=model.config), the cache that an earlier call returned, or none"
        )


def empty_cache(model: PreTrainedModel) -> Cache | None:
    """The cache that transformers begins with; `None` where the model makes it in its first pass."""
    if is_encoder_decoder(model):  # some classes have a way of their own to make its second part
        made: dict[str, Any] = {}
        model._prepare_cache_for_generation(GenerationConfig(), made, GenerationMode.GREEDY_SEARCH, 1, 1)
        cache: Cache | None = made.get(cache_name(model))
        return cache
    if not model._supports_default_dynamic_cache():
        return None
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config)
