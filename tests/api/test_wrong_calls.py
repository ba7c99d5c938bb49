"""Arguments of wrong types and values: refused at once with one line that names them, without side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BatchEncoding, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import lookahead
from lookahead import Engine, InvalidArgumentError, LookaheadConfig, NGramPool, Trace
from lookahead.core.protocols import FixedBudget
from lookahead.drafting import AutoDrafter, DraftMemory
from lookahead.parallel import join, scale_config
from preloaded import run_program

pytestmark = pytest.mark.usefixtures("compiled_loops")

IDS = torch.tensor([[5, 6, 7, 5, 6]])


class Speechless:
    """An object without a representation."""

    def __repr__(self) -> str:
        raise ValueError("nothing to show")


def nothing() -> None:
    """A function without arguments."""


OTHERS: list[Any] = ["x", [], [1], {"a": 1}, b"x", object(), Speechless(), int, np.ones(3), torch.tensor([1, 2])]
NO_WHOLE_NUMBERS = [*OTHERS, nan, inf, -inf, True, 1.5, np.float32(2), np.True_, torch.tensor(True), torch.tensor(2.5)]
NO_SIZES = [*NO_WHOLE_NUMBERS, 0, -1]
NO_SWITCHES = [None, "x", 1, 0, nan, [], np.int64(1), object()]
NO_FUNCTIONS = [3, "x", nan, True, [], object(), nothing]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=120, eos_token_id=None, **sizes)).eval()


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[Engine]:
    with Engine(model, max_rows=2) as engine:
        yield engine


def refused(name: str, call: Callable[[Any], Any], wrong: list[Any]) -> None:
    for value in wrong:
        with pytest.raises(InvalidArgumentError) as error:
            call(value)
        message = str(error.value)
        assert message.startswith(name), message
        assert "\n" not in message
        assert len(message) < 300, message


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_generate(model: PreTrainedModel) -> None:
    def call(name: str) -> Callable[[Any], Any]:
        return lambda value: lookahead.generate(model, IDS, **({"max_new_tokens": 3} | {name: value}))

    refused("on_step", call("on_step"), NO_FUNCTIONS)
    refused("parallel", call("parallel"), [3, "x", True, [], object()])
    refused("prediction", call("prediction"), [3, "x", b"x", nan, True, object(), {"a": 1}, [1.5], [True], [10**30]])
    refused("prediction", call("prediction"), [IDS.bool(), IDS.float(), IDS.to_sparse(), torch.tensor(3)])
    refused("prediction", call("prediction"), [torch.nested.nested_tensor([IDS[0]])])
    refused("ngram_pool", call("ngram_pool"), [3, "x", object()])
    refused("lookahead_config", call("lookahead_config"), [3, "paper", {"preset": "paper"}, object()])
    refused("streamer", call("streamer"), [3, "x", object(), torch.tensor(3)])
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length"):
        refused(name, call(name), NO_WHOLE_NUMBERS)
    refused("prefill_chunk_size", call("prefill_chunk_size"), NO_SIZES)
    for length in (nan, inf, 1.5, True):  # transformers never ends with nan
        config = GenerationConfig(max_new_tokens=length)
        refused("max_new_tokens", lambda options: lookahead.generate(model, IDS, generation_config=options), [config])
        own = {"max_new_tokens": length, "custom_generate": lookahead.generate}
        refused("max_new_tokens", lambda options: model.generate(IDS, **options), [own])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_prompts(model: PreTrainedModel, engine: Engine) -> None:
    wrong = [IDS.bool(), IDS.to(torch.complex64), IDS.to_sparse(), IDS.float(), IDS[None], "x", object(), Speechless()]
    wrong += [{"input_ids": IDS}, BatchEncoding({"input_ids": IDS}), torch.nested.nested_tensor([IDS[0]])]
    refused("input_ids", lambda value: lookahead.generate(model, value, max_new_tokens=2), [*wrong, [1]])
    more = [None, 3, [], [[1], [1, 2]], [1.5], [True], [10**30], [IDS, IDS], np.array(["x"])]
    refused("input_ids", lambda value: engine.submit(value, max_new_tokens=2), [*wrong, *more])


def test_fields_of_the_configuration_are_pointed_to_it(model: PreTrainedModel, engine: Engine) -> None:
    for name in LookaheadConfig.__dataclass_fields__:
        for call in (lookahead.generate, Engine.submit):
            if call is Engine.submit and name == "seed":
                continue
            first = model if call is lookahead.generate else engine
            with pytest.raises(
                InvalidArgumentError, match=rf"^{name}=1 .*lookahead_config=.*LookaheadConfig\({name}=1"
            ):
                call(first, IDS, max_new_tokens=2, **{name: 1})


def test_an_engine(model: PreTrainedModel) -> None:
    for name in ("max_rows", "kv_bytes", "prompt_tokens", "prefix_bytes"):
        refused(name, lambda value, name=name: Engine(model, **{name: value}), [*NO_SIZES, 10**30])
    refused("prefix_cache", lambda value: Engine(model, prefix_cache=value), NO_SWITCHES)
    refused("lookahead_config", lambda value: Engine(model, value), [3, "paper", object()])
    refused("model", Engine, [None, 3, "x", model.model, LlamaForCausalLM])


def test_requests_beside_refused_ones_get_their_texts(model: PreTrainedModel, engine: Engine) -> None:
    def call(name: str) -> Callable[[Any], Any]:
        return lambda value: engine.submit(IDS, **({"max_new_tokens": 3} | {name: value}))

    before = engine.submit(IDS, max_new_tokens=8)
    refused("seed", call("seed"), [*NO_WHOLE_NUMBERS, 10**30, -(2**63) - 1])
    refused("priority", call("priority"), [None, *NO_WHOLE_NUMBERS])
    refused("logprobs", call("logprobs"), [*NO_WHOLE_NUMBERS, -1])
    refused("prediction", call("prediction"), [3, "x", nan, object(), [1.5]])
    refused("on_step", call("on_step"), NO_FUNCTIONS)
    refused("streamer", call("streamer"), [3, "x", object()])
    refused("max_new_tokens", call("max_new_tokens"), NO_WHOLE_NUMBERS)
    refused("callback", before.add_done_callback, [None, 3, "x", lambda one: one])
    refused("seen", before.events_since, [None, *NO_WHOLE_NUMBERS, -1])
    refused("cancel", engine.close, NO_SWITCHES)
    after = engine.submit(IDS, max_new_tokens=8, seed=np.int64(3), priority=np.int8(1), logprobs=torch.tensor(2))
    expected = model.generate(IDS, max_new_tokens=8, do_sample=False)
    assert torch.equal(before.result(), expected)
    assert torch.equal(after.result(), expected)


def test_an_engine_that_was_closed_says_so(model: PreTrainedModel) -> None:
    engine = Engine(model)
    engine.close()
    with pytest.raises(InvalidArgumentError, match="this Engine is closed; make another one"):
        engine.start()


def test_numbers_of_other_libraries_are_numbers(model: PreTrainedModel) -> None:
    expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
    for three in (np.int64(3), np.uint8(3), torch.tensor(3)):
        assert torch.equal(lookahead.generate(model, IDS, max_new_tokens=three), expected)
        assert LookaheadConfig(window_size=three) == LookaheadConfig(window_size=3)
    for kind in (torch.int32, torch.int8, torch.uint8, torch.uint16):
        assert torch.equal(lookahead.generate(model, IDS.to(kind), max_new_tokens=3), expected)
        ours = Engine(model).submit(IDS.to(kind), max_new_tokens=3, prediction=IDS[0].to(kind))
        assert torch.equal(ours.result(), expected)
    predicted = np.array([[9, 8], [8, 9]])
    both = lookahead.generate(model, IDS.repeat(2, 1), max_new_tokens=3, prediction=predicted)
    assert torch.equal(both, expected.repeat(2, 1))


def test_drafters_and_their_parts() -> None:
    for name in ("orders", "capacity", "top_k"):
        refused(name, lambda value, name=name: DraftMemory(**({"capacity": 64} | {name: value})), [None, *NO_SIZES])
    refused("old_share", lambda value: DraftMemory(old_share=value), [None, "x", nan, inf, True, -1, 1, [], object()])
    refused("observed", lambda value: DraftMemory(observed=value), NO_SWITCHES)
    refused("ngram_size", lambda value: NGramPool(value, 3), [None, *NO_SIZES, 1])
    refused("guess_set_size", lambda value: NGramPool(3, value), [None, *NO_SIZES])
    refused("memory", lambda value: AutoDrafter(value, 8), [3, "x", object()])
    refused("budget", lambda value: AutoDrafter(None, value), [None, *NO_SIZES, 10**30])
    refused("nodes", FixedBudget, [None, *NO_SIZES])
    refused("min_probability", lambda value: FixedBudget(3, value), [None, "x", nan, inf, True, np.True_, []])


def test_configurations() -> None:
    for name, spec in LookaheadConfig.__dataclass_fields__.items():
        wrong = [Speechless(), object(), nan, inf, -1, [1], b"x", 10**30]
        if spec.type != "float":
            wrong.append(np.float32(2))
        if name == "max_iterations":
            wrong.remove(10**30)
        assert spec.metadata["check"]
        refused(name, lambda value, name=name: LookaheadConfig(**{name: value}), wrong)
    refused("memory", lambda value: LookaheadConfig(memory=value), [None, "", True])
    refused("values", LookaheadConfig.from_dict, [None, 3, "x", [1]])


def test_traces_and_ranks() -> None:
    refused("path", Trace, [3, b"a", "", [], True, object()])
    refused("path", Trace().write, [3, b"a", "", []])
    refused("tokenizer", lambda value: Trace(tokenizer=value), [3, [], object()])
    refused("title", lambda value: Trace(title=value), [None, 3, b"x"])
    refused("facts", lambda value: Trace(facts=value), [3, "x", [1]])
    refused("lookahead_config", lambda value: scale_config(value, 2), [3, "paper"])
    refused("ranks", lambda value: scale_config(LookaheadConfig(), value), [None, *NO_SIZES])
    refused("timeout", lambda value: join(timeout=value), [None, "x", nan, inf, True, 0, -1, [], 10**30])
    refused("tensor_parallel", lambda value: join(tensor_parallel=value), [None, *NO_SIZES])
    refused("device_type", lambda value: join(device_type=value), [3, "x", True, []])


@pytest.mark.parametrize(
    ("name", "value"), [("RANK", "x"), ("RANK", "-1"), ("RANK", "2"), ("WORLD_SIZE", "0"), ("MASTER_PORT", "99999")]
)
def test_an_environment_that_cannot_work(tmp_path: Path, name: str, value: str) -> None:
    program = tmp_path / "joins.py"
    program.write_text(
        "from lookahead import InvalidArgumentError\nfrom lookahead.parallel import join\n"
        "try:\n    join(timeout=3.0)\nexcept InvalidArgumentError as error:\n    print(error)\n"
    )
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", name: value}
    ran = run_program(str(program), **variables)
    assert (ran.returncode, ran.stderr, ran.stdout.count("\n")) == (0, "", 1)
    assert ran.stdout.startswith(f"environment variable {name}=")
    assert len(ran.stdout) <= 300
