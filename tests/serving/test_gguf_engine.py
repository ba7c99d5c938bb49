"""The engine with sequence ids of llama.cpp, against `model.generate` for each prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lookahead
from gguf_files import REASON, zoo_file
from lookahead import InvalidArgumentError, LookaheadConfig
from lookahead.backends.llama_cpp.context import binding
from lookahead.serving import Engine
from model_zoo import build

pytest.importorskip("llama_cpp", reason=REASON)
pytestmark = pytest.mark.usefixtures("compiled_loops")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made = lookahead.load_gguf(zoo_file(tmp_path_factory.mktemp("zoo")))
    made.generation_config.eos_token_id = None
    return made


def prompts(count: int) -> list[torch.Tensor]:
    """Return prompts of different lengths, some with a common prefix."""
    draws = torch.Generator().manual_seed(0)
    start = torch.randint(1, 72, (1, 24), generator=draws)
    ends = [torch.randint(1, 72, (1, 3 + 2 * number), generator=draws) for number in range(count)]
    return [torch.cat([start, end], dim=1) if number % 2 else end for number, end in enumerate(ends)]


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (None, {"max_rows": 3}),
        (LookaheadConfig(step_budget=40), {"max_rows": 4, "prompt_tokens": 8}),
        (LookaheadConfig(step_budget=30), {"max_rows": 4, "kv_bytes": 300 * 1000}),
        (LookaheadConfig(preset="autoregressive"), {"max_rows": 2}),
        (LookaheadConfig(preset="paper", window_size=5, ngram_size=3, guess_set_size=5), {"max_rows": 5}),
    ],
    ids=["auto", "small prompts", "little memory", "plain", "paper"],
)
def test_requests_get_the_tokens_of_single_calls(
    model: Any, config: LookaheadConfig | None, sizes: dict[str, Any]
) -> None:
    """Greedy and sampled requests together, more than `max_rows`; finished texts are reused."""
    reference, inputs = build("llama"), prompts(6)
    engine = Engine(model, config, **sizes)
    handles, expected = [], []
    for number, ids in enumerate(2 * inputs):
        options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": number % 3 == 0}
        if options["do_sample"]:
            options["temperature"] = 0.9
        handles.append(engine.submit(ids, seed=number, **options))
        torch.manual_seed(number)
        expected.append(reference.generate(ids, **options, eos_token_id=None, pad_token_id=0).tolist())
    engine.run()
    assert [handle.result().tolist() for handle in handles] == expected
    assert engine.statistics.reused_tokens > 0


def test_sequence_ids_are_returned(model: Any) -> None:
    """Successive requests, some cancelled, more than there are sequence ids."""
    engine = Engine(model, LookaheadConfig(step_budget=60), max_rows=4)
    (ids,) = prompts(1)
    expected = build("llama").generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=None).tolist()
    for number in range(300):
        handle = engine.submit(torch.cat([ids, torch.tensor([[1 + number % 70]])], dim=1), max_new_tokens=6)
        engine.step()
        if number % 3:
            handle.cancel()
        else:
            engine.run()
    engine.run()
    handle = engine.submit(ids, max_new_tokens=6, do_sample=False)
    engine.run()
    assert handle.result().tolist() == expected


def tokens_in_cells(engine: Engine) -> int:
    """Return the number of tokens in llama.cpp's cells; shared cells count once per sequence."""
    context: Any = engine._loop.runner.llama_context
    last = binding().llama_memory_seq_pos_max
    return sum(last(context._memory, sequence) + 1 for sequence in range(context.sequences))


def test_no_token_attends_to_finished_texts(model: Any) -> None:
    """Finished texts leave llama.cpp's cells, which attention always reads, and return for equal prefixes."""
    reference = build("llama")
    engine = Engine(model, LookaheadConfig(step_budget=20), max_rows=4)
    draws = torch.Generator().manual_seed(1)
    inputs = [torch.randint(1, 72, (1, 20 + number), generator=draws) for number in range(40)]
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    expected = [reference.generate(ids, **options, eos_token_id=None, pad_token_id=0).tolist() for ids in inputs]
    for ids, text in zip(inputs, expected, strict=True):
        handle = engine.submit(ids, **options)
        engine.run()
        assert handle.result().tolist() == text
        assert tokens_in_cells(engine) == 0
    assert engine.load.prefix_bytes >= sum(ids.shape[1] for ids in inputs) * model.llama.token_bytes
    assert engine.statistics.reused_tokens == 0
    for ids, text in zip(inputs, expected, strict=True):
        handle = engine.submit(ids, **options)
        engine.run()
        assert handle.result().tolist() == text
        assert handle.statistics.reused_tokens == ids.shape[1] - 1


def test_no_token_attends_to_a_text_that_went_beside_it(model: Any) -> None:
    engine = Engine(model, LookaheadConfig(preset="autoregressive"), max_rows=2, prefix_cache=False)
    long = engine.submit([3, 4, 5], max_new_tokens=30, do_sample=False)
    short = engine.submit([6, 7, 8, 9], max_new_tokens=3, do_sample=False)
    short.result()
    for _ in range(2):
        engine.step()
    assert not long.done
    assert tokens_in_cells(engine) == 3 + len(long.tokens) - 1  # the last token is sent with the next step


def test_kv_bytes_bounds_finished_texts_and_running_ones_together(model: Any) -> None:
    size = model.llama.token_bytes
    engine = Engine(model, LookaheadConfig(step_budget=8), max_rows=2, kv_bytes=800 * size)
    assert engine.load.kv_limit_bytes == 800 * size
    handles = [engine.submit(list(range(number, number + 30)), max_new_tokens=10) for number in range(1, 20)]
    engine.run()
    assert all(handle.result().shape[1] == 40 for handle in handles)
    assert 0 < engine.load.prefix_bytes <= 200 * size


def test_unsupported_arguments_are_refused(model: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_rows=300"):
        Engine(model, max_rows=300)
    with pytest.raises(InvalidArgumentError, match="pack_weights=True"):
        Engine(model, LookaheadConfig(pack_weights=True))
    engine = Engine(model, max_rows=16)
    with pytest.raises(InvalidArgumentError, match="preset='paper'.*max_rows"):
        engine.submit([1, 2, 3], max_new_tokens=5, lookahead_config=LookaheadConfig(preset="paper"))
