"""Equivalence of a kind of model: comparisons of trees and chains with plain decoding, on a miniature.

A miniature has every window, chunk and context of the model, a few tokens long, so that a short text is longer than all
of them. It finds differences that the model itself shows only in long texts: layers that count keys instead of
positions, scales that change with the length, tables that end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from threading import Lock
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from lookahead.backends.base import Runner
from lookahead.backends.transformers.attention import PACKED_ROWS
from lookahead.backends.transformers.cache_names import CACHE
from lookahead.backends.transformers.chain_cache import ChainRow, has_running_state
from lookahead.backends.transformers.comparisons import trial_runner
from lookahead.backends.transformers.limits import Limits, shortest
from lookahead.backends.transformers.miniature import (
    build_miniature,
    draw_text,
    plain_logits,
    quiet,
    shrunk,
    usual_tokens,
)
from lookahead.backends.transformers.model_state import of_config
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.transformers.shared_clone import SharedClone, chain_engine
from lookahead.backends.transformers.surroundings import GLOBAL_HOOKS, Surroundings
from lookahead.backends.transformers.tree_cache import Row
from lookahead.backends.trials import Draft, chains, difference, follow
from lookahead.core.token_tree import TokenTree
from lookahead.errors import not_of_signal

_PROMPT = 6
_LONG_PROMPT = 30
"""Tokens of a prompt longer than every window."""
_TEXT = 56
"""Tokens of a text: more than any length of a miniature."""
_NODES = 6
"""Largest tree: small enough for the periods of Llama 4's query scale."""
_SEEDS = 3
"""Number of random weights that must all show a difference, because rounding decides near-ties between experts."""
_TOLERANCE = 1e-3
"""Tolerance as a share of the largest logit: far above rounding, far below the effect of a wrong mask or position."""


class _Comparison:
    """Comparison of plain decoding and drafts of a miniature along texts.

    Args:
        model: The miniature.
        seed: Seed of texts and drafts.
        keeps_state: Whether the original model has a running state; a miniature without one is not comparable.

    Attributes:
        positions_end: Whether plain decoding failed beyond the context.
    """

    def __init__(self, model: PreTrainedModel, seed: int, keeps_state: bool) -> None:
        self._model = model
        self._is_alike = not keeps_state or has_running_state(type(model), model.config)
        self._draws = random.Random(seed)
        self.positions_end = False
        self._limits = limit = Limits(model.config)
        self._usual = usual_tokens(model.config)
        self._text = draw_text(_TEXT, seed, self._usual)[: limit.broken_after]
        try:
            self._expected = plain_logits(model, [self._text], _PROMPT)[0]
        except (IndexError, RuntimeError):  # beyond a table of positions
            if limit.context is None:
                raise
            self.positions_end = True
            self._text = self._text[: limit.context]
            self._expected = plain_logits(model, [self._text], _PROMPT)[0]
        if not bool(torch.isfinite(self._expected).all()):
            raise ArithmeticError("the logits are not finite")
        self._tolerance = _TOLERANCE * float(self._expected.abs().max())
        self._second: torch.Tensor | None = None

    def trees(self) -> bool:
        """Compare trees along a text, and after a long prompt."""
        if not self._agrees(self._runner(), [self._text], [self._expected]):
            return False
        text = self._text[: _LONG_PROMPT + 10]
        prompt = min(_LONG_PROMPT, len(text) - 4)
        return self._agrees(self._runner(), [text], plain_logits(self._model, [text], prompt), prompt)

    def chains(self) -> bool:
        """Compare chains along a text, with rejected drafts, restored states and pending tokens."""
        runner = trial_runner(self._model, chain_engine(self._model))
        return self._is_alike and self._agrees(runner, [self._text], [self._expected], draft=chains(self._draws))

    def plain(self) -> bool:
        """Compare two texts in turn, one token at a time; a state inside the model would mix them."""
        rows = [ChainRow(self._model), ChainRow(self._model)]
        return self._is_alike and self._side_by_side(ChainRunner(self._model, rows, drafts=False))

    def batches(self) -> bool:
        """Compare a padded batch of two texts of different lengths with single texts."""
        return self._side_by_side(self._runner(2))

    def packed_rows(self) -> bool:
        """Compare packed rows of two texts of different lengths with single texts."""
        clone = SharedClone(self._model, PACKED_ROWS)
        runner = ModelRunner(clone.module, positions_end=self.positions_end)
        with runner.serving([Row(), Row()]):
            return self._side_by_side(runner)

    def plain_rows(self) -> bool:
        """Compare a batch of two texts with single texts, both in plain decoding."""
        texts = [text[:_LONG_PROMPT] for text in self._two_texts()]
        return difference(list(plain_logits(self._model, texts, _PROMPT)), self._alone(texts)) <= self._tolerance

    def without_cache(self) -> bool:
        """Compare plain decoding with and without a cache, on a text with padding tokens: some models skip these."""
        config = self._model.config
        text = self._text[: shortest(self._limits.changes_after, self._limits.picks_after)]
        pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
        pad = getattr(config, "pad_token_id", None) if pad is None else pad
        cached = self._expected[: len(text) - _PROMPT]
        if pad is not None:
            text = [pad if index % 5 == 4 else token for index, token in enumerate(text)]
            cached = plain_logits(self._model, [text], _PROMPT)[0]
        whole = plain_logits(self._model, [text], _PROMPT, use_cache=False)[0]
        return difference([cached], [whole]) <= self._tolerance

    def hidden(self, *indices: int) -> bool:
        """Compare a text with hidden tokens at these indices."""
        runner = self._runner(padding=len(indices))
        longest = runner.counts_hidden_after(between=indices[0] > 0)  # longer ones are refused
        text = list(self._text)
        for index in indices:
            text.insert(index, self._usual[0])
        text = text[:longest]
        visible = [token for index, token in enumerate(text) if index not in indices]
        prompt = _PROMPT + len(indices) if len(visible) > _PROMPT else len(text) - 1
        try:
            plain = plain_logits(self._model, [text], prompt, [indices])
        except (IndexError, RuntimeError):  # it counts them as positions, beyond the table
            return False
        return self._agrees(runner, [visible], plain)

    def padded_caches(self) -> bool:
        """Compare the first layer's cached keys of a text after padding."""
        text = self._text[:_PROMPT]
        padding = 3
        runner = self._runner(padding=padding)
        tree = TokenTree(text)
        runner.forward([tree])
        runner.commit([range(len(tree))])
        ids = torch.tensor([self._usual[:1] * padding + text])
        mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
        output = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=1, do_sample=False, return_dict_in_generate=True
        )
        padded, plain = (cache.layers[0].keys[0] for cache in (runner.rows[0].cache, output[CACHE]))
        prompts = plain[:, padding : padding + _PROMPT]
        return difference([padded[:, :_PROMPT]], [prompts]) <= self._tolerance

    def _runner(self, rows: int = 1, padding: int = 0) -> ModelRunner:
        runner = ModelRunner(self._model, rows, most_nodes=_NODES, positions_end=self.positions_end)
        runner.rows[0].padding = padding
        return runner

    def _side_by_side(self, runner: Runner) -> bool:
        # Batches of longer texts are refused.
        texts = [text[: runner.changes_after] for text in self._two_texts()]
        return self._agrees(runner, texts, self._alone(texts))

    def _two_texts(self) -> list[list[int]]:
        return [self._text, self._text[5:]]

    def _alone(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Return the logits of beginnings of the two texts, each alone in plain decoding."""
        if self._second is None:
            self._second = plain_logits(self._model, self._two_texts()[1:], _PROMPT)[0]
        return [
            logits[: len(text) - _PROMPT] for logits, text in zip((self._expected, self._second), texts, strict=True)
        ]

    def _agrees(
        self,
        runner: Runner,
        texts: Sequence[Sequence[int]],
        plain: Sequence[torch.Tensor] | torch.Tensor,
        prompt: int = _PROMPT,
        draft: Draft | None = None,
    ) -> bool:
        """Return whether drafts along texts equal the logits `[tokens - prompt, vocabulary]` of plain decoding."""
        return difference(follow(runner, texts, prompt, draft or self._draft), list(plain)) <= self._tolerance

    def _draft(self, tree: TokenTree, following: Sequence[int]) -> list[int]:
        """Draft some right and some wrong tokens, so that slots differ from positions."""
        wrong = [self._usual[self._draws.randrange(37)] for _ in range(2)]
        if self._draws.random() < 0.5:
            tree.add_candidates(wrong)
        path = tree.add_candidates(following[: self._draws.randrange(3)])
        if path and len(tree) - tree.root < _NODES:
            tree.add_candidates(wrong[:1], path[0])
        return path


class Question(NamedTuple):
    """A question about a kind of model.

    Attributes:
        trial: Comparison on a miniature.
        unknown: Answer without a miniature: the cautious one.
        seeds: Number of random weights that must all fail.
    """

    trial: Callable[[_Comparison], bool]
    unknown: bool = False
    seeds: int = _SEEDS


QUESTIONS = {
    # Does plain decoding equal ...
    "trees": Question(_Comparison.trees),  # trees? Else the model is refused, or runs chains.
    "chains": Question(_Comparison.chains),  # chains? Else the model is refused.
    "plain": Question(_Comparison.plain),  # single tokens? Else an Engine cannot fall back on them.
    "batches": Question(_Comparison.batches),  # rows of different lengths? Else batches are refused.
    "plain_rows": Question(_Comparison.plain_rows),  # its own batches? Else batches are refused.
    "without_cache": Question(_Comparison.without_cache),  # itself without a cache? Else use_cache=False is refused.
    "packed_rows": Question(_Comparison.packed_rows),  # packed rows? Else they are padded.
    "padding": Question(lambda texts: texts.hidden(0, 1, 2)),  # rows after padding? Else hidden tokens are refused.
    "holes": Question(lambda texts: texts.hidden(2)),  # rows with hidden tokens inside? Else these are refused.
    # Are cached keys after hidden tokens equal? If plain decoding counts these as positions, logits are equal, because
    # RoPE uses distances, but keys are not: a cache of them is refused.
    "padded_caches": Question(_Comparison.padded_caches),
    # Does the model fail beyond its context? Else texts may be longer. Weights do not matter.
    "positions_end": Question(lambda texts: texts.positions_end, unknown=True, seeds=1),
}


class Equivalence:
    """Answers to `QUESTIONS` for a kind of model, each computed on first use.

    Args:
        model: A model of that kind; no reference to it is kept.

    Attributes:
        obstacle: Reason for a missing miniature; `None` if there was one.
        is_hooked: Whether there were global hooks.
    """

    obstacle: str | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._class = type(model)
        try:
            self._config = deepcopy(model.config)  # protects it from later changes
        except Exception as error:  # it contains a lock, for example
            not_of_signal(error)
            self._config = model.config
        self._code = Surroundings(model)
        self.is_hooked = any(GLOBAL_HOOKS)
        self._comparisons: dict[int, _Comparison] = {}
        self._answers: dict[str, bool] = {}
        self._lock = Lock()  # models of several threads may be of one kind

    @property
    def is_current(self) -> bool:
        """Whether the code of the model's classes is unchanged."""
        return self._code.hold()

    def holds(self, name: str) -> bool:
        """Return the answer to one of `QUESTIONS`."""
        with self._lock:
            if name not in self._answers:
                self._answers[name] = self._answer(QUESTIONS[name])
            return self._answers[name]

    @property
    def has_miniature(self) -> bool:
        """Whether a miniature could be built and run."""
        return self.obstacle is None

    def drop_miniatures(self) -> None:
        """Free the miniatures; a question without an answer builds them again."""
        self._comparisons = {}

    def _answer(self, question: Question) -> bool:
        comparisons = self._comparisons  # another thread may drop them
        keeps_state = has_running_state(self._class, self._config)
        with quiet(), torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
            for seed in range(question.seeds):
                try:
                    if seed not in comparisons:
                        miniature = build_miniature(self._class, self._config, seed)
                        comparisons[seed] = _Comparison(miniature, seed, keeps_state)
                except Exception as error:
                    not_of_signal(error)
                    # The miniature cannot be built, or its plain decoding fails.
                    self.obstacle = f"{type(error).__name__}: {error}"
                    return question.unknown
                try:
                    if question.trial(comparisons[seed]):
                        return True
                except Exception as error:
                    not_of_signal(error)
                    continue  # only the drafts failed
        return False


_MAX_KINDS = 256
"""Kinds of models with cached answers."""
_MAX_MINIATURES = 32
"""Kinds of models with miniatures, of about a megabyte each."""
_by_kind: dict[tuple[object, ...], list[Equivalence]] = {}
"""Equivalences by all that a trial reads of a model, most recently used last. Of replaced code, the first one stays."""
_lock = Lock()


def equivalence(model: PreTrainedModel) -> Equivalence:
    """Return the equivalence of the kind of `model`. Each question takes some tenths of a second once."""
    return of_config(model, ("kind", model.config._attn_implementation), lambda: _look_up(model))


def _look_up(model: PreTrainedModel) -> Equivalence:
    kind, config = type(model), model.config
    try:
        values: object = json.dumps(shrunk(config), sort_keys=True, default=str)
    except Exception as error:  # the configuration has objects beside plain values
        not_of_signal(error)
        values = object()  # equal to no other
    key = (kind, type(config), values, has_running_state(kind, config), config._attn_implementation)
    with _lock:
        known = _by_kind.pop(key, [])
        current = next((one for one in known if one.is_current), None) or Equivalence(model)
        # The first code comes back when a replacement is undone. Hooks are compared by addresses, which are reused.
        first = [one for one in known[:1] if one is not current and not one.is_hooked]
        _by_kind[key] = [*first, current]
        for others in list(_by_kind.values())[:-_MAX_MINIATURES]:
            for other in others:
                other.drop_miniatures()
        if len(_by_kind) > _MAX_KINDS:
            del _by_kind[next(iter(_by_kind))]
        return current
