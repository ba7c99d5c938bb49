"""The window over several steps, and the n-grams that enter the pool, against a trace made by hand."""

import numpy as np
import pytest

from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.drafting import JacobiWindow, NGramPool, PaperDrafter, StepResult


class FakeModel:
    """After a node at index p of the text, in step s, predict the token 100 * s + p + 1.

    So every token shows its step and index: 204 was predicted in step 2 for index 4.
    """

    def __init__(self) -> None:
        self.step = 0
        self.text = [5]

    def run(self, tree: TokenTree, accept: int = 1) -> StepResult:
        """Run one step on `tree`, with its root at the end of the text, and decide `accept` tokens."""
        self.step += 1
        root_place = len(self.text) - 1
        predictions = np.array(
            [
                100 * self.step + root_place + depth - tree.depths[tree.root] + 1 if reads else -1
                for depth, reads in zip(tree.depths, tree.needs_logits, strict=True)
            ]
        )
        tokens = [100 * self.step + root_place + 1 + i for i in range(accept)]
        self.text += tokens
        return StepResult(tree, predictions, path=[], tokens=tokens)


def run_step(window: JacobiWindow, model: FakeModel, accept: int = 1) -> list[tuple[int, ...]]:
    tree = TokenTree(model.text[-1:])
    window.propose(tree)
    return window.observe(model.run(tree, accept))


def test_window_of_three_columns_and_four_grams_by_hand() -> None:
    window, model = JacobiWindow(window_size=3, ngram_size=4, seed=0), FakeModel()
    window.start([5])
    # W+N-3 = 4 random tokens of the prompt, for indices 1-4; the root is at index 0.
    assert window.rows == [[5, 5, 5, 5]]
    # Warm-up 1: the predictions after the trunk, for indices 2-5, become row 1. The next root takes index 1.
    assert run_step(window, model) == []
    assert window.rows == [[5, 5, 5], [102, 103, 104, 105]]
    # Warm-up 2: row 1 predicts indices 3-6. The next root takes index 2, so row 1 loses it, and row 2 index 3.
    assert run_step(window, model) == []
    assert window.rows == [[5, 5], [103, 104, 105], [204, 205, 206]]
    # The window is full: N-1 = 3 rows, W = 3 columns with the root. Each column and its new token are a 4-gram.
    assert run_step(window, model) == [(202, 103, 204, 305), (5, 104, 205, 306), (5, 105, 206, 307)]
    # Row 0 is dropped; the first token of row 1 is replaced by the next root, at index 3.
    assert window.rows == [[104, 105], [204, 205, 206], [305, 306, 307]]
    assert run_step(window, model) == [(303, 204, 305, 406), (104, 205, 306, 407), (105, 206, 307, 408)]
    assert window.rows == [[205, 206], [305, 306, 307], [406, 407, 408]]


def test_window_slides_one_place_however_many_tokens_are_accepted() -> None:
    window, model = JacobiWindow(window_size=3, ngram_size=4, seed=0), FakeModel()
    window.start([5])
    for _ in range(3):
        run_step(window, model)
    # Three tokens at once, for indices 4-6; the window's rows move up as after one token.
    assert run_step(window, model, accept=3) == [(303, 204, 305, 406), (104, 205, 306, 407), (105, 206, 307, 408)]
    assert model.text[-1] == 406
    assert window.rows == [[205, 206], [305, 306, 307], [406, 407, 408]]
    # Now the root is 406 at index 6, and the last row has indices 8-10.
    assert run_step(window, model) == [(406, 305, 406, 509), (205, 306, 407, 510), (206, 307, 408, 511)]


def test_window_hangs_its_columns_from_the_trunk() -> None:
    window, model = JacobiWindow(window_size=3, ngram_size=4, seed=0), FakeModel()
    window.start([5])
    for _ in range(3):
        run_step(window, model)
    tree = TokenTree([7, 8])
    window.propose(tree)
    # nodes: 0 pending, 1 root, 2-3 trunk (104, 105), 4-6 row 1, 7-9 row 2
    assert tree.tokens[2:] == [104, 105, 204, 205, 206, 305, 306, 307]
    assert tree.parents[2:] == [1, 2, 1, 2, 3, 4, 5, 6]
    assert all(kind is NodeKind.WINDOW for kind in tree.kinds[2:])
    assert tree.needs_logits == [False, True, False, False, False, False, False, True, True, True]


@pytest.mark.parametrize(("columns", "size"), [(1, 2), (1, 3), (2, 2), (4, 2), (1, 6), (15, 5)])
def test_window_settles_to_its_size_after_the_warm_up(columns: int, size: int) -> None:
    window, model = JacobiWindow(columns, size, seed=3), FakeModel()
    window.start([5, 6, 7])
    assert len(window.rows[0]) == columns + size - 3
    for _ in range(size - 2):
        assert run_step(window, model) == []
    for _ in range(3):
        ngrams = run_step(window, model)
        assert len(ngrams) == columns
        assert {len(ngram) for ngram in ngrams} == {size}
        assert [len(row) for row in window.rows] == [columns - 1] + [columns] * (size - 2)


def test_window_starts_from_prompt_tokens_under_its_seed() -> None:
    prompt = list(range(50, 90))
    rows = []
    for seed in (1, 1, 2):
        window = JacobiWindow(10, 4, seed)
        window.start(prompt)
        rows.append(window.rows)
    assert rows[0] == rows[1] != rows[2]
    assert set(rows[0][0]) <= set(prompt)


def test_window_waits_where_the_context_ends() -> None:
    window, model = JacobiWindow(3, 4, seed=0), FakeModel()
    window.start([5])
    run_step(window, model)
    before = window.rows
    tree = TokenTree([1], max_depth=2)
    window.propose(tree)
    assert tree.is_chain
    assert window.observe(model.run(tree)) == []
    assert window.rows == before


def test_pool_keeps_the_newest_g_for_each_first_token() -> None:
    pool = NGramPool(ngram_size=3, guess_set_size=2)
    for ngram in [(1, 2, 3), (1, 4, 5), (2, 0, 0), (1, 6, 7)]:
        pool.add(ngram)
    assert pool.lookup(1) == [(6, 7), (4, 5)], "most recent first, the oldest gone"
    pool.add((1, 4, 5))
    pool.add((1, 8, 9))
    assert pool.lookup(1) == [(8, 9), (4, 5)], "found again means used again"
    assert pool.lookup(2) == [(0, 0)]
    assert pool.lookup(3) == []
    assert len(pool) == 3


def test_pool_learns_a_text() -> None:
    pool = NGramPool(ngram_size=3, guess_set_size=4)
    pool.add_text([1, 2, 3, 1, 2, 4])
    assert pool.lookup(1) == [(2, 4), (2, 3)]
    assert pool.lookup(2) == [(3, 1)]
    assert pool.lookup(3) == [(1, 2)]
    assert pool.lookup(4) == []


def test_drafter_verifies_n_grams_of_the_window() -> None:
    window, pool, model = JacobiWindow(3, 4, seed=0), NGramPool(4, 3), FakeModel()
    drafter = PaperDrafter(window, pool)
    drafter.start([5])
    for _ in range(3):
        tree = TokenTree(model.text[-1:])
        drafter.propose(tree)
        drafter.observe(model.run(tree))
    assert pool.lookup(5) == [(105, 206, 307), (104, 205, 306)]
    assert pool.lookup(202) == [(103, 204, 305)]
    tree = TokenTree([5])
    drafter.propose(tree)
    candidates = [tree.tokens[n] for n in range(len(tree)) if tree.kinds[n] is NodeKind.CANDIDATE]
    assert candidates == [105, 206, 307, 104, 205, 306]


def test_pool_from_prompt_and_output_takes_the_accepted_run_once() -> None:
    """The original implementation repeats the last token instead of adding the accepted run."""
    pool = NGramPool(3, 5)
    drafter = PaperDrafter(JacobiWindow(2, 3, seed=0), pool, pool_from_prompt=True, pool_from_output=True)
    drafter.start([1, 2, 3])
    assert pool.lookup(1) == [(2, 3)]
    tree = TokenTree([3])
    drafter.observe(StepResult(tree, np.array([10]), path=[], tokens=[10, 11, 12]))
    assert pool.lookup(2) == [(3, 10)]
    assert pool.lookup(3) == [(10, 11)]
    assert pool.lookup(10) == [(11, 12)]
    assert len(pool) == 4


def test_prompt_shorter_than_an_ngram_fills_nothing() -> None:
    pool = NGramPool(5, 5)
    drafter = PaperDrafter(JacobiWindow(2, 5, seed=0), pool, pool_from_prompt=True, pool_from_output=True)
    drafter.start([1])
    assert len(pool) == 0
