"""All sources of drafts in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import FixedBudget, StepBudget
from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.drafting.auto.context_matches import LONGEST, ContextMatches
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.embedding_neighbours import EmbeddingNeighbours
from lookahead.drafting.auto.ngram_memory import NGramMemory, write_contexts
from lookahead.drafting.auto.search import MOST_RECENT, TreeSearch
from lookahead.drafting.compiled import loop_arrays
from lookahead.drafting.window import JacobiWindow

_REMEMBERED = 512
_NEAR = 128
_FAMILIAR_GAINS: NDArray[np.float64] = 0.001 / np.arange(4, 4 + MOST_RECENT, dtype=np.float64)
_LEAST_GROWN = 8
_NO_STAND_INS = (np.empty(0, dtype=np.int64), np.empty(0))
_FOLLOWING = 0.03


class AutoDrafter:
    """Drafts from the n-gram memory and from earlier occurrences in the text, by one best-first search.

    From the root on, all sources propose what may follow a node; `Acceptance` turns what they say into one probability
    for each proposal; and the continuation whose path is most probable is added next, until the budget is spent. When
    the sources have little to say, as at the beginning of a text, the nodes that are left try tokens that the model
    lately thought of, those first whose continuation is unknown: what it predicts after them fills the memory.

    Args:
        memory: What is known about the model. It may be shared by the sequences of a process and kept from one to the
            next; each sequence has a drafter of its own. If not given, nothing is remembered.
        matches: Earlier occurrences in the text; none are looked for if not given.
        window: The paper's lookahead window, sent when it fits into the nodes that are left.
        budget: Nodes of a step, the root included, or what chooses them.
        most: Nodes of a step at most, the root included, whatever the budget would choose.
        warm_up: How many of the last tokens of the prompt are read like drafted ones when it is sent, so that the
            memory begins with what the model predicts there. Costs the vocabulary projection of as many tokens.
        explore: Try recent predictions with the nodes that are left.
        neighbours: Which tokens resemble each other, so that what is unknown can be drafted; none do if not given.
        continuations: Draft after the root what the model said after the tokens that were tried in its place.

    Raises:
        InvalidArgumentError: The budget is less than one node.
    """

    def __init__(
        self,
        memory: DraftMemory | None,
        matches: ContextMatches | None,
        window: JacobiWindow | None,
        budget: int | StepBudget,
        most: int = MOST_CHOSEN_NODES,
        warm_up: int = 0,
        explore: bool = True,
        neighbours: EmbeddingNeighbours | None = None,
        continuations: bool = True,
    ) -> None:
        if isinstance(budget, int):
            most = budget
        self.budget: StepBudget = FixedBudget(budget) if isinstance(budget, int) else budget
        self.memory = DraftMemory(NGramMemory(1, 1, 1)) if memory is None else memory
        self._top_k = 0 if memory is None else memory.ngrams.top_k
        self.matches = matches
        self.window = window
        self._most = most - 1
        self._read_prompt = warm_up
        self._tried_probabilities = _FAMILIAR_GAINS if explore else _FAMILIAR_GAINS[:0]
        self._takes_continuations = continuations
        self._thinks = explore or neighbours is not None
        self._search = TreeSearch(self._most, self.memory.ngrams, self.memory.acceptance, neighbours)
        self._no_text = ContextMatches(16)
        self._text: list[int] = []  # its last tokens
        self._late: list[int] = []  # new tokens that are not part of it yet
        self._length = 0
        self._recent: dict[int, None] = {}  # the latest last
        self._continuations: tuple[NDArray[np.int64], NDArray[np.float64]] = _NO_STAND_INS
        self._tree: TokenTree | None = None  # this step's
        self._sent = 0  # how many grown nodes it has
        self._strayed = self._uncertainty = 0.0  # moving averages, a token each
        self._wanted = self._most  # how many nodes are grown before the budget is asked

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; none while drafting backs off."""
        return 0 if self.budget.backs_off else self._top_k

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._text = list(prompt[-LONGEST:])
        self._late = []
        self._length = len(prompt)
        self._recent = {}
        self._think_of(reversed(prompt[-_REMEMBERED:]))
        if self.matches is not None:
            self.matches.start(prompt)
        if self.window is not None:
            self.window.start(prompt)
        self._strayed, self._uncertainty = 0.0, 0.2
        self._continuations = _NO_STAND_INS
        self._tree = None

    def propose(self, tree: TokenTree) -> None:
        """Add the likeliest paths, the likeliest node first, and the window if it fits."""
        if self.budget.backs_off:
            return
        with self.memory.lock:
            self._propose(tree)

    def _propose(self, tree: TokenTree) -> None:
        self._catch_up()
        for node in range(max(0, tree.root - self._read_prompt), tree.root):
            tree.reads[node] = True
        recent = self._recent_predictions()
        matches = self._no_text if self.matches is None else self.matches
        # What the budget will not take need not be grown; how much that is, the last step tells about.
        limit = min(self._wanted, self._most)
        while True:
            count = self._search.search(
                self._text,
                limit,
                tree.room,
                self.memory,
                matches,
                recent,
                self._tried_probabilities,
                self._continuations,
            )
            more = self.budget.offer(self._search.path_probabilities, self._length)
            if not more or limit == self._most or count < limit:
                break
            limit = min(2 * limit, self._most)
        chosen = min(self.budget.chosen, count)
        self._wanted = chosen + chosen // 4 + _LEAST_GROWN
        self._search.add_to(tree, chosen)
        self._sent = chosen
        self._tree = tree
        if self.window is not None and sum(map(len, self.window.rows)) <= min(self.budget.left, self._most - chosen):
            self.window.propose(tree)

    def observe(self, result: StepResult) -> None:
        """Learn from the predictions after every node, and add the new tokens to the text."""
        if self.budget.backs_off and self.window is None:
            self._late += result.tokens  # a resting drafter does nothing that can wait
            self.budget.learn(drafted=False, accepted=False)
            return
        with self.memory.lock:
            self._observe(result)

    def _observe(self, result: StepResult) -> None:
        self._catch_up()
        tree = result.tree
        if self.window is not None:
            self.window.observe(result)
        learns = self._top_k > 0 and result.top_ids.shape[1] > 0
        if learns:
            self._follow(result)
            if tree is self._tree:
                self._learn(result)
        stood = learns and self._takes_continuations and tree is self._tree
        self._continuations = self._find_continuations(result) if stood else _NO_STAND_INS
        self.budget.learn(tree is self._tree and self._sent > 0, bool(result.path))
        self._tree = None
        if learns:
            self._remember(result)
        self._late += result.tokens
        self._catch_up()

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `MemoryStatistics`."""
        with self.memory.lock:
            return asdict(self.memory.ngrams.statistics())

    def _catch_up(self) -> None:
        """Add the tokens to the text that were not added yet."""
        if not self._late:
            return
        self._text = [*self._text, *self._late][-LONGEST:]
        self._length += len(self._late)
        if self.matches is not None:
            self.matches.extend(self._late)
        self._late = []

    def _learn(self, result: StepResult) -> None:
        counts = np.full(self._sent + 1, self.memory.acceptance.off_path)
        counts[0] = 1.0
        counts[[node - result.tree.root for node in result.path]] = 1.0
        drawn = min(self._strayed / self._uncertainty, 1.0)
        self._search.teach(self.memory.acceptance, *self._told(result), counts, drawn)

    def _follow(self, result: StepResult) -> None:
        """Note how often the target strays from the likeliest token, and how often it would if it drew from the
        model's distribution: their ratio is 0 for greedy decoding and about 1 for sampling."""
        named = [result.tree.root, *result.path][: len(result.tokens)]
        for node, token in zip(named, result.tokens, strict=True):
            self._strayed += _FOLLOWING * (float(token != result.predictions[node]) - self._strayed)
            self._uncertainty += _FOLLOWING * (1 - float(result.top_probabilities[node, 0]) - self._uncertainty)

    def _find_continuations(self, result: StepResult) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """What the model says after the tokens that were tried where the coming root stands, each as likely as it was
        thought to be: it often says the same after the right one."""
        before = result.path[-1] - result.tree.root if result.path else 0
        return self._search.continuations(before, *self._told(result))

    def _told(self, result: StepResult) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """What the model says after the root and each grown node that was sent; these stand together in the tree."""
        sent = slice(result.tree.root, result.tree.root + self._sent + 1)
        return result.top_ids[sent], result.top_probabilities[sent]

    def _remember(self, result: StepResult) -> None:
        """Put the predictions of the step into the memory; those in real text last, so that they count."""
        tree, orders = result.tree, self.memory.ngrams.orders
        before = self._text[: max(len(self._text) - tree.root - 1, 0)][-orders:]
        real = np.ones(len(tree), dtype=np.int64)
        if self.window is not None:
            real[np.array(tree.kinds) == NodeKind.WINDOW] = 0
        real[: tree.root + 1] = 2
        real[result.path] = 2
        read = np.flatnonzero(result.predictions >= 0)
        read = read[np.argsort(real[read], kind="stable")]
        contexts = np.empty((len(read), orders), dtype=np.int64)
        texts = (np.array(before, dtype=np.int64), np.array(tree.tokens), np.array(tree.parents))
        write_contexts(*loop_arrays(*texts, read, contexts))
        self.memory.ngrams.insert(contexts, result.top_ids[read], result.top_probabilities[read])
        if self._thinks:
            self._think_of(result.top_ids[read, :2].T.ravel().tolist())

    def _think_of(self, tokens: Iterable[int]) -> None:
        """Move the tokens, the latest first, to the end of those that the model thought of lately."""
        known = self._recent
        for token in reversed(dict.fromkeys(tokens)):
            known.pop(token, None)
            known[token] = None
        while len(known) > _REMEMBERED:
            del known[next(iter(known))]

    def _recent_predictions(self) -> NDArray[np.int64]:
        """Tokens that may be worth trying, and those that may be near to others, the latest first."""
        latest = islice(reversed(self._recent), _NEAR)
        return np.fromiter(latest, dtype=np.int64)
