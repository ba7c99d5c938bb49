"""Selection of tokens for all texts of a step together, before their walks.

Noise depends only on the index in the text. Unless a processor uses the text, the token after a node therefore depends
only on its depth and logits. On CUDA tokens are selected after all nodes, so that the host does not wait for each; if
processors of transformers use more of the text than its tokens, after roots. On a CPU they are selected after the roots
of several texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lookahead.backends.machine import Read, upload
from lookahead.backends.transformers.noise import MAX_BYTES
from lookahead.core.forest import Forest, Integers, spread
from lookahead.core.results import EarlyTokens
from lookahead.errors import not_of_signal

Members = list[tuple[Any, int]]
"""Texts (`TextSequence`) whose samplers have equal processors, and their rows in the forest, ascending."""

MAX_TOKENS = 1 << 21
"""Largest number of tokens of the texts before all nodes of a step, if processors use them."""


class Foreseen(NamedTuple):
    """Tokens after nodes of a tree, with their distributions.

    Attributes:
        nodes: Nodes of the tree, ascending.
        first: Index of the token after the first node in the result of `read`.
        tokens: Tokens of several texts on the device; -1 for invalid probabilities.
        read: Returns them.
        row: Row of the first node in the other fields.
        scores: `[rows, vocabulary]`.
        probabilities: `[rows, vocabulary]`; the scores in greedy decoding.
    """

    nodes: list[int]
    first: int
    tokens: torch.Tensor
    read: Read
    row: int
    scores: torch.Tensor
    probabilities: torch.Tensor


def sample_early(rows: Sequence[tuple[Any, int]], forest: Forest, outputs: Any) -> list[EarlyTokens]:
    """Select tokens after nodes of several trees; see `Sampler.look_ahead_rows`."""
    groups: dict[object, tuple[Any, Members]] = {}
    readers: dict[int, tuple[Any, list[tuple[Any, int]]]] = {}
    for sequence, row in rows:
        sampler = sequence.sampler
        sampler.foreseen = None
        whole = outputs[row].whole
        if not sampler.selects or whole.logits.device != sequence.device:
            continue
        if sampler.ignores_text or (sampler.alike and not whole.logits.is_cpu and _texts_fit(sequence, forest)):
            key = sampler.alike, sampler.samples, id(whole)
            groups.setdefault(key, (whole, []))[1].append((sequence, row))
        elif sampler.is_pure and not whole.logits.is_cpu:
            readers.setdefault(id(whole), (whole, []))[1].append((sequence, row))
    early = []
    for whole, members in groups.values():
        sampler = members[0][0].sampler
        try:
            if whole.logits.is_cpu and (len(members) == 1 or not sampler.is_alike_together(whole.logits.shape[-1])):
                continue
            early.append(_sample(members, forest, outputs.logit_rows, whole))
        except Exception as error:  # the walk of the affected row raises it again
            not_of_signal(error)
            for sequence, _ in members:
                sequence.sampler.foreseen = None
    for whole, texts in readers.values():
        try:
            early.append(_after_roots(texts, forest, outputs, whole))
        except Exception as error:  # as above
            not_of_signal(error)
    return early


def _after_roots(texts: Sequence[tuple[Any, int]], forest: Forest, outputs: Any, whole: Any) -> EarlyTokens:
    """Select the tokens after the roots of texts with processors that use the text."""
    chosen = []
    for sequence, row in texts:
        sampler = sequence.sampler
        scores = sampler.process(sequence.ids, outputs[row].logits_after(int(forest.roots[row])))
        probabilities = torch.nn.functional.softmax(scores, dim=-1) if sampler.samples else scores
        noise = sampler.look_ahead(1, probabilities)
        if noise or not sampler.samples:  # else there is no memory for it
            chosen.append((sampler, row, scores, probabilities, selected(probabilities, noise[0] if noise else None)))
    together = torch.cat([tokens for *_, tokens in chosen]).int()
    read = whole.downloads.add(together)
    known = []
    nodes = []
    for index, (sampler, row, scores, probabilities, _) in enumerate(chosen):
        root = int(forest.roots[row])
        nodes.append(int(forest.firsts[row]) + root)
        sampler.like = probabilities
        sampler.foreseen = Foreseen([root], index, together, read, 0, scores, probabilities)
        if root + 1 == forest.counts[row] and not sampler.records:
            known.append(row)
    return EarlyTokens(known, np.array(nodes), read)


class _Reach(NamedTuple):
    """Nodes that walks may reach.

    Attributes:
        nodes: Nodes of the forest, `[nodes]`.
        members: Index of the sampler of each node, `[nodes]`, ascending.
        levels: Distance of each node from the root of its tree, `[nodes]`.
    """

    nodes: Integers
    members: Integers
    levels: Integers

    def where(self, condition: NDArray[np.bool_]) -> _Reach:
        """Return the nodes with a true condition."""
        return _Reach(*(values[condition] for values in self))


def _sample(members: Members, forest: Forest, logit_rows: Integers, whole: Any) -> EarlyTokens:
    """Select tokens after nodes of texts with equal processors, from the logits of one pass."""
    logits = whole.logits
    sampler = members[0][0].sampler
    rows = np.array([row for _, row in members])
    reach = _reach(rows, forest, only_roots=logits.is_cpu)
    reached = np.bincount(reach.members, minlength=len(members))
    reach = reach.where(logit_rows[reach.nodes] >= 0)
    reach, noise, noise_rows = _noise(members, reach, logits)
    counts = np.bincount(reach.members, minlength=len(members))
    read_rows, noise_index = upload(logits.device, np.stack([logit_rows[reach.nodes], noise_rows]))[0]
    texts = None if sampler.ignores_text else _texts(members, reach, forest, logits.device)
    scores = sampler.process(texts, logits.index_select(0, read_rows).float())
    probabilities = scores if noise is None else torch.nn.functional.softmax(scores, dim=-1)
    if noise is not None and (len(noise) != len(noise_rows) or (noise_rows != np.arange(len(noise))).any()):
        noise = noise.index_select(0, noise_index)
    tokens = selected(probabilities, noise).int()
    read = whole.downloads.add(tokens)
    nodes = (reach.nodes - forest.firsts[rows][reach.members]).tolist()
    first = 0
    known = []
    for (sequence, row), count, is_whole in zip(members, counts.tolist(), counts == reached, strict=True):
        sampler = sequence.sampler
        sampler.like = probabilities[:1]
        sampler.foreseen = Foreseen(nodes[first : first + count], first, tokens, read, first, scores, probabilities)
        first += count
        if is_whole and not sampler.records:
            known.append(row)
    return EarlyTokens(known, reach.nodes, read)


def _reach(rows: Integers, forest: Forest, only_roots: bool) -> _Reach:
    """Return the nodes that walks down the trees of some rows may reach."""
    roots = forest.firsts[rows] + forest.roots[rows]
    counts = forest.firsts[rows + 1] - roots
    if only_roots and (counts == 1).all():
        return _Reach(roots, np.arange(len(rows)), np.zeros(len(rows), dtype=np.int64))
    nodes = spread(roots, counts)
    members = np.repeat(np.arange(len(rows)), counts)
    levels = forest.depths[nodes] - forest.depths[roots[members]]
    return _Reach(nodes, members, levels).where(~forest.in_window[nodes])


def _noise(members: Members, reach: _Reach, logits: torch.Tensor) -> tuple[_Reach, torch.Tensor | None, Integers]:
    """Return the nodes that memory permits, noise `[rows, vocabulary]`, and the row of noise of each node.

    In greedy decoding there is no noise.
    """
    counts = np.bincount(reach.members, minlength=len(members))
    rank = np.arange(len(reach.nodes)) - (counts.cumsum() - counts)[reach.members]
    limit = 1 if logits.is_cpu else max(MAX_BYTES // (4 * logits.shape[-1]), 1)
    reach = reach.where(rank < limit)
    if not members[0][0].sampler.samples:
        return reach, None, np.zeros_like(reach.nodes)
    deepest = np.zeros(len(members), dtype=np.int64)
    np.maximum.at(deepest, reach.members, reach.levels)
    like = logits.new_empty((1, logits.shape[-1]), dtype=torch.float32)
    depths = zip(members, deepest.tolist(), strict=True)
    drawn = [sequence.sampler.look_ahead(deep + 1, like) for (sequence, _), deep in depths]
    sizes = np.array([len(noise) for noise in drawn])
    reach = reach.where(reach.levels < sizes[reach.members])
    noise_rows = (sizes.cumsum() - sizes)[reach.members] + reach.levels
    return reach, torch.cat([noise for some in drawn for noise in some]), noise_rows


def _texts_fit(sequence: Any, forest: Forest) -> bool:
    """Return whether the texts before all nodes are short enough, and on the host."""
    tokens = len(sequence.tokens)
    return tokens == sequence.length and len(forest.tokens) * (tokens + len(forest.tokens)) <= MAX_TOKENS


def _texts(members: Members, reach: _Reach, forest: Forest, device: torch.device) -> torch.Tensor:
    """Return the texts with each node, `[nodes, tokens]`, filled up with their last token."""
    lengths = [len(sequence.tokens) for sequence, _ in members]
    texts = np.empty((len(reach.nodes), max(lengths) + int(reach.levels.max())), dtype=np.int32)
    places: dict[int, int] = {}
    for place, (node, member, level) in enumerate(zip(*(values.tolist() for values in reach), strict=True)):
        sequence, row = members[member]
        places[node] = place
        end = lengths[member] + level
        if level:
            texts[place] = texts[places[int(forest.firsts[row] + forest.parents[node])]]
        else:
            texts[place, :end] = sequence.on_host
        texts[place, end - 1 :] = forest.tokens[node]
    return upload(device, texts)[0].long()


def log_early(rows: Sequence[tuple[Any, int]], forest: Forest, outputs: Any) -> dict[int, tuple[Read, int]]:
    """Compute log-probabilities after nodes on a device, before the host waits for the results of the step.

    Args:
        rows: Texts with samplers that record them (`LogprobSampler`), of one pass, and their rows in the forest.
        forest: The trees of the step.
        outputs: Results of the pass.

    Returns:
        By node of the forest: a function that reads the result of `packed_logprobs`, and the row there.
    """
    whole = outputs[rows[0][1]].whole
    reach = _reach(np.array([row for _, row in rows]), forest, only_roots=False)
    reach = reach.where(outputs.logit_rows[reach.nodes] >= 0)
    if len(reach.nodes) * whole.logits.shape[-1] > MAX_BYTES:
        reach = reach.where(reach.levels == 0)
    places = {node: place for place, node in enumerate(reach.nodes.tolist())}
    (read_rows,) = upload(whole.logits.device, outputs.logit_rows[reach.nodes])
    logits = whole.logits.index_select(0, read_rows).float()
    tokens = logits.argmax(dim=-1)
    chosen: dict[int, tuple[torch.Tensor, list[tuple[int, int]]]] = {}
    for sequence, row in rows:
        if (foreseen := sequence.sampler.foreseen) is not None:
            nodes = [int(forest.firsts[row]) + node for node in foreseen.nodes]
            pairs = [(places[node], place) for place, node in enumerate(nodes, foreseen.first) if node in places]
            chosen.setdefault(id(foreseen.tokens), (foreseen.tokens, []))[1].extend(pairs)
    for selected_tokens, pairs in chosen.values():
        targets, sources = upload(logits.device, np.array(pairs).T.copy())[0]
        tokens.index_copy_(0, targets, selected_tokens.index_select(0, sources).long())
    read = whole.downloads.add(packed_logprobs(logits, tokens, max(sequence.sampler.top for sequence, _ in rows)))
    return {node: (read, place) for node, place in places.items()}


def packed_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """Return tokens and log-probabilities in int32 `[rows, 2 + 2 * top]`.

    A token and the bits of its log-probability, then the likeliest tokens and the bits of theirs. A token of -1, for
    invalid probabilities, has the log-probability of token 0.
    """
    logprobs = logits.log_softmax(dim=-1)
    values, ids = logprobs.topk(min(top, logits.shape[-1]), dim=-1)
    own = logprobs.gather(1, tokens.clamp(min=0)[:, None])
    parts = (tokens[:, None].int(), own.view(torch.int32), ids.int(), values.view(torch.int32))
    return torch.cat(parts, dim=-1)


def selected(probabilities: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens `[rows]` that `torch.multinomial` selects with this noise; -1 for invalid probabilities.

    Without noise, return the likeliest tokens.
    """
    if noise is None:
        return probabilities.argmax(dim=-1)
    scores = probabilities / noise
    by_numpy = scores.is_cpu and scores.dtype == torch.float32  # a tenth of torch's time
    tokens = torch.from_numpy(scores.numpy().argmax(axis=-1)) if by_numpy else scores.argmax(dim=-1)
    return tokens.masked_fill(probabilities.gather(1, tokens[:, None])[:, 0].isnan(), -1)
