"""The protocol: OpenAI's client against a server process; texts equal `model.generate`."""

from __future__ import annotations

import math
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import ValidationError
from transformers import LogitsProcessor, LogitsProcessorList

from lookahead.config import PRESETS
from lookahead.server.errors import validation_error
from lookahead.server.fields import ANY, UNUSED
from lookahead.server.requests import ChatRequest, CompletionRequest, Message
from lookahead.server.responses_request import ResponsesRequest
from lookahead.version import __version__

MODEL = "chatty"
PROMPT = "def add(a, b):"
TURN = [{"role": "user", "content": "def add(a, b):"}]
TURN_TEXT = "# user\ndef add(a, b):\n# assistant\n"


def reference(demo: Any, prompt: str, seed: int = 0, **options: Any) -> list[int]:
    """Return the new tokens of `model.generate`."""
    model, tokenizer = demo
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    torch.manual_seed(seed)
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def text_of(demo: Any, tokens: list[int]) -> str:
    return demo[1].decode(tokens, skip_special_tokens=True)


def complete(client: OpenAI, **options: Any) -> Any:
    extra = {
        name: options.pop(name) for name in ("lookahead", "top_k", "min_p", "repetition_penalty") if name in options
    }
    options = {"model": MODEL, "prompt": PROMPT, "max_tokens": 16, "temperature": 0} | options
    return client.completions.create(**options | {"extra_body": extra | options.get("extra_body", {})})


def chat(client: OpenAI, **options: Any) -> Any:
    extra = {"lookahead": options.pop("lookahead")} if "lookahead" in options else {}
    options = {"model": MODEL, "messages": TURN, "max_completion_tokens": 16, "temperature": 0} | options
    return client.chat.completions.create(**options, extra_body=extra)


def test_greedy_text_is_that_of_generate(client: OpenAI, demo: Any) -> None:
    answer = complete(client, lookahead={"statistics": True})
    expected = reference(demo, PROMPT)
    assert answer.choices[0].text == text_of(demo, expected)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(demo[1](PROMPT)["input_ids"]), 16)
    assert answer.lookahead["steps"] < 16


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 0}),
        ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9, "top_k": 0}),
        ({"temperature": 1.3, "top_k": 7, "min_p": 0.05}, {"temperature": 1.3, "top_k": 7, "min_p": 0.05}),
        ({"temperature": 0.8, "repetition_penalty": 1.3}, {"temperature": 0.8, "repetition_penalty": 1.3, "top_k": 0}),
    ],
)
def test_sampled_text_is_that_of_generate(client: OpenAI, demo: Any, options: Any, expected: Any) -> None:
    answer = complete(client, seed=7, n=2, **options)
    for number, choice in enumerate(answer.choices):
        assert choice.index == number
        assert choice.text == text_of(demo, reference(demo, PROMPT, 7 + number, do_sample=True, **expected))


class _Penalties(LogitsProcessor):
    """OpenAI's formula, computed from the whole text for each token."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self._prompt, self._presence, self._frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        answer = input_ids[0, self._prompt :].tolist()
        for token in set(answer):
            scores[0, token] -= self._presence + self._frequency * answer.count(token)
        return scores


def test_penalties_follow_openais_formula(client: OpenAI, demo: Any) -> None:
    prompt = len(demo[1](PROMPT)["input_ids"])
    processors = LogitsProcessorList([_Penalties(prompt, 0.7, 0.4)])
    expected = text_of(demo, reference(demo, PROMPT, logits_processor=processors))
    assert expected != text_of(demo, reference(demo, PROMPT))
    assert complete(client, presence_penalty=0.7, frequency_penalty=0.4).choices[0].text == expected


def test_logit_bias_forces_and_forbids(client: OpenAI, demo: Any) -> None:
    first = reference(demo, PROMPT)[0]
    token = demo[1]("return")["input_ids"][0]
    forced = complete(client, logit_bias={str(token): 100}, max_tokens=3)
    assert forced.choices[0].text == text_of(demo, [token] * 3)
    banned = complete(client, logit_bias={str(first): -100}, max_tokens=1)
    assert banned.choices[0].text != text_of(demo, [first])


def test_logprobs_are_the_models(client: OpenAI, demo: Any) -> None:
    model, tokenizer = demo
    ids = tokenizer(TURN_TEXT, return_tensors="pt")["input_ids"]
    tokens = reference(demo, TURN_TEXT, max_new_tokens=8)
    with torch.no_grad():
        logits = model(torch.cat([ids, torch.tensor([tokens])], dim=1)).logits[0, ids.shape[1] - 1 : -1]
    expected = logits.log_softmax(-1)
    entries = chat(client, logprobs=True, top_logprobs=3, max_completion_tokens=8).choices[0].logprobs.content
    assert [entry.token for entry in entries] == [tokenizer.decode([token]) for token in tokens]
    for entry, row, token in zip(entries, expected, tokens, strict=True):
        assert math.isclose(entry.logprob, float(row[token]), abs_tol=1e-4)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
    flat = complete(client, prompt=TURN_TEXT, max_tokens=8, logprobs=2).choices[0].logprobs
    assert flat.token_logprobs == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
    assert all(len(each) == 2 for each in flat.top_logprobs)


def test_streamed_text_is_the_whole_text(client: OpenAI) -> None:
    whole = chat(client, temperature=0.9, seed=3, n=2, logprobs=True)
    texts, reasons, logprobs, usage = ["", ""], [None, None], [[], []], None
    options = {"include_usage": True}
    for chunk in chat(client, temperature=0.9, seed=3, n=2, logprobs=True, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage
    for entries, choice in zip(logprobs, whole.choices, strict=True):
        assert [entry.token for entry in entries] == [entry.token for entry in choice.logprobs.content]


def test_usage_with_each_chunk(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    totals = [chunk.usage.completion_tokens for chunk in complete(client, stream=True, stream_options=options)]
    assert totals == sorted(totals)
    assert totals[-1] == 16


def test_stop_strings_end_the_text_before_them(client: OpenAI, demo: Any) -> None:
    full = text_of(demo, reference(demo, PROMPT))
    stop = full[9:14]
    answer = complete(client, stop=[stop, "never there"])
    assert answer.choices[0].text == full[: full.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens < 16
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, stop=stop, stream=True))
    assert streamed == answer.choices[0].text


def test_prompts_may_be_lists_and_token_ids(client: OpenAI, demo: Any) -> None:
    prompts = [PROMPT, "class Stack:"]
    expected = [text_of(demo, reference(demo, prompt, max_new_tokens=5)) for prompt in prompts]
    assert [choice.text for choice in complete(client, prompt=prompts, max_tokens=5).choices] == expected
    ids = [demo[1](prompt)["input_ids"] for prompt in prompts]
    assert [choice.text for choice in complete(client, prompt=ids, max_tokens=5).choices] == expected


def test_drafting_only_changes_steps(client: OpenAI) -> None:
    plain = complete(client, lookahead={"enabled": False, "statistics": True})
    assert plain.lookahead["steps"] == 16
    for preset in PRESETS:
        assert complete(client, lookahead={"preset": preset}).choices[0].text == plain.choices[0].text


def test_a_step_budget_bounds_the_nodes_of_each_step(client: OpenAI) -> None:
    stream = complete(client, lookahead={"step_budget": 3, "steps": True}, stream=True)
    nodes = [chunk.lookahead["nodes"] for chunk in stream if getattr(chunk, "lookahead", None)]
    assert 1 < max(nodes) <= 3


@pytest.mark.parametrize(("preset", "source"), [("auto", "n-gram memory"), ("paper", "lookahead window")])
def test_steps_name_the_source_of_each_node(client: OpenAI, preset: str, source: str) -> None:
    options = {"steps": True, "preset": preset}
    # Long enough for the whole window, which ends with the text.
    stream = complete(client, lookahead=options, max_tokens=40, stream=True)
    chunks = [chunk for chunk in stream if hasattr(chunk, "lookahead")]
    trees = [chunk.lookahead["tree"] for chunk in chunks]
    for tree in trees:
        assert len(tree["sources"]) == len(tree["probabilities"]) == len(tree["tokens"]) - 1
    assert source in {name.split(", ")[0] for tree in trees for name in tree["sources"]}


def test_a_predicted_text_only_saves_steps(client: OpenAI) -> None:
    request = {"max_completion_tokens": 48, "temperature": 0.7, "seed": 5, "lookahead": {"statistics": True}}
    plain = chat(client, **request)
    text = plain.choices[0].message.content
    predicted = chat(client, **request, prediction={"type": "content", "content": text})
    assert predicted.choices[0].message.content == text
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens >= 40
    assert predicted.lookahead["steps"] < plain.lookahead["steps"]
    wrong = chat(client, **request, prediction={"type": "content", "content": [{"type": "text", "text": "No. " * 9}]})
    assert wrong.choices[0].message.content == text
    assert wrong.usage.completion_tokens_details.rejected_prediction_tokens > 0
    details = chat(client, **request, prediction={"type": "content", "content": ""}).usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_responses_have_the_text_of_generate_whole_and_streamed(client: OpenAI, demo: Any) -> None:
    request = {"model": MODEL, "input": "def add(a, b):", "max_output_tokens": 16, "temperature": 0}
    expected = text_of(demo, reference(demo, TURN_TEXT))
    answer = client.responses.create(**request)
    assert answer.output_text == expected
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.usage.output_tokens == 16
    events = list(client.responses.create(**request, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
    assert events[0].type == "response.created"
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == expected
    structured = client.responses.create(**request | {"input": TURN}, instructions="Be brief.")
    assert structured.usage.input_tokens > answer.usage.input_tokens
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema | {"additionalProperties": False}}}
    assert client.responses.create(**request, text=form).output_text in ('{"a": true}', '{"a": false}')
    history = [*TURN, *answer.output, {"role": "user", "content": "Go on."}]  # as the client's documentation does
    plain = [*TURN, {"role": "assistant", "content": answer.output_text}, {"role": "user", "content": "Go on."}]
    for input_ in (history, [*TURN, *(item.model_dump() for item in answer.output), history[-1]]):
        structured, same = (client.responses.create(**request | {"input": each}) for each in (input_, plain))
        assert structured.output_text == same.output_text
        assert structured.usage.input_tokens == same.usage.input_tokens
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}
    for field, value in (
        ("previous_response_id", "resp_1"),
        ("input", []),
        ("input", "x " * 9000),
        ("max_output_tokens", 100_000),
        ("text", form),
    ):
        with pytest.raises(BadRequestError) as raised:
            client.responses.create(**request | {field: value})
        assert raised.value.param in (field, f"{field}.format")
        assert "response_format" not in raised.value.message


@pytest.mark.parametrize("count", [4, pytest.param(64, marks=pytest.mark.exact)])
def test_concurrent_requests_equal_generate(client: OpenAI, demo: Any, count: int) -> None:
    expected = [
        text_of(demo, reference(demo, PROMPT, seed, do_sample=True, temperature=0.9, top_k=0, max_new_tokens=12))
        for seed in range(count)
    ]
    with ThreadPoolExecutor(count) as pool:
        answers = pool.map(lambda seed: complete(client, seed=seed, temperature=0.9, max_tokens=12), range(count))
        assert [answer.choices[0].text for answer in answers] == expected


ENDPOINTS = {"chat": ChatRequest, "completions": CompletionRequest, "responses": ResponsesRequest}
LEAST = {"chat": {"messages": TURN}, "completions": {"prompt": "x"}, "responses": {"input": "x"}}


@pytest.mark.parametrize("place", ENDPOINTS)
def test_fields_that_ask_for_nothing_are_left_out_and_others_named(place: str) -> None:
    least = {"model": MODEL} | LEAST[place]
    plain = ENDPOINTS[place].model_validate(least)
    for unused in UNUSED:
        values = [{"x": [1]}, "x"] if unused.harmless is ANY else unused.harmless
        if place not in unused.places:
            continue
        assert unused.name not in ENDPOINTS[place].model_fields
        for value in (None, *values):
            assert ENDPOINTS[place].model_validate(least | {unused.name: value}) == plain
        if unused.harmless is not ANY:
            with pytest.raises(ValidationError) as raised:
                ENDPOINTS[place].model_validate(least | {unused.name: "something"})
            error = validation_error(
                [{**raised.value.errors()[0], "loc": ("body", unused.name)}], {unused.name: "something"}
            )
            assert (error.param, error.status_code) == (unused.name, 400)
            assert unused.reason in error.detail


def test_fields_that_libraries_add_to_earlier_answers_are_ignored() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}
    added = {"index": 0, "provider_specific_fields": {"a": 1}}
    noted = {"refusal": "", "annotations": [], "audio": None, "function_call": None, "provider_specific_fields": None}
    assert Message.model_validate(message | noted | {"tool_calls": [call | added]}) == Message.model_validate(message)
    with pytest.raises(ValidationError, match="made_up"):
        Message.model_validate(message | {"tool_calls": [call | {"made_up": 1}]})


def test_requests_of_agents_are_answered(client: OpenAI, demo: Any) -> None:
    """Requests with the many fields that clients of 2026 send, all without effect here."""
    shared = {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "prompt_cache_key": "k", "user": "u"}
    shared |= {"safety_identifier": "s", "parallel_tool_calls": True, "tools": [], "temperature": 0}
    answer = client.chat.completions.create(
        model=MODEL,
        messages=TURN,
        max_tokens=16,
        verbosity="low",
        modalities=["text"],
        reasoning_effort="low",
        tool_choice="auto",
        extra_body={"cache_salt": "x", "priority": 0, "skip_special_tokens": True},
        **shared,  # type: ignore[arg-type]
    )
    expected = text_of(demo, reference(demo, TURN_TEXT))
    assert answer.choices[0].message.content == expected
    response = client.responses.create(
        model=MODEL,
        input=TURN,
        max_output_tokens=16,
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        **shared,  # type: ignore[arg-type]
    )
    assert response.output_text == expected


def test_echo_puts_the_prompt_before_the_answer(client: OpenAI) -> None:
    prompts = [PROMPT, "class Stack:"]
    plain = [choice.text for choice in complete(client, prompt=prompts, n=2, max_tokens=5).choices]
    echoed = complete(client, prompt=prompts, n=2, max_tokens=5, echo=True)
    assert [choice.text for choice in echoed.choices] == [
        prompts[place // 2] + text for place, text in enumerate(plain)
    ]
    streamed = complete(client, max_tokens=5, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == PROMPT + plain[0]


def test_echoed_prompts_have_the_models_logprobs(client: OpenAI, demo: Any) -> None:
    model, tokenizer = demo
    prompts = [PROMPT * 60, "class Stack:"]  # the first is prefilled in parts
    choices = complete(client, prompt=prompts, max_tokens=1, echo=True, logprobs=2).choices
    for prompt, choice in zip(prompts, choices, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            rows = model(ids).logits[0].log_softmax(-1)
        logprobs, tokens = choice.logprobs, ids[0].tolist()
        assert logprobs.tokens[:-1] == [tokenizer.decode([token]) for token in tokens]
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        expected = [float(row[token]) for row, token in zip(rows, tokens[1:], strict=False)]
        assert logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(
            rows.max(-1).values.tolist(), abs=1e-4
        )
        assert logprobs.text_offset[-1] == len(prompt)
        assert choice.text.startswith(prompt)
    (chunk, *_) = complete(client, prompt=prompts[1], max_tokens=1, echo=True, logprobs=2, stream=True)
    assert chunk.choices[0].logprobs.token_logprobs == choices[1].logprobs.token_logprobs[:-1]


def test_ends_equal_generate(client: OpenAI, demo: Any) -> None:
    end = demo[0].generation_config.eos_token_id
    plain = reference(demo, PROMPT, max_new_tokens=24)
    stop = plain[9]
    place = plain.index(stop)
    answer = complete(client, max_tokens=24, extra_body={"stop_token_ids": [stop]})
    assert answer.usage.completion_tokens == place + 1
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == text_of(demo, plain[: place + 1])
    expected = reference(demo, PROMPT, max_new_tokens=24, min_new_tokens=15, eos_token_id=[end, stop])
    answer = complete(client, max_tokens=24, extra_body={"stop_token_ids": [stop], "min_tokens": 15})
    assert answer.choices[0].text == text_of(demo, expected)
    bias = {str(end): 100}
    assert complete(client, max_tokens=4, logit_bias=bias).usage.completion_tokens == 1
    answer = complete(client, max_tokens=4, logit_bias=bias, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (4, "length")
    for wrong in ({"min_tokens": 25}, {"stop_token_ids": [10**6]}, {"ignore_eos": True, "structured_outputs": CHOICE}):
        with pytest.raises(BadRequestError) as raised:
            complete(client, max_tokens=24, extra_body=wrong)
        assert raised.value.param == next(iter(wrong))


CHOICE = {"choice": ["yes", 'n"o']}


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (CHOICE, 'yes|n"o'),
        ({"regex": "[0-9]{3}/[a-c]{2}"}, "[0-9]{3}/[a-c]{2}"),
        ({"grammar": 'start: "a" "b"~2 | "x"'}, "abb|x"),
        ({"grammar": 'root ::= "up " ("left" | "right")'}, "up (left|right)"),
        ({"json": '{"type": "boolean"}'}, "true|false"),
        ({"json": {"enum": [1, "x"]}}, '1|"x"'),
    ],
)
def test_structured_outputs_follow_their_schema(client: OpenAI, form: Any, pattern: str) -> None:
    extra = {"structured_outputs": form}
    assert re.fullmatch(pattern, complete(client, extra_body=extra).choices[0].text)
    answer = client.chat.completions.create(model=MODEL, messages=TURN, temperature=0.9, seed=1, extra_body=extra)
    assert re.fullmatch(pattern, answer.choices[0].message.content or "")


@pytest.mark.parametrize(
    "form", [{}, {"regex": "("}, {"grammar": "start"}, {"json": "{"}, {"regex": "a", "choice": ["b"]}]
)
def test_invalid_schemas_are_refused(client: OpenAI, form: Any) -> None:
    with pytest.raises(BadRequestError) as raised:
        complete(client, extra_body={"structured_outputs": form})
    assert raised.value.param is not None
    assert raised.value.param.startswith("structured_outputs")


def test_options_of_the_chat_template_shape_the_prompt(client: OpenAI, http: httpx.Client, demo: Any) -> None:
    begun = [*TURN, {"role": "assistant", "content": "    return"}]
    extra: dict[str, Any] = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    answer = client.chat.completions.create(model=MODEL, messages=begun, temperature=0, max_tokens=8, **extra)
    expected = reference(demo, TURN_TEXT + "    return", max_new_tokens=8)
    assert answer.choices[0].message.content == text_of(demo, expected)
    extra = {"extra_body": {"chat_template_kwargs": {"greeting": "# hello\n"}}}
    answer = client.chat.completions.create(model=MODEL, messages=TURN, temperature=0, max_tokens=8, **extra)
    assert answer.choices[0].message.content == text_of(
        demo, reference(demo, "# hello\n" + TURN_TEXT, max_new_tokens=8)
    )
    extra = {"extra_body": {"chat_template_kwargs": {"tokenize": True}}}
    with pytest.raises(BadRequestError, match="tokenize"):
        client.chat.completions.create(model=MODEL, messages=TURN, **extra)
    assert http.get("/version").json() == {"version": __version__}
    tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    assert http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": PROMPT}
    assert http.post("/detokenize", json={"tokens": [10**6]}).json()["error"]["param"] == "tokens"


EXPECTED = {"type": "content", "content": "x"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("audio", {"extra_body": {"audio": {"voice": "x"}}}),
        ("stop", {"stop": [""]}),
        ("stop", {"stop": ["x"] * 17}),
        ("temperature", {"temperature": 2.5}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("logit_bias", {"logit_bias": {"99999": 1}}),
        ("max_completion_tokens", {"max_completion_tokens": 100_000}),
        ("messages.0.role", {"messages": [{"role": "king", "content": "x"}]}),
        ("stream_options", {"stream_options": {"include_usage": True}}),
        ("lookahead.preset", {"extra_body": {"lookahead": {"preset": "magic"}}}),
        ("lookahead.fast", {"extra_body": {"lookahead": {"fast": True}}}),
        ("messages", {"messages": [{"role": "user", "content": "x " * 4000}], "max_tokens": 1}),
        ("prediction", {"prediction": {"type": "content", "content": "x" * 200_000}}),
        ("messages.0.content.0.image_url", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        ("tool_choice.function", {"tools": [], "tool_choice": {"type": "function"}}),
        ("prediction", {"prediction": EXPECTED, "extra_body": {"lookahead": {"enabled": False}}}),
    ],
)
def test_unsupported_fields_are_named(client: OpenAI, field: str, options: Any) -> None:
    with pytest.raises(BadRequestError) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": TURN} | options)
    assert raised.value.param is not None
    assert raised.value.param.startswith(field)
    assert field.split(".")[-1] in raised.value.message


def deep(depth: int) -> bytes:
    """Return a request with a schema nested to this depth."""
    schema = b'{"properties": {"a": ' * depth + b"{}" + b"}}" * depth
    form = b'{"type": "json_schema", "json_schema": {"name": "x", "schema": ' + schema + b"}}"
    return b'{"model": "chatty", "messages": [{"role": "user", "content": "x"}], "response_format": ' + form + b"}"


ODD = (
    b'{"model": "\\ud800"}',
    b'{"model": "chatty", "prompt": "x\\udc00"}',
    b'{"model": "chatty", "prompt": "x", "\\ud800": 1}',
    b'{"model": "chatty", "prompt": "x", "temperature": NaN}',
    b'{"model": "chatty", "prompt": "x", "logit_bias": {"1": Infinity}}',
)


def test_unknown_models_and_malformed_bodies_are_refused(client: OpenAI, http: httpx.Client) -> None:
    with pytest.raises(NotFoundError):
        chat(client, model="gpt-4")
    for body in (b"", b"{", b"[]", b'{"model": "chatty", "prompt": []}', b'{"model": "\xff"}', b"[" * 100_000, *ODD):
        answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"]
    answer = http.post("/v1/completions", data={"model": "chatty"})  # as curl -d does
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert http.post("/v1/completions", content=b"{}", headers={"Content-Type": ""}).status_code == 415
    for depth in (100, 400):
        answer = http.post("/v1/chat/completions", content=deep(depth), headers={"Content-Type": "application/json"})
        assert answer.status_code == 400
    assert http.get("/nothing").status_code == 404
    assert http.get("/v1/completions").json()["error"]["type"] == "invalid_request_error"


def test_models_health_and_tokenize_answer(client: OpenAI, http: httpx.Client, demo: Any) -> None:
    (card,) = client.models.list().data
    assert card.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL
    assert http.get("/health").json() == {"status": "ok"}
    answer = http.post("/tokenize", json={"prompt": PROMPT}).json()
    assert answer["tokens"] == demo[1](PROMPT)["input_ids"]
    answer = http.post("/tokenize", json={"messages": TURN}).json()
    assert answer["tokens"] == demo[1](TURN_TEXT)["input_ids"]
