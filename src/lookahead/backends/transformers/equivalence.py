"""What is asked of a kind of model: trees and chains against plain decoding, on a miniature of it.

A miniature has every window, chunk and context of the model, a few tokens long, so that a short text runs past all of
them. It finds what the model's own forward passes would show only far into a long text: layers that count keys instead
of positions, scales that change with the length, tables that end.
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
from lookahead.backends.transformers.composition import Surroundings
from lookahead.backends.transformers.limits import Limits, shortest
from lookahead.backends.transformers.miniature import build_miniature, draw_text, plain_logits, quiet, usual_tokens
from lookahead.backends.transformers.model_state import of_config
from lookahead.backends.transformers.runner import ChainRunner, ModelRunner
from lookahead.backends.transformers.shared_clone import SharedClone, chain_engine
from lookahead.backends.transformers.tree_cache import Row
from lookahead.backends.trials import Draft, chains, difference, follow
from lookahead.core.token_tree import TokenTree

_PROMPT = 6
_LONG_PROMPT = 30
"""Tokens of a prompt that is longer than every window."""
_TEXT = 56
"""Tokens of a text: more than any length of a miniature."""
_NODES = 6
"""Nodes of a tree at most, so that some fit between the places where a scale changes."""
_SEEDS = 3
"""A difference counts if it shows with each of so many random weights: near-ties between experts are rounding's."""
_TOLERANCE = 1e-3
"""Of the largest logit. A wrong mask or position makes logits differ by about as much as other tokens do; rounding far
less."""


class _Comparison:
    """Texts along which plain decoding of a miniature and its drafts are compared.

    Args:
        seed: Of texts and drafts.
        keeps_state: Whether the model has a running state; without one, the miniature would not be like it.

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
        except (IndexError, RuntimeError):  # a table came to its end
            if limit.context is None:
                raise
            self.positions_end = True
            self._text = self._text[: limit.context]
            self._expected = plain_logits(model, [self._text], _PROMPT)[0]
        if not bool(torch.isfinite(self._expected).all()):
            raise ArithmeticError("the logits are not finite")
        self._tolerance = _TOLERANCE * float(self._expected.abs().max())

    def trees(self) -> bool:
        """Along a text, and behind a prompt of many tokens."""
        if not self._agrees(self._runner(), [self._text], [self._expected]):
            return False
        text = self._text[: _LONG_PROMPT + 10]
        prompt = min(_LONG_PROMPT, len(text) - 4)
        return self._agrees(self._runner(), [text], plain_logits(self._model, [text], prompt), prompt)

    def chains(self) -> bool:
        """Along a text, with drafts that are rejected, states that are put back, and pending tokens sent again."""
        runner = trial_runner(self._model, chain_engine(self._model))
        return self._is_alike and self._agrees(runner, [self._text], [self._expected], draft=chains(self._draws))

    def plain(self) -> bool:
        """Two texts, step by step in turn, one token at a time. A state that is in the model is that of one text."""
        rows = [ChainRow(self._model), ChainRow(self._model)]
        return self._is_alike and self._side_by_side(ChainRunner(self._model, rows, drafts=False))

    def batches(self) -> bool:
        """Two texts of different lengths beside one another, and each alone."""
        return self._side_by_side(self._runner(2))

    def packed_rows(self) -> bool:
        """Two texts of different lengths in one row of tokens, and each alone."""
        clone = SharedClone(self._model, PACKED_ROWS)
        runner = ModelRunner(clone.module, positions_end=self.positions_end)
        with runner.serving([Row(), Row()]):
            return self._side_by_side(runner)

    def plain_rows(self) -> bool:
        """Two texts in a batch of plain decoding, and each alone."""
        texts = [self._text[start : start + _LONG_PROMPT] for start in (0, 5)]
        alone = [plain_logits(self._model, [text], _PROMPT)[0] for text in texts]
        return difference(list(plain_logits(self._model, texts, _PROMPT)), alone) <= self._tolerance

    def anew(self) -> bool:
        """A text that plain decoding reads whole at each step, and from a cache. It holds padding tokens, of which some
        models count no positions."""
        config = self._model.config
        text = self._text[: shortest(self._limits.changes_after, self._limits.picks_after)]
        pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None)
        pad = getattr(config, "pad_token_id", None) if pad is None else pad
        if pad is not None:
            text = [pad if place % 5 == 4 else token for place, token in enumerate(text)]
        ways = (plain_logits(self._model, [text], _PROMPT, use_cache=choice) for choice in (True, False))
        return difference(*map(list, ways)) <= self._tolerance

    def hidden(self, *places: int) -> bool:
        """A text with hidden tokens in these places."""
        runner = self._runner(padding=len(places))
        longest = runner.counts_hidden_after(between=places[0] > 0)  # beyond, such texts are refused
        text = list(self._text)
        for place in places:
            text.insert(place, self._usual[0])
        text = text[:longest]
        counted = [token for place, token in enumerate(text) if place not in places]
        prompt = _PROMPT + len(places) if len(counted) > _PROMPT else len(text) - 1
        try:
            plain = plain_logits(self._model, [text], prompt, [places])
        except (IndexError, RuntimeError):  # it counts them as positions, beyond the table
            return False
        return self._agrees(runner, [counted], plain)

    def padded_caches(self) -> bool:
        """The first layer's keys of a text behind padding, and those that plain decoding leaves in its cache."""
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
        kept = plain[:, padding : padding + _PROMPT]
        return difference([padded[:, :_PROMPT]], [kept]) <= self._tolerance

    def _runner(self, rows: int = 1, padding: int = 0) -> ModelRunner:
        runner = ModelRunner(self._model, rows, most_nodes=_NODES, positions_end=self.positions_end)
        runner.rows[0].padding = padding
        return runner

    def _side_by_side(self, runner: Runner) -> bool:
        # Where rows may not be at different places, batches are refused.
        texts = [text[: runner.changes_after] for text in (self._text, self._text[5:])]
        alone = [self._expected[: len(texts[0]) - _PROMPT], plain_logits(self._model, texts[1:], _PROMPT)[0]]
        return self._agrees(runner, texts, alone)

    def _agrees(
        self,
        runner: Runner,
        texts: Sequence[Sequence[int]],
        plain: Sequence[torch.Tensor] | torch.Tensor,
        prompt: int = _PROMPT,
        draft: Draft | None = None,
    ) -> bool:
        """Whether drafts along texts give the logits of plain decoding, `[tokens - prompt, vocabulary]` of each."""
        return difference(follow(runner, texts, prompt, draft or self._draft), list(plain)) <= self._tolerance

    def _draft(self, tree: TokenTree, following: Sequence[int]) -> list[int]:
        """Some of the tokens that follow, and wrong ones, so that places in the tree are not its positions."""
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
        tried: How it is tried on a miniature.
        unknown: The answer where no miniature can be built or run: the careful one.
        seeds: How many random weights must say no.
    """

    tried: Callable[[_Comparison], bool]
    unknown: bool = False
    seeds: int = _SEEDS


QUESTIONS = {
    # Are rows read as plain decoding reads them ...
    "trees": Question(_Comparison.trees),  # one row? Else the model is refused, or runs chains.
    "chains": Question(_Comparison.chains),  # on chains? Else the model is refused.
    "plain": Question(_Comparison.plain),  # without drafts? Else an Engine cannot fall back on that.
    "batches": Question(_Comparison.batches),  # several at different places? Else batches are refused.
    "plain_rows": Question(_Comparison.plain_rows),  # several in a batch of plain decoding? Likewise.
    "anew": Question(_Comparison.anew),  # a text without a cache? Else use_cache=False is refused.
    "packed_rows": Question(_Comparison.packed_rows),  # one after another? Else they are padded.
    "padding": Question(lambda texts: texts.hidden(0, 1, 2)),  # behind hidden tokens? Else these are refused.
    "holes": Question(lambda texts: texts.hidden(2)),  # with hidden tokens between others? Likewise.
    # Are the keys of a row behind hidden tokens those that plain decoding caches? Where it counts them as positions,
    # RoPE gives equal logits, as it depends on distances alone, but other keys: a cache of them is refused.
    "padded_caches": Question(_Comparison.padded_caches),
    # Does the model fail beyond its context? Else texts may go on there. Weights have no part in it.
    "positions_end": Question(lambda texts: texts.positions_end, unknown=True, seeds=1),
}
"""The table: what is asked, how it is tried, and what is refused."""


class Equivalence:
    """In which respects drafts equal plain decoding for a kind of model, each asked when it is first needed.

    Args:
        model: A model of that kind; no reference to it is kept.

    Attributes:
        obstacle: Why no miniature could be tried when something was asked; `None` if one could.
    """

    obstacle: str | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._class = type(model)
        try:
            self._config = deepcopy(model.config)  # which may be changed before it is tried
        except Exception:  # there is a lock in it, for example
            self._config = model.config
        self._code = Surroundings(model)
        self._comparisons: dict[int, _Comparison] = {}
        self._answers: dict[str, bool] = {}
        self._lock = Lock()  # models of several threads may be of one kind

    @property
    def is_current(self) -> bool:
        """Whether the classes of the model have the code that they had."""
        return self._code.hold()

    def holds(self, name: str) -> bool:
        """The answer to one of `QUESTIONS`."""
        with self._lock:
            if name not in self._answers:
                self._answers[name] = self._ask(QUESTIONS[name])
            return self._answers[name]

    @property
    def has_miniature(self) -> bool:
        """Whether one could be built and run, when something was asked."""
        return self.obstacle is None

    def _ask(self, question: Question) -> bool:
        keeps_state = has_running_state(self._class, self._config)
        with quiet(), torch.inference_mode(False), torch.no_grad():
            for seed in range(question.seeds):
                try:
                    if seed not in self._comparisons:
                        miniature = build_miniature(self._class, self._config, seed)
                        self._comparisons[seed] = _Comparison(miniature, seed, keeps_state)
                except Exception as error:
                    # Whatever it is: this class cannot be had in small, or plain decoding does not run there.
                    self.obstacle = f"{type(error).__name__}: {error}"
                    return question.unknown
                try:
                    if question.tried(self._comparisons[seed]):
                        return True
                except Exception:
                    continue  # plain decoding ran, drafts did not
        return False


_KEPT = 16
"""Kinds of models that are kept, each with some megabytes of miniatures."""
_by_kind: dict[tuple[object, ...], Equivalence] = {}
"""By class and configuration, the last used at the end. Not kept for a model, as it is the same for all models of a
kind: a process that loads one after another tries each kind once. It holds miniatures, and no model of the caller's."""
_lock = Lock()


def equivalence(model: PreTrainedModel) -> Equivalence:
    """What miniatures of `model` show. Each question takes some tenths of a second once; the model is not touched."""
    return of_config(model, ("kind", model.config._attn_implementation), lambda: _look_up(model))


def _look_up(model: PreTrainedModel) -> Equivalence:
    try:
        values = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    except Exception:  # the configuration holds something else than values
        values = repr(id(model.config))
    kind = (type(model), values, model.config._attn_implementation)
    with _lock:
        found = _by_kind.pop(kind, None)
        if found is None or not found.is_current:
            found = Equivalence(model)
        _by_kind[kind] = found
        if len(_by_kind) > _KEPT:
            del _by_kind[next(iter(_by_kind))]
        return found
