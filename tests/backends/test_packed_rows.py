"""Packed rows with texts that join and leave, each against `model.generate` for its prompt."""

from dataclasses import dataclass
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from lookahead import LookaheadConfig
from lookahead.backends.transformers.engine_model import packed_runner, rows_runner
from lookahead.backends.transformers.equivalence import equivalence
from lookahead.backends.transformers.noise import SamplingNoise
from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.backends.transformers.tree_cache import Row
from lookahead.core.step import Batch, step
from lookahead.core.token_tree import TokenTree
from lookahead.drafting import build_drafter
from model_zoo import SLIDING_WINDOW, VOCAB_SIZE, build
from quick import quickly

ARCHITECTURES = [
    "llama",
    "mistral_sliding",
    "qwen2_mixed_sliding",
    "gemma3",
    "gemma4",  # layers that share keys and values
    "gpt2",  # learned positions
    "qwen3_moe",
]

UNPACKABLE = {"falcon_new": "sdpa", "gemma2": "eager", "deepseek_v3": "sdpa", "qwen2_mixed_sliding": "eager"}
"""Models without packed rows, and their attention: custom attention, a soft cap without "sdpa", keys outside of the
cache, and an explicit choice."""


@dataclass
class Request:
    """A prompt, its step of joining, and its settings."""

    joins: int
    prompt: list[int]
    new_tokens: int
    sample: bool
    nodes: int
    chunk: int | None


def draw(random: Random, index: int) -> Request:
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 12))] * random.choice([1, 2, 3])
    joins, new_tokens = random.randrange(12), random.randrange(1, 2 * SLIDING_WINDOW)
    chunk = random.choice([None, 1, 3, 5])
    return Request(joins, prompt, new_tokens, random.random() < 0.4, random.choice([1, 8, 16]), chunk)


def generate_alone(model: PreTrainedModel, request: Request, seed: int) -> list[int]:
    torch.manual_seed(seed)  # the same draws as a generator with this seed
    options = {"do_sample": True, "top_k": 0} if request.sample else {"do_sample": False}
    ids = torch.tensor([request.prompt])
    return model.generate(ids, max_new_tokens=request.new_tokens, **options)[0].tolist()


def sequence_of(request: Request, index: int) -> TextSequence:
    noise = SamplingNoise(generator=torch.Generator().manual_seed(index)) if request.sample else None
    sampler = TextSampler(noise=noise)
    end = len(request.prompt) + request.new_tokens
    prompt = torch.tensor([request.prompt])
    drafter = build_drafter(LookaheadConfig(step_budget=request.nodes))
    stop = lambda text: len(text.tokens) >= end  # noqa: E731
    return TextSequence(prompt, request.prompt, drafter, sampler, stop, index=index)


def packed_model(model: PreTrainedModel) -> PreTrainedModel:
    runner = rows_runner(model)
    assert runner.packed
    return runner.model


@pytest.mark.parametrize("name", quickly(ARCHITECTURES, ["mistral_sliding", "gemma4", "gpt2", "qwen3_moe"]))
def test_joining_and_leaving_rows_have_the_texts_of_single_rows(name: str) -> None:
    model = build(name)
    check_rows(model, ModelRunner(packed_model(model)), ARCHITECTURES.index(name))


@pytest.mark.parametrize("name", UNPACKABLE)
def test_padded_rows_have_the_texts_of_single_rows(name: str) -> None:
    model = build(name, attention=UNPACKABLE[name])
    runner = rows_runner(model)
    assert not runner.packed
    check_rows(model, runner, seed=3)


@pytest.mark.parametrize("name", ["llama", "qwen2_mixed_sliding"])
def test_rows_with_separate_passes_have_the_texts_of_single_rows(name: str) -> None:
    model = build(name)
    check_rows(model, ModelRunner(model, together=False), seed=4)


@torch.no_grad()
def check_rows(model: PreTrainedModel, runner: ModelRunner, seed: int) -> None:
    """Run a schedule of requests, and compare each with `model.generate`."""
    random = Random(seed)
    requests = [draw(random, index) for index in range(7)]
    sequences: list[TextSequence] = []
    batch, texts, together, parts = Batch(sequences), {}, 0, 0
    for time in range(300):
        for index, request in enumerate(requests):
            if request.joins == time:
                place = random.randrange(len(sequences) + 1)
                row = Row()
                row.most_pending = request.chunk
                runner.rows.insert(place, row)
                sequences.insert(place, sequence_of(request, index))
        if not sequences:
            continue
        together = max(together, len(sequences))
        before = [len(sequence.tokens) for sequence in sequences]
        step(runner, batch)
        parts += sum(len(sequence.tokens) == length for sequence, length in zip(sequences, before, strict=True))
        if random.random() < 0.1:  # drop keys and values, to be computed again
            runner.rows[0] = Row()
        for place in reversed(range(len(sequences))):
            if sequences[place].finished:
                gone = sequences.pop(place)
                texts[gone.index] = gone.tokens
                del runner.rows[place]
    assert together >= 3
    assert parts > 0
    assert batch.statistics.mean_nodes > 1
    for index, request in enumerate(requests):
        assert texts[index] == generate_alone(model, request, index), (index, request)


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "qwen2_mixed_sliding", "gemma4"])
@torch.no_grad()
def test_plain_steps_of_one_row_past_every_window(name: str) -> None:
    model = build(name)
    request = Request(0, [3, 1, 4, 1, 5], 2 * SLIDING_WINDOW + 5, sample=False, nodes=1, chunk=None)
    runner = ModelRunner(packed_model(model))
    runner.rows = [Row()]
    sequence = sequence_of(request, 0)
    batch = Batch([sequence])
    while not batch.finished:
        step(runner, batch)
    assert sequence.tokens == generate_alone(model, request, 0)
    assert batch.statistics.steps == request.new_tokens


def test_a_step_moves_nothing_of_rows_that_stay() -> None:
    model = build("llama")
    runner = ModelRunner(packed_model(model))
    stays, leaves, joins = Row(block=16), Row(block=16), Row(block=16)
    runner.rows = [leaves, stays]
    runner.forward([TokenTree([5, 9, 3]), TokenTree([7, 8])])
    runner.commit([[0, 1, 2], [0, 1]])
    before = [layer.keys.data_ptr() for layer in stays.cache.layers]
    runner.rows = [stays, joins]
    runner.forward([TokenTree([4]), TokenTree([1, 2, 3])])
    runner.commit([[0], [0, 1, 2]])
    assert [layer.keys.data_ptr() for layer in stays.cache.layers] == before
    assert [row.length for row in (stays, joins, leaves)] == [3, 3, 3]


def test_a_step_sends_no_padding() -> None:
    model = build("llama")
    clone = packed_model(model)
    sent: list[tuple[int, ...]] = []
    hook = clone.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: sent.append(inputs[0].shape))
    runner = ModelRunner(clone)
    runner.rows = [Row(), Row(), Row()]
    runner.forward([TokenTree([5] * length) for length in (1, 9, 3)])
    hook.remove()
    assert [tuple(shape) for shape in sent] == [(1, 13)]


@pytest.mark.parametrize("name", ["falcon_new", "gemma2", "deepseek_v3"])
def test_models_without_packed_rows_are_refused(name: str) -> None:
    # Custom attention, a soft cap without "sdpa", and keys outside of the cache.
    model = build(name, attention="eager" if name == "gemma2" else "sdpa")
    assert isinstance(packed_runner(model), str)


def small_llama(**options: object) -> PreTrainedModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=320, **sizes, **options)).eval()


class Leaky(LlamaForCausalLM):
    """A model that mixes rows: it adds the mean of all tokens of a pass."""

    def forward(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        output = super().forward(*args, **kwargs)
        if kwargs.get("packed_rows") is not None:
            output.logits = output.logits + output.logits.mean(dim=1, keepdim=True)
        return output


def test_a_model_that_mixes_rows_is_refused() -> None:
    model = small_llama()
    assert equivalence(model).holds("packed_rows")
    packed_model(model)
    leaky = Leaky(model.config).eval()
    assert isinstance(packed_runner(leaky), str)


def test_rows_of_a_model_that_counts_places_of_a_pass_are_padded() -> None:
    """Llama 4 scales queries by their index in the pass, which packing changes."""
    assert not rows_runner(build("llama4_chunked")).packed
