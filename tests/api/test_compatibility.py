"""`docs/compatibility.md` covers every argument of `generate`, and its statements hold."""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StopStringCriteria,
)
from transformers.utils.generic import TransformersKwargs

import lookahead
from compared.settings import Recorder
from lookahead import InvalidArgumentError, LookaheadConfig, LookaheadError, UnsupportedArgumentError
from model_zoo import ARCHITECTURES, build

Generate = Callable[..., Any]

EXACT, DIFFERENCE, REFUSED, NO_EFFECT = "exact", "exact, with a difference", "refused", "no effect"
SMALL = LookaheadConfig(window_size=4, ngram_size=3, guess_set_size=4, pool_from_prompt=True)
PROMPT = torch.tensor([[3, 14, 15, 9, 2, 6, 3, 14, 15, 9, 2, 6]])
# The zoo's Llama continues PROMPT with 24 66 32 36 19 24 26 14 69 32 36 19.
FIRST, THIRD, FOURTH, UNSAID = 24, 32, 36, 50
"""Tokens of that text, and one token outside of it."""
NEW = {"max_new_tokens": 12}
GREEDY = {**NEW, "do_sample": False}
SAMPLED = {**NEW, "do_sample": True}
STOPPED = {**GREEDY, "eos_token_id": THIRD, "pad_token_id": 0}
SCORED = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}


# --- the table ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One argument in the tables of `docs/compatibility.md`."""

    name: str
    verdict: str
    in_every_version: bool


def read_rows() -> Iterator[Row]:
    """Yield the rows of all tables with verdicts."""
    page = (Path(__file__).parents[2] / "docs" / "compatibility.md").read_text(encoding="utf-8")
    within = False
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            within = False
        elif cells[1:] == ["verdict", "what happens"]:
            within = True
        elif within and not set(cells[0]) <= {"-"}:
            for cell in cells[0].split(", "):
                name = re.fullmatch(r"`(\w+)`( \(not in every version\))?", cell)
                assert name is not None, f"the first cell must have names alone: {line}"
                yield Row(name[1], cells[1], name[2] is None)


ROWS = list(read_rows())


def configuration_fields() -> set[str]:
    """Return the fields of `GenerationConfig` in the installed transformers."""
    config = GenerationConfig()
    return {*config.to_dict(), *vars(config), *GenerationConfig.__annotations__}


def generate_arguments() -> set[str]:
    """Return the arguments of `generate` in the installed transformers, named ones and those read from `kwargs`."""
    code = "".join(
        inspect.getsource(function)
        for function in (GenerationMixin.generate, GenerationMixin._extract_generation_mode_kwargs)
    )
    looked_for = re.findall(r"kwargs\.(?:pop|get)\(\"(\w+)\"", code)
    return {*inspect.signature(GenerationMixin.generate).parameters, *looked_for} - {"self", "kwargs"}


def model_inputs() -> set[str]:
    """Return the arguments of the forward passes of all architectures in the zoo."""
    names = set(TransformersKwargs.__optional_keys__)
    for architecture in ARCHITECTURES.values():
        config = type(AutoConfig.for_model(architecture.model_type))
        names.update(inspect.signature(AutoModelForCausalLM._model_mapping[config].forward).parameters)
    return names - {"self", "kwargs"}


INSTALLED = configuration_fields() | generate_arguments() | model_inputs()


def test_the_page_names_every_argument_once() -> None:
    counts = Counter(row.name for row in ROWS)
    assert sorted(INSTALLED - set(counts)) == [], "docs/compatibility.md says nothing of these"
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_verdict_is_one_of_four() -> None:
    assert {row.verdict for row in ROWS} <= {EXACT, DIFFERENCE, REFUSED, NO_EFFECT}


def test_arguments_missing_in_this_transformers_are_marked() -> None:
    beyond_the_zoo = {"pixel_values"}
    gone = {row.name for row in ROWS if row.in_every_version} - INSTALLED - beyond_the_zoo
    assert gone == set(), "this transformers does not have these: say '(not in every version)', or take the rows out"


# --- cases --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A value for an argument, and the call around it.

    Attributes:
        value: Value of the argument.
        beside: Other arguments of the call.
        model: Name in the zoo.
        prompt: The prompt, or none.
        in_config: Set the value in a `GenerationConfig`, for fields that are no arguments of `generate`.
    """

    value: Any
    beside: dict[str, Any] = field(default_factory=lambda: GREEDY)
    model: str = "llama"
    prompt: torch.Tensor | None = field(default_factory=lambda: PROMPT)
    in_config: bool = False


@dataclass(frozen=True)
class Exact(Case):
    """The output equals plain decoding. `shows`: whether the value changes it, as it should wherever it can."""

    shows: bool = True


@dataclass(frozen=True)
class NoEffect(Case):
    """Plain decoding gives the same output with and without the argument."""


@dataclass(frozen=True)
class Refused(Case):
    """`by_transformers`: the error is transformers' own. `named`: the argument's name in the message."""

    by_transformers: bool = False
    named: str | None = None


@dataclass(frozen=True)
class Fresh:
    """A value that is created for each call."""

    make: Callable[[], Any]


def call(generate: Generate, name: str | None, case: Case) -> Any:
    """Run one side of a case with a fixed seed, with the argument `name`, or without it if `name` is None."""
    options = {"generation_config": GenerationConfig(**case.beside)} if case.in_config else dict(case.beside)
    if name is not None:
        value = case.value.make() if isinstance(case.value, Fresh) else case.value
        if case.in_config:
            setattr(options["generation_config"], name, value)
        else:
            options[name] = value
    if case.prompt is not None and not {"inputs", "input_ids"} & set(options):
        options["inputs" if generate.__name__ == "generate" else "input_ids"] = case.prompt
    torch.manual_seed(3)
    output = generate(**options)
    return SimpleNamespace(sequences=output, scores=None, logits=None) if isinstance(output, torch.Tensor) else output


def ours(model: PreTrainedModel) -> Generate:
    def lookahead_generate(**options: Any) -> Any:
        return lookahead.generate(model, lookahead_config=SMALL, **options)

    return lookahead_generate


def agree(one: Any, other: Any) -> bool:
    """Return whether two outputs have equal texts, and scores and logits that differ by rounding only."""
    if one.sequences.dtype != other.sequences.dtype or not torch.equal(one.sequences, other.sequences):
        return False
    return all(_close(getattr(one, name), getattr(other, name)) for name in ("scores", "logits"))


def _close(one: tuple[torch.Tensor, ...] | None, other: tuple[torch.Tensor, ...] | None) -> bool:
    if one is None or other is None:
        return one is other
    return len(one) == len(other) and all(
        torch.allclose(left, right, atol=2e-4, rtol=1e-4) for left, right in zip(one, other, strict=True)
    )


def ban_first(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A user's logits processor."""
    return scores.index_fill(1, torch.tensor([FIRST]), -torch.inf)


def stop_at_17(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
    """A user's stopping criterion."""
    return torch.tensor([ids.shape[1] >= 17])


NEGATIVE = torch.tensor([[5, 8, 13, 21]])
GUIDED = {**GREEDY, "guidance_scale": 2.0}
AS_ASSISTANT = {**SCORED, "is_assistant": True}

CASES: dict[str, Case] = {
    "max_length": Exact(20, {"do_sample": False}),
    "max_new_tokens": Exact(5, {"do_sample": False}),
    "min_length": Exact(20, STOPPED),
    "min_new_tokens": Exact(8, STOPPED),
    "eos_token_id": Exact([THIRD, FOURTH], {**GREEDY, "pad_token_id": 0}),
    "forced_eos_token_id": Exact(UNSAID),
    "exponential_decay_length_penalty": Exact((2, 1.5), {**GREEDY, "eos_token_id": UNSAID, "pad_token_id": 0}),
    "early_stopping": NoEffect(True),
    "do_sample": Exact(True),
    "temperature": Exact(1.7, SAMPLED),
    "top_k": Exact(2, SAMPLED),
    "top_p": Exact(0.3, SAMPLED),
    "min_p": Exact(0.4, SAMPLED),
    "top_h": Exact(0.2, SAMPLED),
    "typical_p": Exact(0.2, SAMPLED),
    "epsilon_cutoff": Exact(0.2, SAMPLED),
    "eta_cutoff": Exact(0.5, SAMPLED),
    "repetition_penalty": Exact(1.8),
    "encoder_repetition_penalty": Exact(2.5),
    "no_repeat_ngram_size": Exact(2),
    "encoder_no_repeat_ngram_size": Exact(1, {**GREEDY, "max_new_tokens": 24}),
    "bad_words_ids": Exact([[66], [FIRST, 26]]),
    "forced_bos_token_id": Exact(UNSAID, prompt=PROMPT[:, :1]),
    "suppress_tokens": Exact([66]),
    "begin_suppress_tokens": Exact([FIRST]),
    "sequence_bias": Exact({(FIRST, 66): -20.0}),
    "renormalize_logits": Exact(True, SCORED),
    "remove_invalid_values": Exact(True, {**SCORED, "bad_words_ids": [[66]]}),
    "guidance_scale": Exact(2.0),
    "watermarking_config": Exact({"bias": 4.0, "seeding_scheme": "selfhash"}),
    "token_healing": Refused(True),
    "length_penalty": NoEffect(3.0),
    "num_beams": Refused(2),
    "num_beam_groups": NoEffect(2),
    "diversity_penalty": NoEffect(0.5),
    "constraints": Refused([object()]),
    "force_words_ids": Refused([[5]]),
    "penalty_alpha": Refused(0.6, {**GREEDY, "top_k": 4}),
    "low_memory": NoEffect(True),
    "dola_layers": Refused("low"),
    "use_mtp": Refused(True),
    "prompt_lookup_num_tokens": Refused(3),
    "max_matching_ngram_size": NoEffect(1),
    "assistant_early_exit": Refused(1),
    "num_assistant_tokens": NoEffect(3),
    "num_assistant_tokens_schedule": NoEffect("heuristic"),
    "assistant_lookbehind": NoEffect(2),
    "target_lookbehind": NoEffect(2),
    "assistant_ensemble_weight": NoEffect(0.5),
    "speculation_type": NoEffect("dflash"),
    "is_assistant": Exact(True, {**SCORED, "assistant_confidence_threshold": 0.6}),
    "assistant_confidence_threshold": Exact(0.8, AS_ASSISTANT),
    "cache_implementation": Refused("static"),
    "cache_config": NoEffect({"nbits": 4}),
    "max_cache_len": NoEffect(99),
    "prefill_chunk_size": Exact(5, shows=False),
    "compile_config": NoEffect(CompileConfig()),
    "disable_compile": NoEffect(True),
    "continuous_batching_config": NoEffect({}),
    "output_attentions": Refused(True, {**GREEDY, "return_dict_in_generate": True}),
    "output_hidden_states": Refused(True, {**GREEDY, "return_dict_in_generate": True}),
    "pad_token_id": Exact(9, prompt=torch.cat([torch.full((1, 3), 9), torch.tensor([[3, 14, 15, 2, 6, 3]])], dim=1)),
    "bos_token_id": Exact(14, prompt=None, shows=False),  # without it there is no prompt at all
    "decoder_start_token_id": NoEffect(5),
    "transformers_version": NoEffect("4.0.0"),
    "_from_model_config": NoEffect(True, in_config=True),
    "_original_object_hash": NoEffect(1, in_config=True),
    "_mask_length": NoEffect(3, in_config=True),
    "_bos_token_tensor": NoEffect(torch.tensor(5), in_config=True),
    "_eos_token_tensor": NoEffect(torch.tensor([FIRST]), in_config=True),
    "_pad_token_tensor": NoEffect(torch.tensor(3), in_config=True),
    "_decoder_start_token_tensor": NoEffect(torch.tensor(5), in_config=True),
    "inputs": Exact(PROMPT[:, 4:]),
    "input_ids": Exact(PROMPT[:, 4:]),
    "generation_config": Exact(GenerationConfig(max_new_tokens=5, no_repeat_ngram_size=2), {}),
    "logits_processor": Exact([ban_first]),
    "stopping_criteria": Exact([stop_at_17]),
    "prefix_allowed_tokens_fn": Exact(lambda row, text: [(int(text[-1]) * 7 + shift) % 72 for shift in range(9)]),
    "negative_prompt_ids": Exact(NEGATIVE, GUIDED),
    "negative_prompt_attention_mask": Exact(torch.tensor([[0, 0, 1, 1]]), {**GUIDED, "negative_prompt_ids": NEGATIVE}),
    "synced_gpus": Refused(True),
    "assistant_model": Refused("another model"),
    "assistant_tokenizer": NoEffect("another tokenizer"),
    "custom_generate": Refused(lookahead.generate),
    "trust_remote_code": NoEffect(True),
    "use_model_defaults": Refused(True, by_transformers=True),
    "position_ids": Refused(torch.arange(5, 17)[None], model="gpt2"),
    "inputs_embeds": Refused(torch.zeros(1, 3, 48), prompt=None),
    "token_type_ids": Refused(torch.zeros_like(PROMPT), model="gpt2"),
    "labels": Refused(PROMPT),
    "logits_to_keep": NoEffect(3),
    "output_router_logits": Refused(True, model="mixtral"),
    "return_dict": Refused(True, model="falcon_new"),
    "is_causal": Refused(False),
    "num_items_in_batch": Refused(torch.tensor(1)),
    "cu_seq_lens_q": Refused(torch.tensor([0, 12])),
    "cu_seq_lens_k": Refused(torch.tensor([0, 12])),
    "max_length_q": Refused(12),
    "max_length_k": Refused(12),
    "seq_idx": Refused(torch.zeros_like(PROMPT)),
    "per_layer_inputs": Refused(torch.zeros(1, 12, 4, 8), by_transformers=True),
    "encoder_hidden_states": Refused(torch.zeros(1, 3, 48), model="gpt2"),
    "encoder_attention_mask": Refused(torch.ones(1, 3), model="gpt2"),
    "encoder_outputs": Refused(("states",), by_transformers=True),
    "mm_encoder_outputs": Refused({"image": torch.zeros(1, 2)}),
    "pixel_values": Refused(torch.zeros(1, 3, 4, 4), by_transformers=True),
    "cache_position": Refused(torch.arange(12), by_transformers=True),
}
"""Effects of values, by argument. Cases that need more than a comparison are functions, in `FUNCTIONS`."""


def cases_of(kind: type[Case]) -> list[Any]:
    """Return the cases of one kind, for fields of the installed transformers."""
    versions = {row.name: row.in_every_version for row in ROWS}
    return [
        pytest.param(name, case, id=name)
        for name, case in CASES.items()
        if isinstance(case, kind) and (versions.get(name, True) or name in INSTALLED or isinstance(case, Refused))
    ]


@pytest.mark.parametrize(("name", "case"), cases_of(Exact))
def test_an_exact_argument_has_the_effect_of_generate(name: str, case: Exact) -> None:
    model = build(case.model, attention=ARCHITECTURES[case.model].attention[0])
    plain = call(model.generate, name, case)
    assert agree(call(ours(model), name, case), plain)
    if case.shows:
        assert not agree(plain, call(model.generate, None, case)), "a value that does nothing tests nothing"


@pytest.mark.parametrize(("name", "case"), cases_of(NoEffect))
def test_an_argument_without_effect_has_none(name: str, case: NoEffect) -> None:
    model = build(case.model)
    without = call(model.generate, None, case)
    assert agree(call(model.generate, name, case), without), "transformers does something with it"
    assert agree(call(ours(model), name, case), without)


@pytest.mark.parametrize(("name", "case"), cases_of(Refused))
def test_a_refused_argument_is_named(name: str, case: Refused) -> None:
    model = build(case.model, attention=ARCHITECTURES[case.model].attention[0])
    error = (ValueError, TypeError) if case.by_transformers else LookaheadError
    with pytest.raises(error, match=case.named or name):
        call(ours(model), name, case)
    if case.by_transformers:
        with pytest.raises(error, match=case.named or name):
            call(model.generate, name, case)


# --- cases that take more than a comparison -----------------------------------------------------------------------

Demo = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def ours_with(model: PreTrainedModel, **options: Any) -> Any:
    return lookahead.generate(model, lookahead_config=SMALL, **options)


def test_stop_strings_end_the_text_where_generate_ends_it(demo: Demo) -> None:
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids  # range(len(
    options = {"stop_strings": ["(le"], "tokenizer": tokenizer, **GREEDY}
    expected = model.generate(ids, **options)
    assert expected.shape[1] < model.generate(ids, **GREEDY).shape[1]
    assert torch.equal(ours_with(model, input_ids=ids, **options), expected)


def test_a_tokenizer_is_only_needed_for_stop_strings(demo: Demo) -> None:
    """The tokenizer is ignored without stop strings, and required with them."""
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids
    expected = model.generate(ids, tokenizer=tokenizer, **GREEDY)
    assert torch.equal(ours_with(model, input_ids=ids, tokenizer=tokenizer, **GREEDY), expected)
    for generate in (model.generate, ours(model)):
        with pytest.raises(ValueError, match="tokenizer"):
            generate(input_ids=ids, stop_strings=["(le"], **GREEDY)


def test_a_streamer_gets_the_calls_of_generate(llama: PreTrainedModel) -> None:
    plain, streamed = Recorder(), Recorder()
    llama.generate(PROMPT, streamer=plain, **GREEDY)
    ours_with(llama, input_ids=PROMPT, streamer=streamed, **GREEDY)
    assert streamed.values == plain.values
    assert streamed.values.count("end") == 1


def test_time_that_is_up_ends_the_text_with_its_first_token(llama: PreTrainedModel) -> None:
    """A limit of zero ends the text after its first token; a distant limit changes nothing."""
    for seconds, length in ((1e-9, 13), (600.0, 24)):
        expected = llama.generate(PROMPT, max_time=seconds, **GREEDY)
        assert expected.shape[1] == length
        assert torch.equal(ours_with(llama, input_ids=PROMPT, max_time=seconds, **GREEDY), expected)


def test_without_use_cache_no_cache_is_returned(llama: PreTrainedModel) -> None:
    options = {**SCORED, "use_cache": False}
    plain, output = llama.generate(PROMPT, **options), ours_with(llama, input_ids=PROMPT, **options)
    assert agree(output, plain)
    assert output.past_key_values is plain.past_key_values is None


@pytest.mark.parametrize("options", [{"prefill_chunk_size": 4}, {"past_key_values": DynamicCache()}])
def test_contradicting_use_cache_is_refused(options: dict[str, Any], llama: PreTrainedModel) -> None:
    with pytest.raises(LookaheadError, match="use_cache"):
        ours_with(llama, input_ids=PROMPT, use_cache=False, **options, **GREEDY)


def test_return_dict_in_generate(llama: PreTrainedModel) -> None:
    plain, output = llama.generate(PROMPT, **SCORED), ours_with(llama, input_ids=PROMPT, **SCORED)
    assert isinstance(output, type(plain))
    assert set(output) - set(plain) == {"statistics"}
    assert set(plain) <= set(output)
    assert output.attentions is output.hidden_states is None
    assert output.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()


def test_num_return_sequences(llama: PreTrainedModel) -> None:
    """With only one possible token at each position, all draws are equal."""
    options = {**SAMPLED, "num_return_sequences": 3}
    sure = llama.generate(PROMPT, top_k=1, **options)
    assert torch.equal(ours_with(llama, input_ids=PROMPT, top_k=1, **options), sure)
    torch.manual_seed(0)
    texts = [ours_with(llama, input_ids=PROMPT, **options)]
    torch.manual_seed(0)
    texts.append(ours_with(llama, input_ids=PROMPT, **options))
    assert torch.equal(*texts), "the same seed, the same texts"
    assert texts[0].shape == (3, 24)
    assert len({tuple(text.tolist()) for text in texts[0]}) == 3


@pytest.mark.parametrize("name", ["output_scores", "output_logits"])
def test_collected_scores_and_logits_equal_generate(name: str, llama: PreTrainedModel) -> None:
    case = Case(True, {**GREEDY, "return_dict_in_generate": True, "repetition_penalty": 1.3})
    plain, output = call(llama.generate, name, case), call(ours(llama), name, case)
    assert agree(output, plain)
    collected = name.removeprefix("output_")
    for got, expected in zip(getattr(output, collected), getattr(plain, collected), strict=True):
        assert got.dtype == expected.dtype
        assert got.shape == expected.shape


def padded(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prompts of different lengths, padded on the left, and their mask."""
    rows = [torch.cat([torch.zeros(12 - length, dtype=torch.long), PROMPT[0, :length]]) for length in lengths]
    mask = torch.stack([(torch.arange(12) >= 12 - length).long() for length in lengths])
    return torch.stack(rows), mask


def test_padding_and_holes_are_hidden_as_in_generate(llama: PreTrainedModel) -> None:
    holes = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1]])
    for mask in (padded(8)[1], holes):
        expected = llama.generate(PROMPT, attention_mask=mask, **GREEDY)
        assert not torch.equal(expected, llama.generate(PROMPT, **GREEDY))
        for attention_mask in (mask, mask.bool(), mask.float()):
            assert torch.equal(ours_with(llama, input_ids=PROMPT, attention_mask=attention_mask, **GREEDY), expected)


def test_attention_mask_that_hides_the_last_token(llama: PreTrainedModel) -> None:
    mask = torch.tensor([[1] * 10 + [0] * 2])
    with pytest.raises(InvalidArgumentError, match=r"attention_mask.*left"):
        ours_with(llama, input_ids=PROMPT, attention_mask=mask, **GREEDY)


@pytest.mark.parametrize("length", [5, 15])
def test_attention_mask_of_another_length(length: int) -> None:
    with pytest.raises(InvalidArgumentError, match="attention_mask"):
        ours_with(build("gpt2"), input_ids=PROMPT, attention_mask=torch.ones(1, length), **GREEDY)


def test_attention_mask_of_another_length_with_padding(llama: PreTrainedModel) -> None:
    with pytest.raises(InvalidArgumentError, match="attention_mask"):
        ours_with(llama, input_ids=PROMPT, attention_mask=torch.tensor([[0, 1, 1]]), **GREEDY)


def test_past_key_values(llama: PreTrainedModel) -> None:
    """Accepted kinds of caches; `test_conformance.py` tests their use."""
    cache, theirs = DynamicCache(), DynamicCache()
    expected = llama.generate(PROMPT, past_key_values=theirs, **GREEDY)
    assert torch.equal(ours_with(llama, input_ids=PROMPT, past_key_values=cache, **GREEDY), expected)
    assert cache.get_seq_length() == 23
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in theirs.layers]
    quantized = DynamicCache(offloading=True)
    with pytest.raises(LookaheadError, match="cache|past_key_values"):
        ours_with(llama, input_ids=PROMPT, past_key_values=quantized, **GREEDY)


FUNCTIONS: dict[str, list[Callable[..., None]]] = {
    "stop_strings": [test_stop_strings_end_the_text_where_generate_ends_it],
    "tokenizer": [test_a_tokenizer_is_only_needed_for_stop_strings],
    "streamer": [test_a_streamer_gets_the_calls_of_generate],
    "max_time": [test_time_that_is_up_ends_the_text_with_its_first_token],
    "use_cache": [test_without_use_cache_no_cache_is_returned, test_contradicting_use_cache_is_refused],
    "return_dict_in_generate": [test_return_dict_in_generate],
    "num_return_sequences": [test_num_return_sequences],
    "output_scores": [test_collected_scores_and_logits_equal_generate],
    "output_logits": [test_collected_scores_and_logits_equal_generate],
    "attention_mask": [test_padding_and_holes_are_hidden_as_in_generate, test_attention_mask_that_hides_the_last_token],
    "cache": [test_past_key_values],
    "past_key_values": [test_past_key_values],
}
"""Tests of the rows without an entry in `CASES`: documented differences, and cases that need a tokenizer."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_has_a_case(row: Row) -> None:
    kinds = {EXACT: Exact, REFUSED: Refused, NO_EFFECT: NoEffect}
    case = CASES.get(row.name)
    if case is None:
        assert row.name in FUNCTIONS, "no case shows that this row is true"
        assert row.verdict in (EXACT, DIFFERENCE)
    else:
        assert row.name not in FUNCTIONS
        assert isinstance(case, kinds.get(row.verdict, ())), f"the case is no case of {row.verdict!r}"


def test_every_case_has_a_row() -> None:
    assert {*CASES, *FUNCTIONS} <= {row.name for row in ROWS}


# --- how arguments come, and arguments that meet -------------------------------------------------------------------


@pytest.fixture
def attached(llama: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The zoo's Llama with lookahead decoding attached."""
    lookahead.attach(llama, SMALL)
    yield llama
    lookahead.detach(llama)


def test_arguments_by_position_on_an_attached_model(attached: PreTrainedModel) -> None:
    config = GenerationConfig(return_dict_in_generate=True, **GREEDY)
    output = attached.generate(PROMPT, config, [ban_first])
    expected = type(attached).generate(attached, PROMPT, config, [ban_first])
    assert torch.equal(output.sequences, expected.sequences)
    assert output.statistics.steps > 0


def test_two_prompts_on_an_attached_model(attached: PreTrainedModel) -> None:
    for generate in (type(attached).generate.__get__(attached), attached.generate):
        with pytest.raises(ValueError, match="input_ids"):
            generate(PROMPT, input_ids=PROMPT[:, :5], **GREEDY)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_type_of_the_texts(dtype: torch.dtype, llama: PreTrainedModel) -> None:
    expected = llama.generate(PROMPT.to(dtype), **GREEDY)
    output = ours_with(llama, input_ids=PROMPT.to(dtype), **GREEDY)
    assert output.dtype == expected.dtype == torch.int64
    assert torch.equal(output, expected)


def test_settings_of_the_model_hold(llama: PreTrainedModel) -> None:
    """The model's generation configuration applies, and arguments override it, as in transformers."""
    settings = {"do_sample": True, "temperature": 1.5, "top_k": 5, "repetition_penalty": 1.4, "max_new_tokens": 9}
    before = {name: getattr(llama.generation_config, name) for name in settings}
    try:
        llama.generation_config.update(**settings)
        for options in ({}, {"top_k": 2}, {"do_sample": False}, {"generation_config": GenerationConfig(top_k=3)}):
            texts = []
            for generate in (llama.generate, ours(llama)):
                torch.manual_seed(1)
                texts.append(generate(input_ids=PROMPT, **options))
            assert torch.equal(*texts)
            assert texts[0].shape[1] == 21
    finally:
        llama.generation_config.update(**before)


def test_stop_strings_taken_back(demo: Demo) -> None:
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids
    try:
        model.generation_config.stop_strings = "(le"
        expected = model.generate(ids, stop_strings=None, **GREEDY)
        assert torch.equal(ours_with(model, input_ids=ids, stop_strings=None, **GREEDY), expected)
    finally:
        model.generation_config.stop_strings = None


def test_stop_strings_beside_a_criterion_of_the_same_kind(demo: Demo) -> None:
    model, tokenizer = demo
    ids = tokenizer("for i in", return_tensors="pt").input_ids
    stops = StopStringCriteria(tokenizer, ["no such text"])
    options = {"stop_strings": ["(le"], "tokenizer": tokenizer, "stopping_criteria": [stops], **GREEDY}
    assert torch.equal(ours_with(model, input_ids=ids, **options), model.generate(ids, **options))


def test_a_paged_cache_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(LookaheadError, match="cache_implementation='paged'"):
        ours_with(llama, input_ids=PROMPT, cache_implementation="paged", **GREEDY)


def test_synced_gpus_where_transformers_would_turn_it_on(llama: PreTrainedModel) -> None:
    """FSDP and DeepSpeed ZeRO-3 turn it on, as they split the weights among devices."""
    model: Any = copy.deepcopy(llama)
    model._is_fsdp_managed_module = True
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(LookaheadError, match="synced_gpus"):
            ours_with(model, input_ids=PROMPT, **GREEDY)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("first", [0, 3])
def test_position_ids_of_another_length(first: int) -> None:
    with pytest.raises(LookaheadError, match="position_ids"):
        ours_with(build("gpt2"), input_ids=PROMPT, position_ids=torch.arange(first, first + 14)[None], **GREEDY)


def test_usual_position_ids() -> None:
    model = build("gpt2")
    ids, mask = padded(7)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    for position_ids in (positions, positions + 5 * (1 - mask)):  # values at hidden tokens do not matter
        output = ours_with(model, input_ids=ids, attention_mask=mask, position_ids=position_ids, **GREEDY)
        assert torch.equal(output, expected)


class LaterLlama(LlamaForCausalLM):
    """A model with inputs that a later transformers may add."""

    def forward(
        self, input_ids: Any = None, later_flag: bool = False, later_kind: str = "usual", later: Any = None, **more: Any
    ) -> Any:
        return super().forward(input_ids, **more)


@pytest.mark.parametrize("nothing", [{"later_flag": False}, {"later_kind": "usual"}, {"later": None}])
def test_the_default_of_an_input_asks_for_nothing(nothing: dict[str, Any], llama: PreTrainedModel) -> None:
    model = LaterLlama(llama.config).eval()
    text = lookahead.generate(model, PROMPT, **nothing, **GREEDY)
    assert torch.equal(text, model.generate(PROMPT, **nothing, **GREEDY))
    for something in ({"later_flag": True}, {"later_kind": "unusual"}, {"later": False}):
        with pytest.raises(UnsupportedArgumentError, match=next(iter(something))):
            lookahead.generate(model, PROMPT, **something, **GREEDY)


def test_an_output_set_to_false_is_accepted() -> None:
    model = build("mixtral")
    text = lookahead.generate(model, PROMPT, output_router_logits=False, **GREEDY)
    assert torch.equal(text, model.generate(PROMPT, output_router_logits=False, **GREEDY))


@pytest.mark.parametrize("name", ["max_new_token", "config"])
def test_an_unknown_argument_is_refused(name: str, llama: PreTrainedModel) -> None:
    for generate in (llama.generate, ours(llama)):
        with pytest.raises(ValueError, match=f"'{name}'"):
            generate(input_ids=PROMPT, **{name: 5})


# --- batches ------------------------------------------------------------------------------------------------------

IN_BATCHES = {
    "nothing": {},
    "eos_token_id": {"eos_token_id": THIRD, "pad_token_id": 0},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 2.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": [THIRD, FOURTH], "pad_token_id": 0},
    "begin_suppress_tokens": {"begin_suppress_tokens": [FIRST]},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (1, 1.6),
        "eos_token_id": UNSAID,
        "pad_token_id": 0,
    },
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, text: [(int(text[-1]) * (row + 3) + shift) % 72 for shift in range(9)]
    },
    "watermarking_config": {"watermarking_config": {"bias": 4.0}},
    "stopping_criteria": {"stopping_criteria": [lambda ids, scores, **_: ids[:, -1] == FOURTH]},
    "prefill_chunk_size": {"prefill_chunk_size": 5},
    "top_k": {"do_sample": True, "top_k": 1},
}


@pytest.mark.parametrize("name", IN_BATCHES)
def test_rows_of_a_padded_batch_equal_generate(name: str, llama: PreTrainedModel) -> None:
    ids, mask = padded(12, 7, 10)
    options = {**GREEDY, **IN_BATCHES[name], "attention_mask": mask}
    assert torch.equal(ours_with(llama, input_ids=ids, **options), llama.generate(ids, **options))


@pytest.mark.parametrize("name", [name for name in IN_BATCHES if name != "stopping_criteria"])
def test_several_sequences_of_one_prompt(name: str, llama: PreTrainedModel) -> None:
    options = {**SAMPLED, **IN_BATCHES[name], "do_sample": True, "top_k": 1, "num_return_sequences": 2}
    expected = llama.generate(PROMPT, **options)
    assert torch.equal(ours_with(llama, input_ids=PROMPT, **options), expected)


def test_scores_behind_the_end_of_a_row_are_zero(llama: PreTrainedModel) -> None:
    ids, mask = padded(12, 7)
    options = {**SCORED, "attention_mask": mask, "eos_token_id": THIRD, "pad_token_id": 0}
    plain, output = llama.generate(ids, **options), ours_with(llama, input_ids=ids, **options)
    assert torch.equal(output.sequences, plain.sequences)
    ends = [(text[12:] == THIRD).nonzero()[0].item() if THIRD in text[12:] else 11 for text in plain.sequences]
    assert len(set(ends)) == 2, "rows that end together test nothing"
    for place, (got, expected) in enumerate(zip(output.scores, plain.scores, strict=True)):
        for row, end in enumerate(ends):
            row_scores = expected[row] if place <= end else torch.zeros_like(expected[row])
            assert torch.allclose(got[row], row_scores, atol=2e-4, rtol=1e-4)


def test_streamer_in_a_batch(llama: PreTrainedModel) -> None:
    """The streamer gets the prompts, then one token of every row at a time; ended rows give padding."""
    ids, mask = padded(12, 7)
    options = {**STOPPED, "attention_mask": mask}
    plain, streamed = Recorder(), Recorder()
    llama.generate(ids, streamer=plain, **options)
    ours_with(llama, input_ids=ids, streamer=streamed, **options)
    assert streamed.values == plain.values
    assert any(0 in value for value in plain.values[1:-1]), "rows that end together test nothing"


class RaisingRecorder(Recorder):
    """A recorder that raises with its value of a number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.values) == self.number:
            raise RuntimeError("oops")


@pytest.mark.parametrize("calls", [1, 2, 4])
def test_a_streamer_of_a_batch_that_raises_gets_no_more(calls: int, llama: PreTrainedModel) -> None:
    """Other rows of the same step still have tokens."""
    ids, mask = padded(12, 7)
    plain, streamed = RaisingRecorder(calls), RaisingRecorder(calls)
    for generate, streamer in ((llama.generate, plain), (ours(llama), streamed)):
        with pytest.raises(RuntimeError, match="oops"):
            generate(input_ids=ids, attention_mask=mask, streamer=streamer, **GREEDY)
    assert streamed.values == plain.values
    assert len(plain.values) == calls


def test_guidance_in_a_batch(llama: PreTrainedModel) -> None:
    prompts = torch.cat([PROMPT, PROMPT.flip(1)])
    assert torch.equal(ours_with(llama, input_ids=prompts, **GUIDED), llama.generate(prompts, **GUIDED))


# --- values that cannot work --------------------------------------------------------------------------------------


def raise_oops(*_: Any, **__: Any) -> Any:
    raise RuntimeError("oops")


class RaisesLate:
    """A processor, criterion or streamer that fails at its fifth call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: Any) -> torch.Tensor:
        self.put(ids)
        return scores if isinstance(scores, torch.Tensor) else torch.tensor([False])  # criteria get no scores here

    def put(self, _: object) -> None:
        self.calls += 1
        if self.calls == 5:
            raise RuntimeError("oops")

    def end(self) -> None: ...


BAD_VALUES = [
    ({"do_sample": True, "temperature": 0.0}, "temperature"),
    ({"do_sample": True, "temperature": -1.0}, "temperature"),
    ({"do_sample": True, "top_p": -0.5}, "top_p"),
    ({"do_sample": True, "top_k": -1}, "top_k"),
    ({"do_sample": True, "min_p": 2.0}, "min_p"),
    ({"do_sample": True, "typical_p": 0.0}, "typical_p"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"max_new_tokens": -3}, "max_new_tokens"),
    ({"max_new_tokens": None, "max_length": 4}, "max_length"),
    ({"repetition_penalty": -1.0}, "penalty"),
    ({"num_return_sequences": 2}, "num_return_sequences"),
    ({"encoder_no_repeat_ngram_size": 1.5}, "ngram_size"),
    ({"bad_words_ids": [[-1]]}, "bad_words_ids"),
    ({"sequence_bias": {}}, "sequence_bias"),
    ({"cache_implementation": "fast"}, "cache_implementation"),
    ({"stop_strings": ["x"]}, "stop_strings|tokenizer"),
    ({"past_key_values": ((PROMPT, PROMPT),)}, "cache|past_key_values"),
    ({"cache_implementation": "dynamic", "past_key_values": DynamicCache()}, "cache_implementation"),
    ({"attention_mask": torch.ones(1, 1, 12, 12)}, "attention_mask"),
    ({"attention_mask": torch.zeros(1, 12)}, "attention_mask"),
    ({"prefix_allowed_tokens_fn": lambda row, text: []}, "prefix_allowed_tokens_fn"),
    ({"stopping_criteria": [lambda ids, scores, **_: torch.zeros(2, dtype=torch.bool)]}, "stopping_criteria"),
    ({"stopping_criteria": [lambda ids, scores, **_: None]}, "stopping_criteria"),
    ({"prefill_chunk_size": 0}, "prefill_chunk_size"),
    ({"prefill_chunk_size": -1}, "prefill_chunk_size"),
    ({"logits_processor": [raise_oops]}, "oops"),
    ({"stopping_criteria": [raise_oops]}, "oops"),
    ({"prefix_allowed_tokens_fn": raise_oops}, "oops"),
    ({"logits_processor": [RaisesLate()]}, "oops"),
    ({"stopping_criteria": [RaisesLate()]}, "oops"),
    ({"streamer": RaisesLate()}, "oops"),
]


@pytest.mark.parametrize(
    ("values", "named"), BAD_VALUES, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_a_bad_value_is_named_and_changes_nothing(values: dict[str, Any], named: str, llama: PreTrainedModel) -> None:
    """The error names the argument or is the caller's own; the model and the user's cache stay unchanged."""
    expected = llama.generate(PROMPT, **GREEDY)
    cache = DynamicCache()
    cache_argument = (
        {} if "past_key_values" in values or "cache_implementation" in values else {"past_key_values": cache}
    )
    with pytest.raises((ValueError, RuntimeError), match=named):
        ours_with(llama, input_ids=PROMPT, **{**GREEDY, **cache_argument, **values})
    assert cache.get_seq_length() == 0
    assert torch.equal(ours_with(llama, input_ids=PROMPT, past_key_values=cache, **GREEDY), expected)
    assert torch.equal(llama.generate(PROMPT, **GREEDY), expected)


@pytest.mark.parametrize(
    "values",
    [
        {"top_p": 2.0},
        {"num_return_sequences": -1},
        {"min_new_tokens": -1, "eos_token_id": THIRD, "pad_token_id": 0},
        {"no_repeat_ngram_size": -2},
        {"eos_token_id": -1, "pad_token_id": -1},
        {"max_time": -5.0},
        {"epsilon_cutoff": 3.0},
    ],
    ids=lambda values: next(iter(values)),
)
def test_unusual_values_have_the_effect_of_generate(values: dict[str, Any], llama: PreTrainedModel) -> None:
    texts = []
    for generate in (llama.generate, ours(llama)):
        torch.manual_seed(2)
        texts.append(generate(input_ids=PROMPT, **{**SAMPLED, **values}))
    assert torch.equal(*texts)


@pytest.mark.parametrize("failing", ["logits_processor", "stopping_criteria", "streamer"])
@pytest.mark.parametrize("filled_by", ["plain", "ours"])
def test_a_filled_cache_survives_a_failed_call(filled_by: str, failing: str, llama: PreTrainedModel) -> None:
    generate = llama.generate if filled_by == "plain" else ours(llama)
    first = generate(input_ids=PROMPT, return_dict_in_generate=True, **GREEDY)
    cache, length = first.past_key_values, first.past_key_values.get_seq_length()
    ids = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    value = RaisesLate() if failing == "streamer" else [RaisesLate()]
    with pytest.raises(RuntimeError, match="oops"):
        ours_with(llama, input_ids=ids, past_key_values=cache, **{failing: value}, **GREEDY)
    assert cache.get_seq_length() == length
    other = torch.cat([first.sequences, torch.tensor([[9, 8] * 12])], dim=1)
    expected = llama.generate(other, **GREEDY)
    assert torch.equal(ours_with(llama, input_ids=other, past_key_values=cache, **GREEDY), expected)
