"""Learning from the outcome of a step: one loop over all of its texts.

Predictions after each node are written to the n-gram memory, and recent ones are kept as guesses. They count only while
they match the selected tokens, which they may not under logits processors or a grammar.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lookahead.core.compiled import FIRST, compiled, inner
from lookahead.drafting.auto.ngrams import EVIDENCE_PRIOR, OLD_SHARE, Entries, Writing, write_entry
from lookahead.drafting.auto.sources import DECAY, MOST_LISTED, PRIOR, ListedArrays
from lookahead.drafting.auto.texts import TextArrays, append, read_context

UNTRUSTED = 0.35
"""Minimum share of selected tokens among the listed predictions; below it, predictions off the path are not learned."""

_EVIDENCE_DECAY = 0.995
"""Fraction of the record of a kind of evidence that is kept after each step of a text."""

FEEDBACK = np.dtype(
    [
        ("seen", np.float64),  # recent selected tokens, a decayed count
        ("agreed", np.float64),  # of these, the tokens among the listed predictions
        ("share", np.float64),  # agreed / seen
        ("count", np.int64),  # number of recent predictions, see `BatchState`
        ("guessed", np.int64),  # number of `guesses`
        ("guesses", np.int64, (MOST_LISTED,)),  # predictions after the best rejected sibling of the root
        ("likely", np.float64, (MOST_LISTED,)),  # their probabilities
        ("copied", np.float64, (2,)),  # decayed numbers of tokens that only matches proposed: selected, and not
        ("recalled", np.int64),  # whether the memory has learned the text itself
    ]
)
"""Recent predictions of the model for a text."""

SETTINGS = np.dtype(
    [
        ("chains", np.int64),  # whether a draft is one path instead of a tree
        ("explores", np.int64),  # whether leftover nodes try recent predictions after the root
        ("observes", np.int64),  # whether selected tokens replace unknown predictions
    ]
)
"""Options of all texts of a batch."""


class BatchState(NamedTuple):
    """Arrays that drafts are searched in.

    Attributes:
        entries: The n-gram memory.
        texts: The texts.
        feedback: Recent predictions of the model for each text, `FEEDBACK`s, `[places]`.
        recent: Distinct tokens at the end of the prompt and of later predictions, latest first, `[places, nodes]`.
        listed: Paths listed by the sources of a text.
        trees: Draft of each text, `NODE`s, `[places, nodes]`.
        counts: Nodes of each draft, `[places]`; -1 if none was searched since the text was extended.
        weights: Weights of the memory's and the matches' evidence; see `all_weights`.
        settings: A `SETTINGS`.
    """

    entries: Entries
    texts: TextArrays
    feedback: NDArray[Any]
    recent: NDArray[np.int64]
    listed: ListedArrays
    trees: NDArray[Any]
    counts: NDArray[np.int64]
    weights: NDArray[np.float64]
    settings: Any


OUTCOME = np.dtype(
    [
        ("place", np.int64),  # slot of the text; -1 if the step added nothing
        ("root", np.int64),  # index of the root: the number of earlier tokens of the text among the nodes
        ("nodes", np.int64),  # number of nodes: earlier tokens, the root, and the sent nodes of the draft
        ("added", np.int64),  # number of tokens that the step added to the text
        ("first", np.int64),  # index of the first node in the predictions of a `Step`
        ("begin", np.int64),  # index of the first added token in its tokens
    ]
)
"""Outcome of a step for one text.

Without nodes, the text is extended without predictions. Without added tokens, the text itself is learned: its nodes are
the last tokens of the text, the root the very last.
"""


class Step(NamedTuple):
    """Outcome of a step for all of its texts.

    Attributes:
        rows: `OUTCOME`s, `[rows]`.
        tokens: The added tokens of each row, from its `begin` on.
        ids: The likeliest tokens after each node of a row, from its `first` on, likeliest first, `[nodes, listed]`; -1
            where the prediction was not read. Learning overwrites them.
        probabilities: Their probabilities, `[nodes, listed]`. Learning overwrites them.
        selected: Output for the token selected after each node, -1 for nodes off the path, `[nodes]`. If the text
            itself is learned, it is an input.
    """

    rows: NDArray[Any]
    tokens: NDArray[np.int64]
    ids: NDArray[np.int64]
    probabilities: NDArray[np.float32]
    selected: NDArray[np.int64]

    @classmethod
    def in_order(
        cls, rows: NDArray[Any], tokens: NDArray[np.int64], ids: NDArray[np.int64], probabilities: NDArray[np.float32]
    ) -> Step:
        """Return the step of rows whose nodes and tokens follow one another."""
        rows["first"] = rows["nodes"].cumsum() - rows["nodes"]
        rows["begin"] = rows["added"].cumsum() - rows["added"]
        return cls(rows, tokens, ids, probabilities, np.empty(len(ids), dtype=np.int64))

    @classmethod
    def of_text(cls, place: int, tokens: NDArray[np.int64], selected: NDArray[np.int64]) -> Step:
        """Return the step that extends a text by `tokens`.

        Without tokens it is the step that learns the text itself: the `selected` token after each of its last tokens.
        """
        taught = len(selected)
        rows = np.array([(place, max(taught - 1, 0), taught, len(tokens), 0, 0)], dtype=OUTCOME)
        ids = np.full((taught, 1), -1, dtype=np.int64)
        probabilities = np.zeros((taught, 1), dtype=np.float32)
        return cls(rows, tokens, ids, probabilities, selected)


@compiled
def summarize(
    places: NDArray[np.int64],
    rows: NDArray[np.int64],
    certain: int,
    roots: NDArray[np.int64],
    counts: NDArray[np.int64],
    firsts: NDArray[np.int64],
    added: NDArray[np.int64],
    sent: NDArray[np.int64],
    outcomes: NDArray[Any],
) -> None:
    """Write the outcome of a step for some texts.

    Args:
        places, rows: Slot of each text, and its row in the step, `[texts]`.
        certain: Number of certain tokens above their drafts, which the texts have already.
        roots, counts, firsts: Root, nodes and first node of each tree, `[rows]`.
        added: Number of selected tokens of each row, `[rows]`.
        sent: Number of nodes that were sent of the draft in each slot, which are set to 0.
        outcomes: `OUTCOME`s, `[texts]`, to be written.
    """
    for text in range(len(places)):
        place = places[text]
        row = rows[text]
        outcome = outcomes[text]
        outcome["place"], outcome["root"] = place, roots[row] + certain
        outcome["nodes"] = min(outcome["root"] + 1 + sent[place], counts[row])
        outcome["added"] = max(added[row] - certain, 0)
        outcome["first"], outcome["begin"] = firsts[row], firsts[row] + certain
        sent[place] = 0


@compiled
def learn(step: Step, clock: int, state: BatchState, writing: Writing, fresh: NDArray[np.int64]) -> tuple[int, int]:
    """Learn from a step, and extend the texts.

    Args:
        step: Outcome of the step.
        clock: Date of the entries that are written to the memory.
        state: Arrays to update; all drafts in it become invalid.
        writing: Options and buffers for writing entries.
        fresh: Buffer for sorting recent predictions, `[nodes]`.

    Returns:
        Number of accepted draft tokens, and number of texts that the memory has yet to learn as texts.
    """
    entries, texts, feedback, recent, listed, trees, counts, _, settings = state
    accepted = lost = FIRST
    for row in range(len(step.rows)):
        outcome = step.rows[row]
        place = outcome["place"]
        root = outcome["root"]
        first = outcome["first"]
        end = first + outcome["nodes"]
        if place >= 0:
            nodes = trees[place]
            of_text = feedback[place]
            tokens = step.tokens[outcome["begin"] : outcome["begin"] + outcome["added"]]
            predicted = step.ids[first:end]
            likely = step.probabilities[first:end]
            selected = step.selected[first:end]
            if len(tokens) and end > first:
                accepted += _follow(root, tokens, nodes, predicted, selected)
                _weigh_evidence(root, nodes, selected, entries.evidence)
                _weigh_matches(root, nodes, selected, of_text["copied"])
                if counts[place] >= 0:
                    _weigh_sources(tokens, listed)
                if not settings["observes"]:
                    _compare(predicted, selected, of_text)
            if not len(tokens) or settings["observes"] or of_text["share"] < UNTRUSTED:
                _believe(predicted, likely, selected, 1.0 if settings["observes"] else 1 - OLD_SHARE)
            _keep_guesses(root, nodes, predicted, likely, selected, of_text)
            if settings["explores"] and len(tokens):
                of_text["count"] = _note_recent(root, predicted, selected, recent[place], of_text["count"], fresh)
            for is_text in (False, True):  # nodes on the path come last, so that they win
                for at in range(len(selected)):
                    if predicted[at, 0] >= 0 and is_text == (at <= root or selected[at] >= 0):
                        size = read_context(place, at - root, nodes, texts, writing.context)
                        write_entry(writing.context[:size], predicted[at], likely[at], clock, entries, writing)
            append(place, tokens, texts)
            counts[place] = -1
            lost += of_text["share"] < UNTRUSTED and of_text["recalled"] == 0
    return accepted, lost


@inner
def _follow(
    root: int, tokens: NDArray[np.int64], nodes: NDArray[Any], predicted: NDArray[np.int64], selected: NDArray[np.int64]
) -> int:
    """Write the token selected after each node, along the path of selected tokens below the root.

    Returns:
        Number of selected tokens that were drafted; 0 if the path leaves the draft early, and then nothing is learned.
    """
    at = root
    count = FIRST
    for index in range(len(selected)):
        selected[index] = -1
    for token in tokens:
        if at < 0:  # the token before it was not drafted
            for index in range(len(selected)):
                selected[index] = predicted[index, 0] = -1
            return 0
        selected[at] = token
        before = at
        at = -1
        for other in range(before + 1, len(selected)):
            node = nodes[other - root]
            if node["parent"] == before - root and node["token"] == token:
                at = other
                count += 1
                break
    return count


@inner
def _weigh_evidence(root: int, nodes: NDArray[Any], selected: NDArray[np.int64], evidence: NDArray[np.float64]) -> None:
    """Update the acceptance record of each kind of evidence, with exponential decay."""
    for records in evidence:
        for record in records:
            for count in range(2):
                record[count] -= (1 - _EVIDENCE_DECAY) * (record[count] - EVIDENCE_PRIOR)
    for at in range(root + 1, len(selected)):
        node = nodes[at - root]
        before = selected[root + node["parent"]]
        if before >= 0 and node["weighed"]:
            record = evidence[1 + node["match"], node["order"]]
            record[0] += before == node["token"]
            corrected = max(node["probability"] / nodes[node["parent"]]["probability"], node["listed"])
            record[1] += min(corrected, 1.0) * record[1] / record[0]


@inner
def _weigh_matches(root: int, nodes: NDArray[Any], selected: NDArray[np.int64], copied: NDArray[np.float64]) -> None:
    """Update how often the tokens of matches were selected, and how often another token was."""
    for count in range(2):
        copied[count] = PRIOR + DECAY * (copied[count] - PRIOR)
    for at in range(root, len(selected)):
        if selected[at] >= 0:
            proposed = came = False
            for other in range(at + 1, len(selected)):
                node = nodes[other - root]
                if node["parent"] == at - root and node["match"] >= 0 and node["order"] == 0:
                    proposed = True
                    came = came or node["token"] == selected[at]
            if proposed:
                copied[0 if came else 1] += 1.0


@inner
def _weigh_sources(tokens: NDArray[np.int64], listed: ListedArrays) -> None:
    """Follow the selected tokens along the paths of each source, and update its record of hits."""
    for source in range(len(listed.record)):
        at = source
        accepted = 0.0
        expected = 0.0
        for token in tokens:
            before = at
            at = FIRST - 1
            for number in range(before + 1, len(listed.tokens) if before >= 0 else 0):
                one = listed.tokens[number]
                if one["parent"] == before:
                    expected += one["probability"]
                    if one["token"] == token:
                        accepted += 1.0
                        at = number
        record = listed.record[source]
        if expected > 0:
            record[0] = PRIOR + DECAY * (record[0] - PRIOR) + accepted
            record[1] = PRIOR + DECAY * (record[1] - PRIOR) + expected


@inner
def _compare(predicted: NDArray[np.int64], selected: NDArray[np.int64], of_text: Any) -> None:
    """Update the share of selected tokens that are among the listed predictions."""
    seen = of_text["seen"]
    agreed = of_text["agreed"]
    for at in range(len(selected)):
        token = selected[at]
        listed = predicted[at]
        if token >= 0 and listed[0] >= 0:
            seen = DECAY * seen + 1.0
            agreed = DECAY * agreed
            for other in listed:
                if other == token:
                    agreed += 1.0
                    break
    of_text["seen"], of_text["agreed"], of_text["share"] = seen, agreed, agreed / seen


@inner
def _believe(
    predicted: NDArray[np.int64], likely: NDArray[np.float32], selected: NDArray[np.int64], share: float
) -> None:
    """Replace predictions by the selected tokens, where predictions are unknown or rarely selected.

    Nodes off the path are then not learned.
    """
    for at in range(len(selected)):
        predicted[at, 0], likely[at, 0] = selected[at], share
        if predicted.shape[1] > 1:
            predicted[at, 1] = -1


@inner
def _keep_guesses(
    root: int,
    nodes: NDArray[Any],
    predicted: NDArray[np.int64],
    likely: NDArray[np.float32],
    selected: NDArray[np.int64],
    of_text: Any,
) -> None:
    """Keep the predictions after the best rejected sibling of the last selected node as guesses.

    The model often predicts the same tokens after the selected one.
    """
    last = root
    of_text["guessed"] = 0
    for at in range(root, len(selected)):
        last = at if selected[at] >= 0 else last
    for at in range(last + 1, len(selected)):
        if nodes[at - root]["parent"] == last - root and predicted[at, 0] >= 0:
            for rank in range(min(predicted.shape[1], MOST_LISTED)):
                if predicted[at, rank] < 0:
                    break
                of_text["guesses"][rank], of_text["likely"][rank] = predicted[at, rank], likely[at, rank]
                of_text["guessed"] = rank + 1
            break


@inner
def _note_recent(
    root: int,
    predicted: NDArray[np.int64],
    selected: NDArray[np.int64],
    recent: NDArray[np.int64],
    before: int,
    fresh: NDArray[np.int64],
) -> int:
    """Put the two likeliest tokens after each node in front of the recent predictions, and return their new number.

    Tokens after nodes on the path come behind the others. `before` is the old number of recent predictions.
    """
    count = FIRST
    for rank in range(min(predicted.shape[1], 2)):
        for is_text in (False, True):
            for at in range(len(selected)):
                if (at <= root or selected[at] >= 0) == is_text and predicted[at, rank] >= 0:
                    count = _add_recent(predicted[at, rank], count, count, fresh)
    new = count
    for index in range(before):  # they differ from one another
        count = _add_recent(recent[index], new, count, fresh)
    for index in range(count):
        recent[index] = fresh[index]
    return count


@inner
def _add_recent(token: int, compared: int, count: int, recent: NDArray[np.int64]) -> int:
    """Add a token behind the first `count`, unless it is among the first `compared` or the array is full.

    Returns:
        The new number of tokens.
    """
    if count == len(recent):
        return count
    for index in range(compared):
        if recent[index] == token:
            return count
    recent[count] = token
    return count + 1
