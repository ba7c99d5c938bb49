"""RACER (arXiv 2604.14885, section 3): draft retrieved continuations first, then the likeliest tokens seen last."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Any

from lookahead.core.results import StepResult
from lookahead.core.token_tree import TokenTree
from lookahead.core.watching import Explanation, Origin


class _Node:
    """Node of the trie of n-grams: its parent, token and children, and the number of n-grams through it."""

    __slots__ = ("children", "count", "parent", "token")

    def __init__(self, parent: Any = None, token: int = -1) -> None:
        self.parent, self.token, self.count = parent, token, 0
        self.children: dict[int, _Node] = {}


class RacerDrafter:
    """Drafter of the most frequent continuations of the text's last tokens, filled up with the likeliest tokens.

    A trie has the n-grams of the text; if it is full, the least recently used leaf goes. The text moves a state down
    the trie, as in an Aho-Corasick automaton. Without a child for the next token the state begins again at the root:
    the authors' code has no links to shorter states of new n-grams either.

    Args:
        budget: Nodes of a step, the root included. At least 1.
        ngram_size: Tokens of the n-grams in the trie. At least 2.
        breadth: Likeliest tokens kept after each token. At least 1.
        capacity: Most nodes of the trie.
        chains: Draft a single path, for models that cannot run trees.
    """

    def __init__(self, budget: int, ngram_size: int, breadth: int, capacity: int, chains: bool = False) -> None:
        self.budget, self.ngram_size, self.top_k, self.capacity = budget, ngram_size, breadth, capacity
        self._chains, self._retrieved = chains, 0
        self._likeliest: dict[int, list[int]] = {}

    def start(self, prompt: Sequence[int]) -> None:
        """Begin a text with the n-grams of `prompt`. The likeliest tokens hold for any text."""
        self._state = self._trie = _Node()
        self._text: list[int] = []
        self._used: OrderedDict[_Node, None] = OrderedDict()  # nodes of the trie, the least recently used first
        self._add(prompt, prompt[-1:])

    def propose(self, tree: TokenTree) -> None:
        """Add retrieved continuations, then the likeliest tokens after each token, level by level."""
        left = self.budget - 1 - self._retrieve(tree)
        self._retrieved = len(tree) - tree.root - 1
        queue = deque([(len(tree) - 1, 1, 0) if self._chains else (tree.root, self.top_k, 0)])
        while queue and left > 0:
            node, breadth, level = queue.popleft()
            share = breadth if level == 1 else breadth // 2  # of the likeliest child; each next one has half
            for token in self._likeliest.get(tree.tokens[node], ())[: min(breadth, left)]:
                queue += [(child, max(share, 1), level + 1) for child in tree.add_candidates([token], node)]
                left, share = left - 1, share // 2

    def explain(self, tree: TokenTree) -> Explanation:
        """Return for each node whether it was retrieved."""
        nodes = range(len(tree) - tree.root - 1)
        names = ["n-grams" if node < self._retrieved else "last prediction after the token" for node in nodes]
        return Explanation([Origin((name,)) for name in names], len(self._used))

    def observe(self, result: StepResult) -> None:
        """Add the new n-grams, and the predictions after every node."""
        for token, ids in zip(result.tree.tokens, result.top_ids.tolist(), strict=True):
            if ids and ids[0] >= 0:
                self._likeliest[token] = ids[: self.top_k]
        self._add(result.tokens, result.tokens)

    def statistics(self) -> dict[str, Any]:
        """Return the size of the trie."""
        return {"entries": len(self._used)}

    def _retrieve(self, tree: TokenTree) -> int:
        """Add the most frequent continuations, the most frequent first; return their number of nodes in the trie."""
        queue: list[tuple[int, int, int, _Node, int]] = []  # minus the count, level, order, node, parent in the tree
        order, chosen = count(), 0
        if self._state.parent not in (None, self._trie):  # at least two tokens of the text
            self._touch(self._state)
            queue.append((-self._state.count, 0, next(order), self._state, tree.root))
        while queue and chosen < self.budget:
            _, level, _, node, place = heappop(queue)
            chosen += 1
            path = [place] if level == 0 else tree.add_candidates([node.token], place)
            children = sorted(node.children.values(), key=lambda child: child.count, reverse=True) if path else []
            for child in children[: 1 if self._chains else None]:
                heappush(queue, (-child.count, level + 1, next(order), child, path[0]))
        return chosen

    def _add(self, tokens: Sequence[int], moved: Sequence[int]) -> None:
        """Append tokens to the text, add its n-grams without the last token, and move the state by some tokens."""
        begin = max(len(self._text), self.ngram_size)
        self._text += tokens
        for end in range(begin, len(self._text)):
            node = self._trie
            for token in self._text[end - self.ngram_size : end]:
                node = node.children.setdefault(token, _Node(node, token))
                node.count += 1
            self._touch(node)
        while len(self._used) > self.capacity:
            leaf, _ = self._used.popitem(last=False)
            leaf.parent.children.pop(leaf.token, None)
        for token in moved:
            self._state = self._state.children.get(token) or self._trie.children.get(token) or self._trie

    def _touch(self, node: _Node) -> None:
        """Mark a node and then its ancestors as used, so that the least recently used node is a leaf."""
        while node.parent is not None:
            self._used[node] = None
            self._used.move_to_end(node)
            node = node.parent
