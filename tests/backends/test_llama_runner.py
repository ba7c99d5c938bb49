"""Trees of several rows in one context of llama.cpp, against transformers on each single path."""

import numpy as np
import pytest
import torch

from gguf_files import REASON, zoo_file
from lookahead import InvalidArgumentError, UnsupportedModelError
from lookahead.core.token_tree import TokenTree
from model_zoo import build

pytest.importorskip("llama_cpp", reason=REASON)

from lookahead.backends.llama_cpp import checks
from lookahead.backends.llama_cpp.context import LlamaContext
from lookahead.backends.llama_cpp.file import LlamaModel
from lookahead.backends.llama_cpp.runner import LlamaRunner
from lookahead.backends.trials import LEAVES, drafted_difference


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaModel:
    return LlamaModel(zoo_file(tmp_path_factory.mktemp("zoo")), n_gpu_layers=0, threads=1)


def grow(tree: TokenTree, draws: np.random.Generator, leaves: int) -> None:
    """Add branches at random nodes, some with window nodes."""
    for _ in range(leaves):
        parent = int(draws.integers(tree.root, len(tree)))
        if draws.random() < 0.8 and tree.kinds[parent] != 2:
            tree.add_candidates(draws.integers(0, 72, draws.integers(1, 4)).tolist(), parent)
        else:
            tree.add_window_node(int(draws.integers(0, 72)), parent, needs_logits=bool(draws.random() < 0.7))


def path_to(tree: TokenTree, node: int) -> list[int]:
    path = [node]
    while tree.parents[path[0]] >= 0:
        path.insert(0, tree.parents[path[0]])
    return path


def random_kept(tree: TokenTree, draws: np.random.Generator) -> list[int]:
    """Return a path from the first node through some candidates, sometimes ending within the pending tokens."""
    if draws.random() < 0.1:
        return list(range(draws.integers(0, tree.root + 1)))
    candidates = [node for node in range(tree.root, len(tree)) if tree.kinds[node] != 2]
    return path_to(tree, int(draws.choice(candidates)))


@pytest.mark.parametrize(("rows", "sequences"), [(1, 40), (3, 60), (3, 26)])
def test_every_node_is_read_after_its_path(model: LlamaModel, rows: int, sequences: int) -> None:
    """Includes idle rows, and rows that exchange sequence ids."""
    reference = build("llama")
    draws = np.random.default_rng(rows * sequences)
    runner = LlamaRunner(model.acquire(2000, sequences), rows)
    texts = [draws.integers(0, 72, draws.integers(1, 9)).tolist() for _ in range(rows)]
    for step in range(12):
        idle = [rows > 1 and bool(draws.random() < 0.2) for _ in range(rows)]
        idle[step % rows] = False
        trees = [runner.idle_tree() if rests else runner.begin_tree(row, texts[row]) for row, rests in enumerate(idle)]
        for tree, rests in zip(trees, idle, strict=True):
            if not rests:
                grow(tree, draws, int(draws.integers(0, 9)))
        results = runner.forward(trees, top_k=3)
        paths = []
        for row, (tree, result, rests) in enumerate(zip(trees, results, idle, strict=True)):
            if rests:
                assert result.predictions.tolist() == [-1]
                paths.append([])
                continue
            before = texts[row][: len(texts[row]) - tree.root - 1]
            for node in range(len(tree)):
                if not tree.needs_logits[node]:
                    assert result.predictions[node] == -1
                    continue
                path = before + [tree.tokens[each] for each in path_to(tree, node)]
                expected = reference(torch.tensor([path])).logits[:, -1].detach()
                torch.testing.assert_close(result.logits_after(node), expected, atol=2e-4, rtol=2e-4)
                top = expected.softmax(-1).topk(3)
                assert result.predictions[node] == top.indices[0, 0]
                np.testing.assert_allclose(result.top_probabilities[node], top.values[0], atol=1e-4)
            paths.append(random_kept(tree, draws))
            texts[row] = before + [tree.tokens[node] for node in paths[-1]] + [int(draws.integers(0, 72))]
        runner.commit(paths)


def test_ids_go_back_where_nothing_is_drafted(model: LlamaModel) -> None:
    """Later drafts get ids again, with the text added meanwhile."""
    reference, draws = build("llama"), np.random.default_rng(5)
    runner = LlamaRunner(model.acquire(600, 16), 1)
    text = draws.integers(0, 72, 7).tolist()
    counts = []
    for drafts in [True, *[False] * 2, True, *[False] * 6, True]:
        tree = runner.begin_tree(0, text)
        if drafts:
            grow(tree, draws, 6)
        (result,) = runner.forward([tree])
        for node in np.flatnonzero(tree.needs_logits).tolist():
            path = text[: len(text) - tree.root - 1] + [tree.tokens[each] for each in path_to(tree, node)]
            expected = reference(torch.tensor([path])).logits[:, -1].detach()
            torch.testing.assert_close(result.logits_after(node), expected, atol=2e-4, rtol=2e-4)
        path = random_kept(tree, draws) if drafts else [0]
        runner.commit([path])
        text = text[: len(text) - tree.root - 1] + [tree.tokens[node] for node in path] + [int(draws.integers(0, 72))]
        counts.append(len(runner.rows[0].ids))
    assert counts[1] == counts[2] > 1
    assert counts[9] == 1 < counts[10]


def read(runner: LlamaRunner, text: list[int]) -> torch.Tensor:
    """Return the logits after `text` in the first row, and commit its new tokens."""
    tree = runner.begin_tree(0, text)
    (result,) = runner.forward([tree])
    runner.commit([range(len(tree))])
    return result.logits_after(tree.root)


@pytest.mark.parametrize("common", [1, 9, 19])
def test_a_row_begins_with_one_that_was_set_apart(model: LlamaModel, common: int) -> None:
    reference, draws = build("llama"), np.random.default_rng(common)
    runner = LlamaRunner(model.acquire(600, 16), 1)
    text = draws.integers(0, 72, 20).tolist()
    read(runner, text)
    (old,) = runner.rows
    old.set_apart()
    for end in range(1, 4):
        runner.rows = [runner.new_row()]
        runner.rows[0].copy_start(old, common)
        assert runner.rows[0].length == common
        other = [*text[:common], *draws.integers(0, 72, end).tolist()]
        expected = reference(torch.tensor([other])).logits[:, -1].detach()
        torch.testing.assert_close(read(runner, other), expected, atol=2e-4, rtol=2e-4)


def test_a_row_stays_empty_where_one_that_was_set_apart_finds_no_room(model: LlamaModel) -> None:
    reference, draws = build("llama"), np.random.default_rng(0)
    runner = LlamaRunner(LlamaContext(model, 256, 4), 1)
    old, running = (draws.integers(0, 72, 150).tolist() for _ in range(2))
    read(runner, old)
    (remaining,) = runner.rows
    remaining.set_apart()
    runner.rows = [runner.new_row()]
    read(runner, running)
    empty = runner.new_row()
    empty.copy_start(remaining, 100)
    assert empty.length == 0
    running.append(7)
    expected = reference(torch.tensor([running])).logits[:, -1].detach()
    torch.testing.assert_close(read(runner, running), expected, atol=2e-4, rtol=2e-4)


def test_more_leaves_than_sequences_are_refused(model: LlamaModel) -> None:
    runner = LlamaRunner(model.acquire(300, 4), 1)
    tree = runner.begin_tree(0, [1, 2])
    for token in range(5):
        tree.add_candidates([token])
    with pytest.raises(InvalidArgumentError, match="5 leaves.* 4 sequences"):
        runner.forward([tree])


class MixedUp(LlamaContext):
    """Only logits of trees are wrong: nodes are mixed up."""

    def run(self, *counts):
        return np.roll(super().run(*counts), 1, axis=0)


def test_the_check_notices_wrong_logits(model: LlamaModel) -> None:
    assert checks.largest_difference(model) < 1e-4
    wrong = LlamaModel(model.path, n_gpu_layers=0, threads=1)
    wrong.release(MixedUp(wrong, 2000, 64))  # the next caller gets it
    with pytest.raises(UnsupportedModelError, match="other logits on token trees"):
        checks.check_model(wrong)


class KeepsTheFirst(LlamaRunner):
    """Keeps the first branch instead of the accepted one."""

    def _commit(self, row, below, path):
        first = [node for node in below.layout.order.tolist() if below.first[below.layout.slots[node]] == 0]
        super()._commit(row, below, first[: len(path)])


@pytest.mark.parametrize("kind", [LlamaRunner, KeepsTheFirst])
def test_the_trial_notices_that_the_wrong_branch_is_kept(model: LlamaModel, kind: type[LlamaRunner]) -> None:
    difference = drafted_difference(lambda drafts: kind(LlamaContext(model, 2000, LEAVES), 1), range(4, 72), False)
    assert (difference <= checks.TOLERANCE) == (kind is LlamaRunner)
