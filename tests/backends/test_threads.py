"""Several threads with one model object: first calls, which create its shared state, and many more."""

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import lookahead
from lookahead import LookaheadConfig
from lookahead.backends.transformers.findings import model_identity
from lookahead.drafting.memory_file import load_memory
from lookahead.serving.drafting import Drafting, draft_memory, draft_pace
from model_zoo import VOCAB_SIZE, build
from ngram_access import lookup
from quick import quickly

THREADS = 8
FIRST: list[dict[str, Any]] = [{"pack_weights": True}, {"engine": "static"}]


@pytest.fixture
def model() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


def prompts(count: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    rows = torch.randint(VOCAB_SIZE, (count, 6), generator=random)
    return [row.repeat(2)[None] for row in rows]  # repeated text to draft from


def in_threads(work: Callable[[int], Any], tasks: int) -> list[Any]:
    """Return the results of `work(0)`, `work(1)`, ..., with a simultaneous start of the first ones."""
    barrier = Barrier(THREADS)

    def run(task: int) -> Any:
        if task < THREADS:
            barrier.wait(600)
        return work(task)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, range(tasks)))


# Only greedy: sampling threads would draw from torch's one generator in turns.
@pytest.mark.parametrize("scope", ["file", "process"])
def test_threads_may_share_a_memory(model: PreTrainedModel, tmp_path: Path, scope: str) -> None:
    calls = 24
    texts, path = prompts(calls), tmp_path / "memory.npz"
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = [model.generate(text, **options) for text in texts]
    config = LookaheadConfig(memory=path if scope == "file" else "process", step_budget=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a save that failed
        outputs = in_threads(
            lambda task: lookahead.generate(model, texts[task], lookahead_config=config, **options), calls
        )
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    if scope == "file":
        memory = load_memory(path, model_identity(model))
        assert min(memory.statistics()["entries"]) > 0
        # The memory knows every call's prompt; a full set may have evicted one.
        contexts = torch.cat(texts)[:, -memory.orders :].flip(1).numpy()
        is_known, _, _ = lookup(memory, contexts)
        assert (~is_known[:, -1]).sum() <= 2
        assert [file.name for file in tmp_path.iterdir() if file.suffix != ".lock"] == [path.name]


@pytest.mark.parametrize(
    "config",
    quickly([{}, {"preset": "paper"}, {"pack_weights": True}, {"engine": "static"}, {"memory": "process"}], FIRST),
    ids=str,
)
def test_first_calls_at_the_same_time(model: PreTrainedModel, config: dict[str, Any]) -> None:
    texts = prompts(2 * THREADS)
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = [model.generate(text, **options) for text in texts]
    outputs = in_threads(
        lambda task: lookahead.generate(model, texts[task], lookahead_config=LookaheadConfig(**config), **options),
        len(texts),
    )
    assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads switch a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(before / 1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("frequent_switches")
@pytest.mark.parametrize("scope", ["process", "file"])
def test_shared_state_of_a_model_is_created_once(model: PreTrainedModel, tmp_path: Path, scope: str) -> None:
    config = LookaheadConfig(memory=tmp_path / "memory.npz" if scope == "file" else scope)
    Drafting(model, config).save()  # creates the file
    other = copy.deepcopy(model)
    made = in_threads(lambda _: (draft_pace(other, config, 1, 0.0), draft_memory(other, config)[0]), THREADS)
    for kind in zip(*made, strict=True):
        assert len({id(item) for item in kind}) == 1
