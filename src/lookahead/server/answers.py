"""Answers in the form of OpenAI's API: whole, and in chunks."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from lookahead.server.errors import ApiError
from lookahead.server.generation import Answer, Generation, Piece
from lookahead.server.grammar import callable_tools
from lookahead.server.plan import Plan
from lookahead.server.requests import ChatRequest, ChoicesRequest, CompletionRequest
from lookahead.server.served_model import ServedModel
from lookahead.server.tools import AnswerReader
from lookahead.serving.handle import TokenEvent
from lookahead.version import __version__


class Form:
    """How answers to one request are written.

    Args:
        served: The model.
        request: The request.
        plans: Its prompts.
    """

    prefix: str
    object: str
    chunk_object: str
    last_event = b"data: [DONE]\n\n"

    def __init__(self, served: ServedModel, request: ChoicesRequest, plans: Sequence[Plan]) -> None:
        self._served, self._request, self._plans = served, request, plans
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
            "system_fingerprint": f"lookahead-{__version__}",
        }
        self._prompt_tokens = sum(len(plan.prompt) for plan in plans)
        self._streamed = 0

    def whole(self, generation: Generation, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer to a request that does not stream.

        Args:
            generation: The answers.
            pieces: All that each of them was made of.
        """
        choices = [
            self.choice(
                answer, "".join(piece.text for piece in made), [entry for piece in made for entry in piece.logprobs]
            )
            for answer, made in zip(generation.answers, pieces, strict=True)
        ]
        return {**self._head, "object": self.object, "choices": choices, **self.usage(generation)}

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """Chunks that come before all others."""
        return []

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """The chunks for a piece, or for the end of an answer; none if there is nothing to tell yet."""
        self._streamed += 0 if piece is None else len(piece.tokens)
        if piece is not None and not (piece.text or piece.logprobs or self._request.lookahead.steps):
            return []
        chunk = self._chunk(self.delta(answer, piece))
        if piece is not None and self._request.lookahead.steps:
            chunk["lookahead"] = self._step(piece)
        options = self._request.stream_options
        if options is not None and options.continuous_usage_stats:
            chunk["usage"] = self._counts(self._streamed)
        return [chunk]

    def _step(self, piece: Piece) -> dict[str, Any]:
        fields: dict[str, Any] = {"tokens": len(piece.tokens), "nodes": piece.nodes}
        if piece.tree is not None:
            fields["tree"] = piece.tree | {"tokens": [self._served.text_of(token) for token in piece.tree["tokens"]]}
        return fields

    def failure(self, error: ApiError) -> dict[str, Any]:
        """The chunk that tells of an error."""
        return error.body()

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """Chunks that come after all others."""
        options = self._request.stream_options
        chunk = self.usage(generation)
        if options is None or not options.include_usage:
            chunk = {name: value for name, value in chunk.items() if name == "lookahead"}
        if not chunk:
            return []
        return [self._chunk() | chunk]

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": list(choices)}

    def usage(self, generation: Generation) -> dict[str, Any]:
        """Counts of the whole request."""
        counts = [answer.statistics for answer in generation.answers]
        completion = sum(count.tokens for count in counts)
        # each prompt counts once, however many answers it gets
        cached = sum(one.reused_tokens for one in counts[:: self._request.n])
        usage: dict[str, Any] = {
            "usage": self._counts(completion) | {"prompt_tokens_details": {"cached_tokens": cached}}
        }
        steps = [step for count in counts for step in zip(count.nodes_per_step, count.accepted_lengths, strict=True)]
        if drafts := [(nodes - 1, tokens - 1) for nodes, tokens in steps if nodes > 1]:
            usage["metrics"] = {"speculative_decoding": _speculation(drafts)}
        if any(plan.arguments["prediction"] is not None for plan in self._plans):
            accepted, rejected = (
                sum(counts) for counts in zip(*(answer.predicted for answer in generation.answers), strict=True)
            )
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            usage["usage"]["completion_tokens_details"] = details
        if self._request.lookahead.statistics:
            usage["lookahead"] = {
                "steps": len(steps),
                "nodes": sum(nodes for nodes, _ in steps),
                "tokens_per_step": completion / len(steps) if steps else 0.0,
            }
        return usage

    def choice(self, answer: Answer, text: str, entries: Sequence[TokenEvent]) -> dict[str, Any]:
        """One answer, complete: its text, and what there is to say of its tokens."""
        raise NotImplementedError

    def delta(self, answer: Answer, piece: Piece | None) -> dict[str, Any]:
        """What a chunk says of one answer."""
        raise NotImplementedError

    def _counts(self, completion: int) -> dict[str, Any]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _speculation(drafts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """What was drafted for a request, and accepted, in vLLM's form.

    Args:
        drafts: How many tokens each draft had, and how many of them were accepted.
    """
    sent, accepted = (sum(counts) for counts in zip(*drafts, strict=True))
    histogram = Counter(tokens for _, tokens in drafts)
    return {
        "mean_acceptance_length": 1 + accepted / len(drafts),
        "draft_acceptance_rate": accepted / sent,
        "acceptance_histogram": [histogram[tokens] for tokens in range(max(histogram) + 1)],
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": sent,
    }


class CompletionForm(Form):
    """Of `/v1/completions`."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"
    _request: CompletionRequest

    def __init__(self, served: ServedModel, request: CompletionRequest, plans: Sequence[Plan]) -> None:
        super().__init__(served, request, plans)
        self._offsets: dict[int, int] = {}

    def choice(self, answer: Answer, text: str, entries: Sequence[TokenEvent]) -> dict[str, Any]:
        """See `Form`."""
        return self._choice(answer.index, self._echo(answer) + text, entries, answer.handle.finish_reason)

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """See `Form`: the prompts, if they are to be told."""
        answers = generation.answers if self._request.echo else []
        return [self._chunk(self._choice(answer.index, self._echo(answer), [], None)) for answer in answers]

    def _echo(self, answer: Answer) -> str:
        """What stands before the answer."""
        if not self._request.echo:
            return ""
        prompt = self._request.prompts[answer.index // self._request.n]
        return prompt if isinstance(prompt, str) else str(self._served.tokenizer.decode(prompt))

    def delta(self, answer: Answer, piece: Piece | None) -> dict[str, Any]:
        """See `Form`."""
        if piece is None:
            return self._choice(answer.index, "", [], answer.handle.finish_reason)
        return self._choice(answer.index, piece.text, piece.logprobs, None)

    def _choice(
        self, index: int, text: str, entries: Sequence[TokenEvent], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(index, entries) if entries else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, index: int, entries: Sequence[TokenEvent]) -> dict[str, Any]:
        texts = [self._served.text_of(entry.token) for entry in entries]
        offsets = []
        for text in texts:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                {self._served.text_of(token): logprob for token, logprob in reversed(entry.top)} for entry in entries
            ],
            "text_offset": offsets,
        }


def answer_reader(served: ServedModel, request: ChatRequest, prompt: Sequence[int]) -> AnswerReader:
    """What tells reasoning and calls from text in an answer."""
    format_ = served.tool_format if callable_tools(request) else None
    return AnswerReader(served.thinking(prompt), format_, served.reasoning)


class ChatForm(Form):
    """Of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _request: ChatRequest

    def __init__(self, served: ServedModel, request: ChatRequest, plans: Sequence[Plan]) -> None:
        super().__init__(served, request, plans)
        self._readers = [answer_reader(served, request, plans[0].prompt) for _ in range(request.n)]

    def choice(self, answer: Answer, text: str, entries: Sequence[TokenEvent]) -> dict[str, Any]:
        """See `Form`."""
        begin = self._readers[answer.index].add(text)
        rest, calls = self._readers[answer.index].finish()
        content, reasoning = begin.content + rest.content, begin.reasoning + rest.reasoning
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        reason = "tool_calls" if calls else answer.handle.finish_reason
        return {"index": answer.index, "message": message, "logprobs": self._logprobs(entries), "finish_reason": reason}

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """See `Form`."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        begun = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": answer.index, **begun}) for answer in generation.answers]

    def delta(self, answer: Answer, piece: Piece | None) -> dict[str, Any]:
        """See `Form`."""
        if piece is None:
            return self._last(answer)
        part = self._readers[answer.index].add(piece.text)
        delta = {"reasoning_content": part.reasoning} if part.reasoning else {}
        return {
            "index": answer.index,
            "delta": delta | {"content": part.content},
            "logprobs": self._logprobs(piece.logprobs),
            "finish_reason": None,
        }

    def _last(self, answer: Answer) -> dict[str, Any]:
        """How an answer ends: with its calls, which come whole."""
        rest, calls = self._readers[answer.index].finish()
        pieces = {"reasoning_content": rest.reasoning, "content": rest.content}
        delta: dict[str, Any] = {name: text for name, text in pieces.items() if text}
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        reason = "tool_calls" if calls else answer.handle.finish_reason
        return {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, entries: Sequence[TokenEvent]) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None

        def token_logprob(token: int, logprob: float | None) -> dict[str, Any]:
            served = self._served
            return {"token": served.text_of(token), "logprob": logprob, "bytes": list(served.bytes_of(token))}

        rivals = self._request.top_logprobs or 0
        content = [
            {
                **token_logprob(entry.token, entry.logprob),
                "top_logprobs": [token_logprob(token, logprob) for token, logprob in entry.top[:rivals]],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}
