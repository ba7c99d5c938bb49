"""The model runner, against a plain forward pass for each path of a tree."""

import pytest
import torch
from transformers import DeepseekV4Config, Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig, PreTrainedModel

from lookahead.backends.transformers.limits import Limits
from lookahead.backends.transformers.runner import LONGEST_DRAFTED_PREFILL, ModelRunner
from lookahead.core.token_tree import TokenTree
from model_zoo import ARCHITECTURES, build

CHOSEN = [
    "llama",
    "mistral_sliding",
    "qwen2_mixed_sliding",
    "gemma2",
    "gemma3",
    "gpt2",
    "opt",
    "mixtral",
    "llama4_chunked",
]


def path_to(tree: TokenTree, node: int) -> list[int]:
    tokens = []
    while node >= 0:
        tokens.append(tree.tokens[node])
        node = tree.parents[node]
    return tokens[::-1]


def plain_logits(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


@pytest.mark.parametrize("name", CHOSEN)
def test_every_node_reads_its_own_path(name: str) -> None:
    model = build(name, attention=ARCHITECTURES[name].attention[0])
    runner = ModelRunner(model, batch_size=2)
    texts = [[5, 9, 1, 4, 7, 5, 9, 1, 22, 3, 8, 2], [6, 2, 30]]
    cached: list[list[int]] = [[], []]
    with torch.no_grad():
        for step in range(3):
            trees = []
            for row, text in enumerate(texts):
                tree = runner.begin_tree(row, text)
                tree.add_candidates([1 + step, 2, 3])
                tree.add_candidates([1 + step, 4])
                window = tree.add_window_node(11, tree.root, needs_logits=True)
                tree.add_window_node(12 + row, window, needs_logits=True)
                trees.append(tree)
            results = runner.forward(trees)
            for row, (tree, result) in enumerate(zip(trees, results, strict=True)):
                for node in range(len(tree)):
                    if tree.needs_logits[node]:
                        expected = plain_logits(model, cached[row] + path_to(tree, node))
                        torch.testing.assert_close(result.logits_after(node)[0], expected, atol=2e-4, rtol=1e-4)
                        assert result.predictions[node] == expected.argmax()
                    else:
                        assert result.predictions[node] == -1
            # Rows accept different lengths: the branch in scattered slots, and a single candidate.
            paths = [trees[0].add_candidates([1 + step, 4]), trees[1].add_candidates([1 + step])]
            runner.commit([[*range(t.root + 1), *path] for t, path in zip(trees, paths, strict=True)])
            for row, (tree, path) in enumerate(zip(trees, paths, strict=True)):
                cached[row] = texts[row] + [tree.tokens[node] for node in path]
                texts[row] = [*cached[row], 40 + step]


def test_one_token_steps_are_transformers_own(llama: PreTrainedModel) -> None:
    """A step without a draft has no mask of ours, and is bit-identical to transformers."""
    text = [4, 8, 15, 16, 23, 42]
    runner = ModelRunner(llama, batch_size=1)
    with torch.no_grad():
        expected = llama(input_ids=torch.tensor([text]), use_cache=True, logits_to_keep=1)
        tree = runner.begin_tree(0, text)
        logits = runner.forward([tree])[0].logits_after(tree.root)
        assert torch.equal(logits, expected.logits[0])
        runner.commit([range(len(tree))])
        expected = llama(input_ids=torch.tensor([[7]]), past_key_values=expected.past_key_values, use_cache=True)
        tree = runner.begin_tree(0, [*text, 7])
        assert len(tree) == 1
        assert torch.equal(runner.forward([tree])[0].logits_after(tree.root), expected.logits[0])


def test_a_long_prompt_is_sent_without_a_draft(llama: PreTrainedModel) -> None:
    runner = ModelRunner(llama, batch_size=1)
    assert runner.wants_draft(runner.begin_tree(0, [1] * LONGEST_DRAFTED_PREFILL))
    assert not runner.wants_draft(runner.begin_tree(0, [1] * (LONGEST_DRAFTED_PREFILL + 1)))


def test_trees_end_where_the_context_does() -> None:
    table = Limits(GPT2Config(n_positions=100))
    assert table.deepest(10) == 99
    assert table.deepest(99) == 99
    assert table.deepest(100) is None
    assert table.last_length == 101
    assert Limits(LlamaConfig(max_position_embeddings=100)).deepest(10) == 99
    assert Limits(LlamaConfig(max_position_embeddings=100)).last_length is None
    assert Limits(PreTrainedConfig()).deepest(10) is None


def test_keys_that_are_picked_are_counted_by_tokens_and_not_by_positions() -> None:
    """After an image, positions are smaller than indices in the text."""
    limits = Limits(PreTrainedConfig(layer_types=["indexed_attention"], index_topk=64))
    assert limits.deepest(10, shift=-20) == limits.deepest(10) - 20


def test_trees_end_once_a_model_selects_keys() -> None:
    config = DeepseekV4Config(index_topk=3, compress_rates={"compressed_sparse_attention": 4})
    limit = Limits(config)
    # The token at index 15 completes a fourth entry of four tokens; the one before it may join the pending tokens.
    assert [limit.deepest(place) for place in (0, 12, 13, 14, 15, 40)] == [13, 13, 13, 14, 15, 40]


def test_trees_do_not_reach_across_a_change_of_rope() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    sizes = {"hidden_size": 32, "num_attention_heads": 2}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    longrope = Limits(LlamaConfig(**sizes, max_position_embeddings=100, rope_parameters=rope))
    assert longrope.deepest(10) == 31
    assert longrope.deepest(32) == 99
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    dynamic = Limits(LlamaConfig(**sizes, max_position_embeddings=32, rope_parameters=rope))
    assert dynamic.deepest(10) == 30  # a pass up to the last index keeps the frequencies of a longer text
    assert dynamic.deepest(40) == 40, "the frequencies change with every position: one at a time"


def test_rope_may_change_at_a_place_of_its_own_in_each_kind_of_layers() -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}
    ropes = {
        "full_attention": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0},
        "sliding_attention": {"rope_type": "longrope", "rope_theta": 10_000.0, **factors},
    }
    limit = Limits(Gemma3TextConfig(head_dim=16, max_position_embeddings=64, rope_parameters=ropes))
    assert [limit.deepest(position) for position in (10, 31, 32, 61, 62, 70)] == [31, 31, 62, 62, 62, 70]
    assert limit.changes_after == 32
