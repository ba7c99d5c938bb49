"""The equivalence check: token trees against plain decoding, on a miniature of the model.

A miniature has every window, chunk and context of the model, a few tokens long, so that a short text runs past all of
them. It finds what the model's own forward passes would show only far into a long text: layers that count keys instead
of positions, scales that change with the length, tables that end.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from threading import Lock
from weakref import ref

import torch
from transformers import PreTrainedModel

from lookahead.backends.transformers.chain_cache import has_running_state
from lookahead.backends.transformers.chain_logits import chain_logits
from lookahead.backends.transformers.miniature import build_miniature, draw_text, plain_logits, quiet
from lookahead.backends.transformers.model_runner import ModelRunner
from lookahead.backends.transformers.model_state import same_values, state_of
from lookahead.backends.transformers.packed_rows import PackedRowsRunner, Row, RowsRunner
from lookahead.backends.transformers.packed_rows import attention as packed_attention
from lookahead.backends.transformers.position_limit import PositionLimit
from lookahead.backends.transformers.shared_clone import SharedClone
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


class Equivalence:
    """In which respects trees equal plain decoding for a kind of model, each checked when it is first needed.

    Nothing is held against a model of which no miniature can be built or run.

    Args:
        model: A model of that kind; no reference to it is kept.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._class, self._config = type(model), model.config
        self._comparisons: dict[int, _Comparison] = {}
        self._lock = Lock()  # models of several threads may be of one kind

    @cached_property
    def trees(self) -> bool:
        """Whether one row is."""
        return self._try(_Comparison.trees)

    @cached_property
    def batches(self) -> bool:
        """Whether rows of different lengths beside one another are."""
        return self._try(_Comparison.batches)

    @cached_property
    def packed_rows(self) -> bool:
        """Whether rows of different lengths, one after another in one row of tokens, are."""
        return self._try(_Comparison.packed_rows)

    @cached_property
    def padding(self) -> bool:
        """Whether a row with hidden tokens before it is."""
        return self._try(lambda comparison: comparison.hidden([0, 1, 2]))

    @cached_property
    def holes(self) -> bool:
        """Whether a row with a hidden token between others is."""
        return self._try(lambda comparison: comparison.hidden([2]))

    @cached_property
    def padded_caches(self) -> bool:
        """Whether the keys of a row with hidden tokens before it are those that plain decoding caches.

        Where plain decoding counts hidden tokens as positions, RoPE gives equal logits, as it depends on distances
        alone, but its keys differ: no cache can be exchanged.
        """
        return self._try(_Comparison.padded_keys)

    @cached_property
    def positions_end(self) -> bool:
        """Whether the model fails beyond its context."""
        return self._try(lambda comparison: comparison.positions_end, seeds=1)  # weights have no part in it

    @cached_property
    def chains(self) -> bool:
        """Whether chains of one row are, with states copied and put back.

        States are trusted only after this check: a model without a miniature that runs does not pass it.
        """
        keeps_state = has_running_state(self._class, self._config)
        return self._try(lambda comparison: comparison.chains(keeps_state), unknown=False)

    @property
    def has_miniature(self) -> bool:
        """Whether one could be built and run, when something was tried."""
        return bool(self._comparisons)

    def _try(self, question: Callable[[_Comparison], bool], unknown: bool = True, seeds: int = _SEEDS) -> bool:
        with self._lock, quiet(), torch.inference_mode(False), torch.no_grad():
            for seed in range(seeds):
                try:
                    if seed not in self._comparisons:
                        self._comparisons[seed] = _Comparison(build_miniature(self._class, self._config, seed), seed)
                except Exception:
                    # Whatever it is: this class cannot be had in small, or plain decoding does not run there.
                    return unknown and seed == 0
                try:
                    if question(self._comparisons[seed]):
                        return True
                except Exception:
                    continue  # plain decoding ran, trees did not
        return False


_KEPT = 16
"""Kinds of models that are kept, each with some megabytes of miniatures."""
_known: dict[tuple[object, ...], Equivalence] = {}
"""By class and configuration, the last used at the end. Not kept for a model, as it is the same for all models of a
kind: a process that loads one after another tries each kind once. It holds miniatures, and no model of the caller's."""
_lock = Lock()


def equivalence(model: PreTrainedModel) -> Equivalence:
    """What miniatures of `model` show. Each question takes some tenths of a second once; the model is not touched."""
    state, attention, values = state_of(model), model.config._attn_implementation, vars(model.config)
    if state.equivalence is not None:  # writing out a configuration takes far longer than comparing two
        kept_attention, kept_values, found = state.equivalence
        kept = found()
        if kept is not None and kept_attention == attention and same_values(kept_values, values):
            return kept
    kept = _look_up(model)
    state.equivalence = (attention, copy.deepcopy(values), ref(kept))
    return kept


def _look_up(model: PreTrainedModel) -> Equivalence:
    values = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    kind = (type(model), values, model.config._attn_implementation)
    with _lock:
        _known[kind] = _known.pop(kind) if kind in _known else Equivalence(model)
        if len(_known) > _KEPT:
            del _known[next(iter(_known))]
        return _known[kind]


class _Comparison:
    """Texts along which plain decoding of a miniature and its trees are compared."""

    def __init__(self, model: PreTrainedModel, seed: int) -> None:
        self._model = model
        self._draws = random.Random(seed)
        self.positions_end = False
        limit = PositionLimit(model.config)
        self._text = draw_text(_TEXT, seed)[: limit.broken_after]
        context = limit.context
        try:
            self._expected = plain_logits(model, [self._text], _PROMPT)[0]
        except (IndexError, RuntimeError):  # a table came to its end
            if context is None:
                raise
            self.positions_end = True
            self._text = self._text[:context]
            self._expected = plain_logits(model, [self._text], _PROMPT)[0]
        if not bool(torch.isfinite(self._expected).all()):
            raise ArithmeticError("the logits are not finite")
        # A wrong mask or position makes logits differ by about as much as other tokens do; rounding far less.
        self._tolerance = 1e-3 * float(self._expected.abs().max())

    def trees(self) -> bool:
        """Whether trees along the text are read as plain decoding reads it, also behind a prompt of many tokens."""
        if not self._same(self._tree_logits(self._runner(), [self._text]), [self._expected]):
            return False
        text = self._text[: _LONG_PROMPT + 10]
        prompt = min(_LONG_PROMPT, len(text) - 4)
        plain = plain_logits(self._model, [text], prompt)
        return self._same(self._tree_logits(self._runner(), [text], prompt), list(plain))

    def chains(self, keeps_state: bool) -> bool:
        """Whether chains along the text are read as plain decoding reads it.

        Args:
            keeps_state: Whether the model has a running state; without one, the miniature would not be like it.
        """
        if keeps_state and not has_running_state(type(self._model), self._model.config):
            return False
        return self._same([chain_logits(self._model, self._text, _PROMPT, self._draws)], [self._expected])

    def _runner(self, rows: int = 1, padding: Sequence[int] | None = None) -> ModelRunner:
        ends = self.positions_end
        return ModelRunner(self._model, rows, padding=padding, most_nodes=_NODES, positions_end=ends)

    def batches(self) -> bool:
        """Whether two texts of different lengths are read beside one another as each alone."""
        return self._side_by_side(self._runner(2))

    def packed_rows(self) -> bool:
        """Whether two texts of different lengths in one row of tokens are read as each alone."""
        packed_attention.register()
        clone = SharedClone(self._model, packed_attention.NAME, pack_weights=False)
        runner = PackedRowsRunner(clone.module, self.positions_end)
        runner.rows = [Row(), Row()]
        return self._side_by_side(runner)

    def _side_by_side(self, runner: ModelRunner | RowsRunner) -> bool:
        # Where rows may not be at different places, batches are refused.
        texts = [text[: runner.changes_after] for text in (self._text, self._text[5:])]
        alone = [self._expected[: len(texts[0]) - _PROMPT], plain_logits(self._model, texts[1:], _PROMPT)[0]]
        return self._same(self._tree_logits(runner, texts), alone)

    def hidden(self, places: list[int]) -> bool:
        """Whether texts with hidden tokens at `places` are read as plain decoding reads them."""
        runner = self._runner(padding=[len(places)])
        between = places[0] > 0
        longest = runner.counts_hidden_after(between)  # beyond, such texts are refused
        text = list(self._text)
        for place in places:
            text.insert(place, 3)
        text = text[:longest]
        counted = [token for place, token in enumerate(text) if place not in places]
        prompt = _PROMPT + len(places) if len(counted) > _PROMPT else len(text) - 1
        try:
            plain = plain_logits(self._model, [text], prompt, [places])
        except (IndexError, RuntimeError):  # it counts them as positions, beyond the table
            return False
        return self._same(self._tree_logits(runner, [counted]), list(plain))

    def padded_keys(self) -> bool:
        """Whether the first layer's keys of a text behind padding are those that plain decoding leaves in its cache."""
        text, padding = self._text[:_PROMPT], 3
        runner = self._runner(padding=[padding])
        tree = TokenTree(text)
        runner.forward([tree])
        runner.commit([range(len(tree))])
        ids = torch.tensor([[3] * padding + text])
        mask = (torch.arange(ids.shape[1]) >= padding).long()[None]
        output = self._model.generate(
            ids, attention_mask=mask, max_new_tokens=1, do_sample=False, return_dict_in_generate=True
        )
        own, plain = (cache.layers[0].keys[0] for cache in (runner.cache, output.past_key_values))
        return self._same([own[:, :_PROMPT]], [plain[:, padding : padding + _PROMPT]])

    def _tree_logits(
        self, runner: ModelRunner | RowsRunner, texts: Sequence[Sequence[int]], prompt: int = _PROMPT
    ) -> list[torch.Tensor]:
        """Logits `[tokens, vocabulary]` along each text after its prompt, read from trees that hold it, and more."""
        decided = [min(prompt, len(text) - 1) for text in texts]
        found: list[list[torch.Tensor]] = [[] for _ in texts]
        while any(count < len(text) for count, text in zip(decided, texts, strict=True)):
            drafts = [
                self._tree(runner, row, text, decided[row]) if decided[row] < len(text) else None
                for row, text in enumerate(texts)
            ]
            results = runner.forward([runner.idle_tree() if draft is None else draft[0] for draft in drafts])
            kept: list[list[int]] = []
            for row, (draft, result) in enumerate(zip(drafts, results, strict=True)):
                tree, path = (None, []) if draft is None else draft
                kept.append([] if tree is None else [*range(tree.root + 1), *path])
                if tree is not None:
                    found[row] += [result.logits_after(node) for node in (tree.root, *path)]
                    decided[row] += 1 + len(path)
            runner.commit(kept)
        return [torch.cat(logits).float() for logits in found]

    def _tree(
        self, runner: ModelRunner | RowsRunner, row: int, text: Sequence[int], decided: int
    ) -> tuple[TokenTree, list[int]]:
        """A tree behind the first tokens of `text` with some that follow, and the path of those."""
        tree = runner.begin_tree(row, text[:decided])
        if not runner.wants_draft(tree):
            return tree, []
        wrong = [self._draws.randrange(3, 40) for _ in range(2)]
        if self._draws.random() < 0.5:  # lies before the path, so that the path's places are not its positions
            tree.add_candidates(wrong)
        path = tree.add_candidates(text[decided : min(decided + self._draws.randrange(3), len(text) - 1)])
        if path and len(tree) - tree.root < _NODES:
            tree.add_candidates(wrong[:1], path[0])
        return tree, path

    def _same(self, logits: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
        return all(
            float((mine - theirs).abs().max()) <= self._tolerance for mine, theirs in zip(logits, expected, strict=True)
        )
