"""All sources of drafts in one tree, the likeliest continuation first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.config import MOST_CHOSEN_NODES
from lookahead.core.budget import FixedBudget, StepBudget
from lookahead.core.compiled import loop_arrays
from lookahead.core.outputs import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import CERTAIN, Explanation, Origin
from lookahead.drafting.auto.draft_memory import DraftMemory
from lookahead.drafting.auto.ngram_memory import NGramMemory, write_contexts
from lookahead.drafting.auto.permits import Permits
from lookahead.drafting.auto.search import SUREST, TreeSearch
from lookahead.drafting.auto.source import Source
from lookahead.drafting.auto.sources import NOTHING_RECENT, RecentPredictions, RejectedSiblings
from lookahead.drafting.auto.texts import LONGEST, ContextMatches
from lookahead.drafting.auto.trust import Trust, believed

_LEAST_GROWN = 8
_LEAST_UNTRUSTED = 0.05
"""How likely a node must be to be sent where the model's predictions after it teach nothing."""

_SEARCHED_WHERE_FORBIDDEN = 4
"""How many times as many nodes are searched, at most, where a source may forbid some of them."""

_RECALLED = 512
"""Last tokens of a text that the memory learns when the model's predictions turn out not to be what is selected."""


class AutoDrafter:
    """Drafts from the n-gram memory and from earlier occurrences in the text, by one best-first search.

    From the root on, all sources propose what may follow a node; `Weights` turn what they say into one probability
    for each proposal; and the continuation whose path is most probable is added next, until the budget is spent. When
    the sources have little to say, as at the beginning of a text, the nodes that are left try tokens that the model
    lately thought of, those first whose continuation is unknown: what it predicts after them fills the memory.

    Args:
        memory: What is known about the model. It may be shared by the sequences of a process and kept from one to the
            next; each sequence has a drafter of its own. If not given, nothing is remembered.
        matches: Earlier occurrences in the text; none are looked for if not given.
        budget: Nodes of a step, the root included, or what chooses them.
        most: Nodes of a step at most, the root included, whatever the budget would choose.
        warm_up: How many of the last tokens of the prompt are read like drafted ones when it is sent, so that the
            memory begins with what the model predicts there. Costs the vocabulary projection of as many tokens.
        explore: Try recent predictions with the nodes that are left.
        continuations: Draft after the root what the model said after the tokens that were tried in its place.
        sources: What else lists paths before each step; each serves this sequence alone.
        surest: Highest probability that a token is given after another.
        chain: Levels to which the path that promises the most tokens is grown beyond the nodes of a step, for those
            who send nothing but that path. Nodes are in no order of probability then.

    Raises:
        InvalidArgumentError: The budget is less than one node.
    """

    def __init__(
        self,
        memory: DraftMemory | None,
        matches: ContextMatches | None,
        budget: int | StepBudget,
        most: int = MOST_CHOSEN_NODES,
        warm_up: int = 0,
        explore: bool = True,
        continuations: bool = True,
        sources: Sequence[Source] = (),
        surest: float = SUREST,
        chain: int = 0,
    ) -> None:
        if isinstance(budget, int):
            most = budget
        self.budget: StepBudget = FixedBudget(budget + chain) if isinstance(budget, int) else budget
        self.memory = DraftMemory(NGramMemory(1, 1, 1)) if memory is None else memory
        self._top_k = 0 if memory is None else memory.ngrams.top_k
        self.matches = matches
        self._most = most - 1
        self._kept = self._most + chain
        self._read_prompt = warm_up
        self._recent = RecentPredictions()
        self._explores = explore
        self._permits = Permits(sources)
        self._sure: Any = next((source for source in sources if getattr(source, "certain", None) is not None), None)
        self._certain = 0  # tokens of this step's tree that are part of the text already
        self._sure_nodes = 0  # candidates of this step's tree that were not searched
        self._searched = self._most * (_SEARCHED_WHERE_FORBIDDEN if self._permits.asks else 1)
        names = [source.name for source in sources]
        with self.memory.lock:
            self._search = TreeSearch(self._searched, self.memory, names, surest, chain)
        self._takes_continuations = continuations
        self._siblings = RejectedSiblings(self._search.nodes, self.memory.ngrams.top_k)
        self._sources: list[Source] = [self._siblings, *sources]
        self._no_text = ContextMatches(16)
        self._no_text.start(())
        self._text: list[int] = []  # its last tokens
        self._late: list[int] = []  # new tokens that are not part of it yet
        self._length = 0
        self._tree: TokenTree | None = None  # this step's
        self._sent = 0  # how many of the nodes found it has
        self._rows = np.zeros(1, dtype=np.int64)  # place of the root and of each of these in the search
        self._trust = Trust()
        self._recalled = False  # whether the memory has learned the text itself
        self._wanted = self._most  # how many nodes are searched before the budget is asked

    @property
    def top_k(self) -> int:
        """How many of the likeliest next tokens `observe` wants of each node; none while drafting backs off, and while
        what the model says is not what is selected."""
        return 0 if self.budget.backs_off or self._trust.is_lost else self._top_k

    @property
    def path_probabilities(self) -> NDArray[np.float64]:
        """Probability that each candidate that `propose` added is accepted, in the order of the nodes."""
        found = self._search.path_probabilities[self._rows[1:] - 1]
        return np.concatenate([np.ones(self._sure_nodes), found])

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a sequence."""
        self._text = list(prompt[-LONGEST:])
        self._late = []
        self._length = len(prompt)
        self._recent.start(prompt)
        if self.matches is not None:
            self.matches.start(prompt)
        self._trust.start()
        self._search.listed.start()
        self._recalled = False
        if self.memory.ngrams.observed:
            with self.memory.lock:
                self._remember_text(np.array(prompt, dtype=np.int64))
        for source in self._sources:
            source.start(prompt)
        self._tree = None

    def propose(self, tree: TokenTree) -> None:
        """Add the certain tokens, and the likeliest paths after them, the likeliest node first."""
        self.budget.begin()
        self._certain = self._sure_nodes = 0
        self._rows = np.zeros(1, dtype=np.int64)
        if self._sure is not None and self._send_certain(tree, self._sure):
            return
        if not self.budget.backs_off:
            with self.memory.lock:
                self._propose(tree)

    def _send_certain(self, tree: TokenTree, source: Any) -> bool:
        """Add what is accepted whatever the model says. Whether that is all for this step; if not, the search goes on
        behind it."""
        certain = source.certain()
        room = min(self._most, tree.room) - len(certain)
        alternatives = source.alternatives() if room > 0 else []
        if sum(map(len, alternatives)) > room:
            alternatives = []
        tree.add_certain(certain[: self._most], alternatives)
        self._sure_nodes = tree.certain
        if alternatives or self.budget.backs_off or room <= 0:
            return True
        self._late += certain
        self._certain = len(certain)
        return False

    def _propose(self, tree: TokenTree) -> None:
        self._catch_up()
        read = self._read_prompt if self.budget.reads_prompts else 0
        for node in range(max(0, tree.root - read), tree.root):
            tree.needs_logits[node] = True
        matches = self._no_text if self.matches is None else self.matches
        paths = [source.propose() for source in self._sources]
        tries = self._explores and not self._trust.is_lost
        sources = self._search.ask(matches, paths, self._recent.arrays() if tries else NOTHING_RECENT)
        least = self.budget.least
        # Nodes that the budget will not take need not be searched: it says so, or the last step shows how many that is.
        limit = self._searched if least else min(self._wanted, self._searched)
        if self._trust.is_lost:
            least = max(least, _LEAST_UNTRUSTED)
        while True:
            self._search.search(self._text, limit, tree.room - self._certain, sources, least)
            likely = self._search.path_probabilities
            rows = self._permits.rows(*self._search.found(len(likely)))[: self._kept + 1 - self._certain]
            more = self.budget.offer(likely[rows[1:] - 1], self._length)
            if not more or len(rows) > self._most - self._certain or limit == self._searched or len(likely) < limit:
                break
            limit = min(2 * limit, self._searched)
        self.budget.when_chosen(lambda chosen: self._send(tree, rows[: chosen + 1]))

    def _send(self, tree: TokenTree, rows: NDArray[np.int64]) -> None:
        self._rows, chosen = rows, len(rows) - 1
        self._wanted = int(rows[-1]) + int(rows[-1]) // 4 + _LEAST_GROWN
        self._search.add_to(tree.beyond(self._certain), rows)
        self._sent = chosen
        self._tree = tree

    def explain(self, tree: TokenTree) -> Explanation:
        """Which sources named each node, and how likely it was taken to be."""
        with self.memory.lock:
            entries = int(np.count_nonzero(self.memory.ngrams.tags)) if self._top_k else None
            found = self._search.origins(self._rows[1:]) if tree is self._tree else []
        return Explanation([*[Origin((CERTAIN,))] * tree.certain, *found], entries)

    def observe(self, result: StepResult) -> None:
        """Learn from the predictions after every node, and add the new tokens to the text."""
        for source in self._sources:
            source.observe(result)
        if self.budget.backs_off or result.tree.certain > self._certain:  # nothing was searched
            self._late += result.tokens  # a resting drafter does nothing that can wait
            return
        with self.memory.lock:
            self._observe(result)

    def _observe(self, result: StepResult) -> None:
        self._catch_up()
        drafted = result.tree is self._tree
        result = result.beyond(self._certain)
        tree = result.tree
        learns = self._top_k > 0 and (result.top_ids.shape[1] > 0 or self._trust.is_lost)
        if learns:
            shaped = result.shaped()
            self._trust.note(shaped)
            told = believed(shaped, self._trust.share)
            if drafted and self._takes_continuations:
                before = int(self._rows[result.path[-1] - tree.root]) if result.path else 0
                first = self._search.root + 1
                said = self._spread(told[0], tree, -1), self._spread(told[1], tree, 0)
                self._siblings.follow(first - 1 + before, first, *said)
        if drafted and len(self._sources) > 1:
            self._search.listed.learn(result.tokens)
        if drafted and self._sent:
            self.budget.learn([node - tree.root - 1 for node in result.path if node <= tree.root + self._sent])
        self._tree = None
        if learns:
            self._remember(result, *believed(result, self._trust.share))
        self._late += result.tokens
        self._catch_up()

    def statistics(self) -> dict[str, Any]:
        """Of the n-gram memory; see `MemoryStatistics`."""
        return self.memory.statistics()

    def _catch_up(self) -> None:
        """Add the tokens to the text that were not added yet."""
        if not self._late:
            return
        self._text = [*self._text, *self._late][-LONGEST:]
        self._length += len(self._late)
        if self.matches is not None:
            self.matches.extend(self._late)
        self._late = []

    def _spread(self, told: NDArray[Any], tree: TokenTree, nothing: int) -> NDArray[Any]:
        """What is told of each node of the tree, for the root and each node found, up to the last that was sent."""
        sent = told[tree.root : tree.root + self._sent + 1]
        size = int(self._rows[-1]) + 1
        if size == len(sent):
            return sent
        spread = np.full((size, *told.shape[1:]), nothing, dtype=told.dtype)
        spread[self._rows] = sent
        return spread

    def _recall(self) -> None:
        """Learn what followed in the text itself, instead of what the model predicted there."""
        self._recalled = True
        if self.matches is not None:
            self._remember_text(self.matches.text[-_RECALLED:])

    def _remember_text(self, text: NDArray[np.int64]) -> None:
        """Put what followed in a text into the memory."""
        orders = self.memory.ngrams.orders
        contexts = np.full((max(len(text) - 1, 0), orders), -1, dtype=np.int64)
        for back in range(min(orders, len(contexts))):
            contexts[back:, back] = text[: len(contexts) - back]
        self.memory.ngrams.insert(contexts, text[1:, None], np.ones((len(contexts), 1), dtype=np.float32))

    def _remember(self, result: StepResult, top_ids: NDArray[np.int64], top_probabilities: NDArray[np.float32]) -> None:
        """Put the predictions of the step into the memory; those in real text last, so that they count."""
        if self._trust.is_lost and not self._recalled:
            self._recall()
        tree, orders = result.tree, self.memory.ngrams.orders
        before = self._text[: max(len(self._text) - tree.root - 1, 0)][-orders:]
        real = np.zeros(len(tree), dtype=np.int64)
        real[: tree.root + 1] = 1
        real[result.path] = 1
        read = np.flatnonzero(top_ids[:, 0] >= 0)
        read = read[np.argsort(real[read], kind="stable")]
        contexts = np.empty((len(read), orders), dtype=np.int64)
        texts = (np.array(before, dtype=np.int64), np.array(tree.tokens), np.array(tree.parents))
        write_contexts(*loop_arrays(*texts, read, contexts))
        self.memory.ngrams.insert(contexts, top_ids[read], top_probabilities[read])
        if self._explores:
            likeliest = top_ids[read, :2].T.ravel()
            self._recent.note(likeliest[likeliest >= 0].tolist())
