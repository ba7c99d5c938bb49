"""Answers that follow a schema, and function calls; texts equal plain decoding with the same grammar."""

from __future__ import annotations

import json
from copy import copy
from random import Random
from typing import Any

import jsonschema
import llguidance
import llguidance.hf
import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import LogitsProcessor, LogitsProcessorList

from lookahead.server.errors import ApiError
from lookahead.server.grammar import GrammarProcessor, grammar_of, grammar_tokenizer
from lookahead.server.guard import ServerSettings
from lookahead.server.plan import make_plan
from lookahead.server.requests import ChatRequest, Message
from lookahead.server.served_model import EncodedPrompt
from lookahead.server.tools import FORMATS, HARMONY, HERMES, AnswerReader, Thinking, ToolFormat, format_of
from lookahead.text import TextBuilder
from random_schemas import random_schema
from server_process import served_model

TURN = [{"role": "user", "content": "def add(a, b):"}]
TURN_TEXT = "# user\ndef add(a, b):\n# assistant\n"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "maxLength": 8}, "unit": {"enum": ["C", "F"]}},
            "required": ["place", "unit"],
            "additionalProperties": False,
        },
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
BOOLEAN = {"type": "boolean"}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": NOTHING}}


class Masked(LogitsProcessor):
    """A grammar for plain decoding, evaluated from scratch for each token.

    Attributes:
        choices: Number of tokens allowed at each index.
    """

    def __init__(self, tokenizer: Any, schema: Any, prompt: int) -> None:
        options = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        self._grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, options)
        self._tokenizer, self._prompt = tokenizer, prompt
        self.choices: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        matcher = llguidance.LLMatcher(self._tokenizer, self._grammar)
        assert matcher.consume_tokens(input_ids[0, self._prompt :].tolist())
        bias = torch.tensor(list(matcher.compute_logit_bias()))[: scores.shape[1]]
        self.choices.append(int((bias != 0).sum()))
        return scores.masked_fill(bias == 0, -torch.inf)


@pytest.mark.parametrize("case", [0, 1, *(pytest.param(case, marks=pytest.mark.exact) for case in range(2, 100))])
def test_answers_follow_random_schemas(client: OpenAI, demo: Any, case: int) -> None:
    model, tokenizer = demo
    schema = random_schema(Random(case))
    ids = tokenizer(TURN_TEXT, return_tensors="pt")["input_ids"]
    grammar = Masked(llguidance.hf.from_tokenizer(tokenizer), schema, ids.shape[1])
    options: dict[str, Any] = {"do_sample": bool(case % 2)} | ({"temperature": 0.9, "top_k": 0} if case % 2 else {})
    torch.manual_seed(case)
    plain = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=300,
        logits_processor=LogitsProcessorList([grammar]),
        pad_token_id=0,
        **options,
    )
    answer = client.chat.completions.create(
        model="chatty",
        messages=TURN,
        seed=case,
        temperature=0.9 if case % 2 else 0,
        max_tokens=300,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        extra_body={"lookahead": {"statistics": True}},
    )
    text = answer.choices[0].message.content
    assert text == tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(text), schema)
    free = sum(count > 1 for count in grammar.choices)
    longest = (len(grammar.choices) - free) // 15  # steps for chains longer than the server's 16 nodes
    assert answer.model_extra["lookahead"]["steps"] <= free + 1 + longest, "a token without a choice took a step"


def test_json_object_format_gives_an_object(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chatty",
        messages=TURN,
        temperature=0,
        max_tokens=60,
        response_format={"type": "json_object"},
        logit_bias={str(token): -100 for token in range(200, 300)},
    )
    assert answer.choices[0].message.content.startswith("{")


def call(client: OpenAI, **options: Any) -> Any:
    options = {"model": "chatty", "messages": TURN, "temperature": 0, "max_tokens": 120} | options
    return client.chat.completions.create(**options)


def test_functions_are_called(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    answer = call(client, tools=[WEATHER, CLOCK], tool_choice=named)
    (made,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert made.function.name == "weather"
    jsonschema.validate(json.loads(made.function.arguments), WEATHER["function"]["parameters"])
    streamed: list[Any] = []
    reasons = []
    for chunk in call(client, tools=[WEATHER, CLOCK], tool_choice=named, stream=True):
        streamed += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
        assert not chunk.choices[0].delta.content
    assert [each.function for each in streamed] == [
        type(streamed[0].function)(name="weather", arguments=made.function.arguments)
    ]
    assert reasons[-1] == "tool_calls"
    required = call(client, tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)
    assert [each.function.name for each in required.choices[0].message.tool_calls] == ["clock"]
    history = [
        *TURN,
        {"role": "assistant", "content": None, "tool_calls": [made.model_dump()]},
        {"role": "tool", "tool_call_id": made.id, "content": "12 C"},
    ]
    assert call(client, messages=history, tools=[WEATHER], tool_choice="none", max_tokens=4).choices[0].message.content
    assert call(client, tools=[WEATHER], max_tokens=8).choices[0].finish_reason in ("length", "stop", "tool_calls")


@pytest.mark.parametrize(
    ("field", "options"),
    [
        (
            "response_format",
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?=a)b"}},
                }
            },
        ),
        ("response_format", {"response_format": {"type": "xml"}}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        ("tools", {"tools": [CLOCK, CLOCK]}),
    ],
)
def test_grammars_that_cannot_be_met_are_refused(client: OpenAI, field: str, options: Any) -> None:
    with pytest.raises(BadRequestError) as raised:
        call(client, **options)
    assert raised.value.param.startswith(field)


ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral-v11": "[TOOL_CALLS]clock[ARGS]{}",
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {}}]',
    "llama3": '{"name": "clock", "parameters": {}}',
}
TWO_CALLS = {
    "hermes": "\n".join([ONE_CALL["hermes"]] * 2),
    "deepseek-v3": ONE_CALL["deepseek-v3"].replace("<｜tool▁calls▁end｜>", "")
    + "\n"
    + ONE_CALL["deepseek-v3"].replace("<｜tool▁calls▁begin｜>", ""),
    "deepseek-v3.1": ONE_CALL["deepseek-v3.1"].replace("<｜tool▁calls▁end｜>", "")
    + ONE_CALL["deepseek-v3.1"].replace("<｜tool▁calls▁begin｜>", ""),
    "mistral-v11": ONE_CALL["mistral-v11"] * 2,
    "mistral": '[TOOL_CALLS][{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]',
    "llama3": "; ".join([ONE_CALL["llama3"]] * 2),
}
BYTES = llguidance.LLTokenizer("byte")


def chat_request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "x", "messages": TURN} | fields)


def accepted(text: str, request: ChatRequest, *rest: Any, **options: Any) -> bool:
    """Return whether the grammar of a request allows a whole answer."""
    grammar = grammar_of(request, *rest, {}, **options)
    assert grammar is not None
    matcher = llguidance.LLMatcher(BYTES, grammar[0])
    assert not matcher.get_error()
    return bool(matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting())


TEXT_FORMATS = [format_ for format_ in FORMATS if format_.name != "harmony"]


@pytest.mark.parametrize("format_", TEXT_FORMATS, ids=lambda format_: format_.name)
def test_each_format_allows_calls_and_reads_them(format_: ToolFormat) -> None:
    one, two = ONE_CALL[format_.name], TWO_CALLS[format_.name]
    for choice in ("auto", "required"):
        for parallel in (True, False):
            request = chat_request(tools=[CLOCK], tool_choice=choice, parallel_tool_calls=parallel)
            assert accepted(one, request, Thinking.NEVER, format_)
            assert accepted(two, request, Thinking.NEVER, format_) is parallel
            assert accepted("Of course.", request, Thinking.NEVER, format_) is (choice == "auto")
            assert not accepted(one.replace("clock", "watch"), request, Thinking.NEVER, format_)
            assert accepted(f"<think>So?</think>\n\n{one}", request, Thinking.MAY, format_)
            assert accepted(f"So?</think>{one}", request, Thinking.OPEN, format_)
    for text, count in ((one, 1), (two, 2), (one[: one.rindex("{}") + 1], 0)):
        for size in (1, 3, 1000):
            reader = AnswerReader(Thinking.NEVER, format_)
            visible = "".join(reader.add(text[place : place + size]).content for place in range(0, len(text), size))
            rest, calls = reader.finish()
            assert visible == ""
            assert rest.content == ("" if count else text)
            assert [each["function"] for each in calls] == [{"name": "clock", "arguments": "{}"}] * count


THOUGHT = "<|channel|>analysis<|message|>So?<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.clock <|constrain|>json<|message|>{}"
FINAL = "<|channel|>final<|message|>"


def test_channels_allow_one_call_or_a_final_text_and_are_read() -> None:
    (format_,) = set(FORMATS).difference(TEXT_FORMATS)
    form = {"response_format": {"type": "json_object"}}
    for choice in ("auto", "required"):
        request = chat_request(tools=[CLOCK], tool_choice=choice)
        assert accepted(CALL, request, Thinking.MAY, format_, reasoning=HARMONY)
        assert accepted(THOUGHT + CALL, request, Thinking.MAY, format_, reasoning=HARMONY)
        assert not accepted(CALL * 2, request, Thinking.MAY, format_, reasoning=HARMONY)
        text = accepted(f"{THOUGHT}{FINAL}Of course.", request, Thinking.MAY, format_, reasoning=HARMONY)
        assert text is (choice == "auto")
        assert not accepted("Of course.", request, Thinking.MAY, format_, reasoning=HARMONY)
    for tools in ({}, {"tools": [CLOCK]}):
        request = chat_request(**tools, **form)
        assert accepted(f'{THOUGHT}{FINAL}{{"a": 1}}', request, Thinking.MAY, format_, reasoning=HARMONY)
        assert not accepted(f"{THOUGHT}{FINAL}text", request, Thinking.MAY, format_, reasoning=HARMONY)
    for text, expected, count in (
        (f"{THOUGHT}{FINAL}Of <|course", ("So?", "Of <|course"), 0),
        (f"{FINAL}<", ("", "<"), 0),
        (f"{THOUGHT}{THOUGHT}{FINAL}x", ("So?So?", "x"), 0),
        (THOUGHT + CALL, ("So?", ""), 1),
    ):
        for size in (1, 3, 1000):
            reader = AnswerReader(Thinking.MAY, format_, HARMONY)
            parts = [reader.add(text[place : place + size]) for place in range(0, len(text), size)]
            rest, calls = reader.finish()
            parts.append(rest)
            assert ("".join(part.reasoning for part in parts), "".join(part.content for part in parts)) == expected
            assert [each["function"] for each in calls] == [{"name": "clock", "arguments": "{}"}] * count


def test_an_answer_does_not_end_where_its_grammar_fails(demo: Any) -> None:
    _, tokenizer = demo
    tokens = grammar_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    wrong = tokenizer("[", return_tensors="pt", add_special_tokens=False)["input_ids"]
    grammar = llguidance.LLMatcher.grammar_from_json_schema(BOOLEAN)
    for most in (
        None,
        llguidance.LLParserLimits(step_lexer_fuel=1),
    ):  # so little fuel fails in the search for the next tokens
        matcher = llguidance.LLMatcher(tokens, grammar, limits=most, log_level=0)
        assert not matcher.is_error()
        with pytest.raises(ValueError, match="the grammar failed"):
            GrammarProcessor(matcher, 0)(wrong if most is None else wrong[:, :0], torch.zeros(1, len(tokenizer)))


def test_a_draft_at_which_a_grammar_fails_changes_no_answer(demo: Any) -> None:
    _, tokenizer = demo
    served = served_model("x", demo[0], tokenizer)
    request = chat_request(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": BOOLEAN}})
    plan = make_plan(served, request, EncodedPrompt([1, 2]), ServerSettings())
    (processor,), config = plan.steer()
    (source,) = [make() for make in config.sources]
    before = processor(torch.tensor([[1, 2]]), torch.zeros(1, len(tokenizer)))
    assert source.certain() == []
    with pytest.raises(ValueError, match="out of range"):
        source.permits([len(tokenizer) + 7], [0])
    assert torch.equal(processor(torch.tensor([[1, 2]]), torch.zeros(1, len(tokenizer))), before)
    (true,) = tokenizer("true", add_special_tokens=False)["input_ids"]
    after = processor(torch.tensor([[1, 2, true]]), torch.zeros(1, len(tokenizer)))
    assert after[0].argmax() == tokenizer.eos_token_id


def test_a_format_beside_tools_is_that_of_answers_without_calls() -> None:
    request = chat_request(tools=[CLOCK], response_format={"type": "json_object"})
    *others, last = TEXT_FORMATS
    with pytest.raises(ApiError, match="its calls are JSON"):
        grammar_of(request, Thinking.NEVER, last, {})
    for format_ in others:
        assert accepted('{"a": 1}', request, Thinking.NEVER, format_)
        assert accepted(ONE_CALL[format_.name], request, Thinking.NEVER, format_)
        assert not accepted("text", request, Thinking.NEVER, format_)


def test_call_formats_are_recognised_by_chat_template() -> None:
    """The lines are from published templates."""
    lines = {
        "hermes": """{{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}""",
        "llama3": """{{- 'Respond in the format {"name": function name, "parameters": dictionary of argument name """
        """and its value}.' }}""",
        "mistral": """{{- "[TOOL_CALLS][" }}{{- '{"name": "' + tool_call.name + '"' }}""",
        "mistral-v11": """{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}""",
        "deepseek-v3": """{{'<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + """
        """'\\n' + '```json' + '\\n'}}""",
        "deepseek-v3.1": """{{'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'}}""",
        "harmony": """{{- "functions." + tool_call.name + "<|channel|>commentary " }}""",
    }
    for name, line in lines.items():
        format_ = format_of("{% if tools %}" + line)
        assert format_ is not None
        assert format_.name == name
    assert format_of("{% if tools %}") is FORMATS[[each.name for each in FORMATS].index("hermes")]
    assert format_of("<tool_call>") is None


def test_reasoning_is_separated_from_the_answer() -> None:
    text = "\n<think>a < b </thin </think>\n\nyes <think> no"
    for size in (1, 4, 100):
        for thinking, answer in ((Thinking.MAY, text), (Thinking.OPEN, text[len("\n<think>") :])):
            reader = AnswerReader(thinking, None)
            parts = [reader.add(answer[place : place + size]) for place in range(0, len(answer), size)]
            rest, calls = reader.finish()
            parts.append(rest)
            assert not calls
            assert "".join(part.reasoning for part in parts) == "a < b </thin "
            assert "".join(part.content for part in parts) == "yes <think> no"
    for cut in ("<thi", "plain", ""):
        reader = AnswerReader(Thinking.MAY, None)
        assert reader.add(cut).content + reader.finish()[0].content == cut


def test_chat_templates_get_earlier_calls_as_objects(demo: Any) -> None:
    model, tokenizer = demo
    template = "{% for each in messages[0].tool_calls %}{{ each.function | tojson }};{% endfor %}{{ tools }}"
    served = served_model("x", model, copy(tokenizer))
    served.tokenizer.chat_template = template

    def turn(*arguments: str) -> Message:
        calls = [{"id": "1", "function": {"name": "f", "arguments": each}} for each in arguments]
        return Message.model_validate({"role": "assistant", "tool_calls": calls})

    text = tokenizer.decode(served.encode_chat([turn('{"a": {"b": [1, "x"]}}', "")]).tokens)
    objects = ('{"name": "f", "arguments": {"a": {"b": [1, "x"]}}}', '{"name": "f", "arguments": {}}')
    assert text.split(";")[:2] == list(objects)
    for wrong in ('{"a": ', "[1]", '"text"'):
        with pytest.raises(ApiError, match="not a JSON object"):
            served.encode_chat([turn(wrong)])


def test_calls_are_separated_from_text() -> None:
    text = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n'
    for size in (1, 3, 100):
        reader = AnswerReader(Thinking.NEVER, HERMES)
        visible = "".join(reader.add(text[place : place + size]).content for place in range(0, len(text), size))
        rest, calls = reader.finish()
        assert (visible, rest.content) == ("Let me see.\n", "")
        assert json.loads(calls[0]["function"]["arguments"]) == {"a": "</tool_call>"}
    reader = AnswerReader(Thinking.NEVER, HERMES)
    assert reader.add("a <b> <tool").content == "a <b> "
    rest, calls = reader.finish()
    assert (rest.content, calls) == ("<tool", [])


def test_text_is_whole_whatever_the_tokens(demo: Any) -> None:
    tokenizer = demo[1]
    text = "naïve — 日本語 🙂🙃 x = '\u0301'\n\tend"
    tokens = tokenizer(text)["input_ids"]
    builder = TextBuilder(tokenizer, tokenizer("# ")["input_ids"], [])
    pieces = []
    for token in tokens:
        builder.add(token)
        pieces.append(builder.take())
    assert "".join(pieces) + builder.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    for size in (2, 3, 5, len(tokens)):  # steps with several tokens
        builder, pieces = TextBuilder(tokenizer, tokenizer("# ")["input_ids"], []), []
        for place in range(0, len(tokens), size):
            builder.extend(tokens[place : place + size])
            pieces.append(builder.take())
        assert "".join(pieces) + builder.finish() == text
        assert not any("\ufffd" in piece for piece in pieces)
    builder = TextBuilder(tokenizer, [], ["本語", "🙃"])
    assert any(builder.add(token) for token in tokens)
    assert builder.take() + builder.finish() == text[: text.index("本語")]
