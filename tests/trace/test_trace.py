"""Traces: they change no text, agree with the statistics, and name the source of every node."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from lookahead import InvalidArgumentError, LookaheadConfig, Trace
from lookahead.core.statistics import Seconds
from lookahead.core.watching import Origin
from lookahead.drafting import PredictedText
from lookahead.trace import TracedStep, TracedText, make_page, pieces, to_data
from tiny.families import build
from tiny.variant import Variant

pytestmark = pytest.mark.usefixtures("compiled_loops")

METHODS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "auto": ({"step_budget": 24}, {"n-gram memory", "context match"}),
    "auto, as many nodes as pay": ({}, set()),
    "paper": (
        {"window_size": 4, "ngram_size": 3, "guess_set_size": 4, "pool_from_prompt": True},
        {"n-gram pool", "lookahead window"},
    ),
    "jacobi": ({"preset": "jacobi", "block_size": 4}, {"Jacobi block"}),
    "token recycling": ({"preset": "token_recycling", "step_budget": 12}, {"last prediction after the token"}),
    "context matches": ({"preset": "context_matches", "step_budget": 12}, {"context match"}),
    "plain": ({"preset": "autoregressive"}, set()),
}


def run(model: PreTrainedModel, prompt: torch.Tensor, trace: Trace | None, **settings: Any) -> Any:
    options = {"max_new_tokens": 24, "return_dict_in_generate": True}
    options |= {name: settings.pop(name) for name in ("do_sample", "num_return_sequences") if name in settings}
    torch.manual_seed(3)
    config = LookaheadConfig(trace=trace, **settings)
    return lookahead.generate(model, prompt, lookahead_config=config, **options)


GREEDY = [pytest.param(method, False, id=f"{method}, greedy") for method in METHODS]
SAMPLED = [
    pytest.param(method, True, id=f"{method}, sampled", marks=[] if method in ("auto", "paper") else pytest.mark.exact)
    for method in METHODS
]


@pytest.mark.parametrize(("method", "samples"), [*GREEDY, *SAMPLED])
def test_a_trace_changes_nothing_and_agrees_with_the_statistics(
    llama: PreTrainedModel, prompt: torch.Tensor, method: str, samples: bool
) -> None:
    settings, kinds = METHODS[method]
    trace = Trace()
    without = run(llama, prompt, None, do_sample=samples, **settings)
    output = run(llama, prompt, trace, do_sample=samples, **settings)
    assert output.sequences.tolist() == without.sequences.tolist()
    (text,) = trace.texts
    assert text.prompt == prompt[0].tolist()
    assert text.tokens == output.sequences[0, prompt.shape[1] :].tolist()
    statistics = output.statistics
    assert [len(step.added) for step in text.steps] == statistics.accepted_lengths
    assert [len(step.tokens) for step in text.steps] == statistics.nodes_per_step
    assert text.step_compression == statistics.step_compression
    assert [step.finished for step in text.steps] == [False] * (statistics.steps - 1) + [True]
    for part in ("draft", "forward", "verify", "commit"):
        total = sum(getattr(step.seconds, part) for step in text.steps)
        assert total == pytest.approx(getattr(statistics.seconds, part))
    named = {origin.evidence[0].split(", ")[0] for step in text.steps for origin in step.origins}
    assert kinds <= named
    for step in text.steps:
        check(step, method)


def check(step: TracedStep, method: str) -> None:
    """Check a step: the path is connected and holds the added tokens, and probabilities fall along paths."""
    assert len(step.tokens) == len(step.parents) == len(step.origins) + 1 == len(step.predictions)
    assert [step.tokens[node] for node in step.path] == step.added[: len(step.path)]
    assert [step.parents[node] for node in step.path] == [0, *step.path][: len(step.path)]
    assert not {*step.path} & {*step.window}
    if method.startswith(("auto", "token", "context")):
        likely = [1.0, *(origin.probability for origin in step.origins)]
        assert all(0 < share <= likely[parent] for share, parent in zip(likely[1:], step.parents[1:], strict=True))


def test_every_row_of_a_batch_is_a_text(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    trace = Trace()
    output = run(llama, torch.cat([prompt, prompt.flip(1)]), trace, step_budget=8)
    assert [text.tokens for text in trace.texts] == output.sequences[:, prompt.shape[1] :].tolist()


def test_requests_of_an_engine_are_traced(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    trace = Trace()
    with lookahead.Engine(llama, LookaheadConfig(memory="process", trace=trace)) as engine:
        output = engine.submit(prompt[0].tolist(), max_new_tokens=16).result()
    (text,) = trace.texts
    assert text.tokens == output[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    "settings",
    [pytest.param({"step_budget": 8}, marks=pytest.mark.exact), {"preset": "token_recycling", "step_budget": 8}],
    ids=lambda settings: settings.get("preset", "auto"),
)
def test_chains_have_the_origins_of_their_nodes(prompt: torch.Tensor, settings: dict[str, Any]) -> None:
    model, trace = build("mamba2", Variant(), "sdpa"), Trace()
    without = run(model, prompt % 20, None, **settings)
    assert run(model, prompt % 20, trace, **settings).sequences.tolist() == without.sequences.tolist()
    steps = trace.texts[0].steps
    assert max(len(step.origins) for step in steps) > 1
    for step in steps:
        assert step.parents == list(range(-1, len(step.parents) - 1))
        check(step, "auto")


def test_a_source_of_a_users_own_is_named(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    expected = run(llama, prompt, None).sequences[0, prompt.shape[1] :].tolist()
    trace = Trace()
    run(llama, prompt, trace, sources=(lambda: PredictedText(expected),), step_budget=8)
    evidence = {name for step in trace.texts[0].steps for origin in step.origins for name in origin.evidence}
    assert "predicted text" in evidence


def test_a_drafter_without_origins_is_traced(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    class Three:
        top_k = 0

        def start(self, prompt: Any) -> None: ...

        def propose(self, tree: Any) -> None:
            tree.add_candidates([3, 3, 3])

        def observe(self, result: Any) -> None: ...

        def statistics(self) -> dict[str, Any]:
            return {}

    trace = Trace()
    run(llama, prompt, trace, drafter=Three)
    assert trace.texts[0].steps[0].origins == [Origin(("draft",))] * 3


# the page


def data_of(page: str) -> dict[str, Any]:
    """Return the data in a page."""
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return json.loads(data[1])


def test_the_page_shows_the_recorded_steps_and_needs_nothing_else(
    demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    model, tokenizer = demo
    prompt = "def add(a, b): # </script><b>{{data}}"
    inputs = tokenizer(prompt, return_tensors="pt").input_ids
    path = tmp_path / "trace.html"
    with Trace(path, tokenizer, title="<i>Title</i>") as trace:
        run(model, inputs, trace)
    page = path.read_text(encoding="utf-8")
    assert "&lt;i&gt;Title" in page
    assert page.count("</script>") == 2
    assert not re.search(r"""(src|href)=|url\(|@import|https?://(?!www\.w3\.org/2000/svg)""", page)
    assert "default-src 'none'" in page
    data = data_of(page)
    (text,), (drawn,) = trace.texts, data["texts"]
    assert drawn["prompt"] == prompt
    assert "".join(step["x"] for step in drawn["steps"]) == tokenizer.decode(text.tokens)
    assert (drawn["tokens"], drawn["nodes"]) == (len(text.tokens), text.nodes)
    names = [tokenizer.decode([token]) for token in text.tokens]
    assert [data["vocabulary"][token] for step in drawn["steps"] for token in step["k"]] == names
    for step, recorded in zip(drawn["steps"], text.steps, strict=True):
        assert step["a"] == recorded.path
        sources = [data["sources"][data["evidence"][each][0]] for each in step["e"]]
        assert sources == [origin.evidence[0] for origin in recorded.origins]


def test_500_tokens_take_less_than_2_mb_at_worst() -> None:
    """The worst case: 500 full steps of 128 nodes, nothing accepted, tokens of a large vocabulary."""
    random = np.random.default_rng(0)

    def step() -> TracedStep:
        tokens = random.integers(130_000, size=128).tolist()
        parents = [-1, *(random.random(127) * range(1, 128)).astype(int).tolist()]
        origins = [Origin((f"n-gram memory, {node % 4 + 1} tokens",), 0.123) for node in range(127)]
        likeliest = [[(token, 0.2) for token in tokens[:5]]]
        return TracedStep(
            tokens, parents, [], origins, [], tokens[:1], tokens, [0.5] * 128, likeliest, 99999, 128, Seconds(), False
        )

    text = TracedText(list(range(100)), [step() for _ in range(500)])

    class Names:
        def decode(self, tokens: list[int], **options: Any) -> str:
            return "".join(f"w{token % 1000}" for token in tokens)

    assert len(make_page([text], Names(), "", {}).encode()) < 2_000_000


def test_characters_split_between_steps_are_shown_whole(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    _, tokenizer = demo
    text = "x = 'äöü 漢字 🙂' " * 20
    tokens = tokenizer(text).input_ids
    prompt, steps = tokens[:3], [tokens[place : place + 2] for place in range(3, len(tokens), 2)]
    assert tokenizer.decode(prompt) + "".join(pieces(steps, tokenizer, prompt)) == tokenizer.decode(tokens)


def test_token_ids_are_shown_without_a_tokenizer(llama: PreTrainedModel, prompt: torch.Tensor) -> None:
    trace = Trace()
    run(llama, prompt, trace)
    assert to_data(trace.texts, None, {})["vocabulary"][0].startswith("#")
    with pytest.raises(InvalidArgumentError, match=r"write\('trace.html'\)"):
        trace.write()


# errors


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "no folder" / "x.html", tmp_path / "file" / "x.html"):
        with pytest.raises(InvalidArgumentError, match="trace: "):
            Trace(path)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_leaves_the_old_page(
    llama: PreTrainedModel, prompt: torch.Tensor, tmp_path: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    path = tmp_path / "trace.html"
    before = Trace().write(path).read_text()
    trace = Trace(path)
    run(llama, prompt, trace)
    with full_disk(), pytest.raises(InvalidArgumentError, match="File too large"):
        trace.write()
    assert path.read_text() == before
    assert [each.name for each in tmp_path.iterdir()] == ["trace.html"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_is_not_replaced() -> None:
    for write in (lambda: Trace("/dev/full"), lambda: Trace().write("/dev/full")):
        with pytest.raises(InvalidArgumentError, match="is not a file"):
            write()
    assert not Path("/dev/full").is_file()


def test_an_interrupted_call_writes_the_steps_so_far(
    llama: PreTrainedModel, prompt: torch.Tensor, tmp_path: Path
) -> None:
    seen = []

    def stop(record: lookahead.StepRecord) -> None:
        seen.append(record)
        if len(seen) == 3:
            raise KeyboardInterrupt

    def interrupted(path: Path) -> None:
        with Trace(path) as trace:
            config = LookaheadConfig(trace=trace)
            lookahead.generate(llama, prompt, lookahead_config=config, on_step=stop, max_new_tokens=64)

    path = tmp_path / "trace.html"
    with pytest.raises(KeyboardInterrupt):
        interrupted(path)
    (text,) = data_of(path.read_text(encoding="utf-8"))["texts"]
    assert [len(step["k"]) for step in text["steps"]] == [len(record.tokens) for record in seen]


def test_a_configuration_takes_a_recorder_and_copies_share_it() -> None:
    trace = Trace()
    config = LookaheadConfig(trace=trace)
    assert copy.deepcopy(config).trace is trace
    with pytest.raises(InvalidArgumentError, match="records nothing"):
        LookaheadConfig(trace="trace.html")


def test_a_file_that_is_no_trace_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.html"
    path.write_text("mine")
    with pytest.raises(InvalidArgumentError, match="is not a trace page"):
        Trace(path)
    with pytest.raises(InvalidArgumentError, match="is not a trace page"):
        Trace().write(path)
    assert path.read_text() == "mine"
