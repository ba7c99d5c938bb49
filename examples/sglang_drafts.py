"""A sketch, which nobody has run: this library's trees of drafts for SGLang, in the form of its NGRAM method.

SGLang needs a GPU. What could be tried without one is `TreeDrafts`: that its masks say what its trees are, and that the
texts they lead to are right (`tests/integrations/test_sglang_sketch.py`). It is not supported.

SGLang's NGRAM worker asks once a step for the drafts of all requests: `nodes` tokens for each, of which the first is
the last token of the text, and a mask that says which of them each one follows. A plugin registers its own worker:

    [project.entry-points."sglang.srt.plugins"]
    lookahead = "sglang_drafts:register"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lookahead.core.protocols import StepResult
from lookahead.core.token_tree import TokenTree, lay_out
from lookahead.drafting.text_only import build_text_drafter, text_memory


class TreeDrafts:
    """Drafts for the requests of each step; all of them share a memory.

    Args:
        nodes: Tokens of each draft, the last one of the text included.
    """

    def __init__(self, nodes: int) -> None:
        self._nodes = nodes
        self._memory = text_memory()
        self._requests: dict[str, _Request] = {}

    def batch_get(
        self, names: Sequence[str], texts: Sequence[Sequence[int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The drafts of a step. Requests that are not part of it are forgotten.

        Args:
            names: Of the requests.
            texts: Their tokens so far.

        Returns:
            The tokens, `[requests * nodes]`, and for each of them which ones of its request it sees: those that it
            follows, and itself, `[requests * nodes * nodes]`.
        """
        known, self._requests = self._requests, {}
        tokens = np.zeros((len(names), self._nodes), dtype=np.int64)
        masks = np.tile(np.eye(self._nodes, dtype=np.bool_), (len(names), 1, 1))
        masks[:, :, 0] = True  # what is left over counts as further tokens after the text
        for row, (name, text) in enumerate(zip(names, texts, strict=True)):
            request = known.get(name)
            if request is None or len(text) <= request.length:
                request = _Request(build_text_drafter(self._nodes, self._memory), text)
            else:
                request.read(text)
            self._requests[name] = request
            layout = lay_out(request.draft(text))
            size = len(layout.tokens)
            tokens[row, :size] = layout.tokens
            masks[row, :size, :size] = layout.ancestor_mask()
        return tokens.ravel(), masks.ravel()


class _Request:
    """One text, and the tree that was drafted after it."""

    def __init__(self, drafter: Any, text: Sequence[int]) -> None:
        self._drafter = drafter
        self.length = len(text)
        self._tree = TokenTree([text[-1]])
        drafter.start(list(text))

    def draft(self, text: Sequence[int]) -> TokenTree:
        """A new tree after the text."""
        self._tree = TokenTree([text[-1]])
        self._drafter.propose(self._tree)
        return self._tree

    def read(self, text: Sequence[int]) -> None:
        """Learn what the step selected: a path of the tree, and a token more; or after left-over tokens two more."""
        new, self.length = list(text[self.length :]), len(text)
        while new:
            path = self._path(new[:-1])
            taken, new = new[: len(path) + 1], new[len(path) + 1 :]
            selected = np.full((len(self._tree), 1), -1, dtype=np.int64)
            selected[[self._tree.root, *path], 0] = taken
            shares = (selected >= 0).astype(np.float32)
            self._drafter.observe(StepResult(self._tree, selected[:, 0], path, taken, selected, shares))
            self._tree = TokenTree([taken[-1]])

    def _path(self, tokens: Sequence[int]) -> list[int]:
        """The nodes of the tree that these tokens are, as far as they are."""
        path, node, tree = [], self._tree.root, self._tree
        for token in tokens:
            following = (at for at in range(node + 1, len(tree)) if tree.parents[at] == node)
            found = [at for at in following if tree.tokens[at] == token]
            if not found:
                break
            node = found[0]
            path.append(node)
        return path


def register() -> None:
    """What SGLang would call when it starts, with `--speculative-algorithm LOOKAHEAD`. Not run so far."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    class Worker(NGRAMWorker):  # type: ignore[misc]
        """SGLang's own worker, which is given other drafts to verify."""

        def _prepare_draft_tokens(self, batch: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
            if not hasattr(self, "_drafts"):
                self._drafts = TreeDrafts(self.draft_token_num)
            names = [request.rid for request in batch.reqs]
            return self._drafts.batch_get(names, [[*one.origin_input_ids, *one.output_ids] for one in batch.reqs])

        def _update_ngram_cache(self, batch: Any) -> None:
            """The next step shows what there is to learn."""

    @SpeculativeAlgorithm.register("LOOKAHEAD", supports_overlap=False)
    def worker(server_args: Any) -> type:
        return Worker
