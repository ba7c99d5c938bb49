"""Answers in the form of OpenAI's API: whole, and in chunks."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lookahead.server.errors import ApiError
from lookahead.server.generation import Answer, Generation
from lookahead.server.grammar import callable_tools, may_call_again
from lookahead.server.outbox import Piece
from lookahead.server.requests import ChatRequest, CompletionRequest
from lookahead.server.tools import AnswerReader
from lookahead.serving.handle import TokenEvent
from lookahead.trace import TracedStep
from lookahead.version import __version__


class AnswerForm(ABC):
    """Response format of one endpoint: JSON of whole answers, and of the chunks of a stream."""

    prefix: str
    object: str
    chunk_object: str
    last_event = b"data: [DONE]\n\n"

    def __init__(self, generation: Generation) -> None:
        self.generation, self.request, self._served = generation, generation.request, generation.served
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self._served.name,
            "system_fingerprint": f"lookahead-{__version__}",
        }
        self._streamed = 0

    def whole(self, wholes: Sequence[Piece]) -> dict[str, Any]:
        """Return the body of a response without streaming; `wholes` has one complete piece for each answer."""
        choices = [self.choice(answer, whole) for answer, whole in zip(self.generation.answers, wholes, strict=True)]
        return {**self._head, "object": self.object, "choices": choices, **self.usage()}

    def opening(self) -> list[dict[str, Any]]:
        """Return the first chunks of a stream."""
        return []

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """Return the chunks for a piece, or for the end of an answer if `piece` is `None`."""
        self._streamed += 0 if piece is None else len(piece.tokens)
        if piece is not None and not (piece.text or piece.logprobs or self.request.lookahead.steps):
            return []
        chunk = self._chunk(self.delta(answer, piece))
        if piece is not None and piece.trace is not None:
            chunk["lookahead"] = {"tokens": len(piece.tokens), "nodes": piece.nodes, "tree": self._tree(piece.trace)}
        if self.request.stream_options.continuous_usage_stats:
            chunk["usage"] = self._counts(self._streamed)
        return [chunk]

    def _tree(self, step: TracedStep) -> dict[str, list[Any]]:
        """Describe the tree of a step and its accepted path. The root is node 0, with parent -1."""
        likely = [origin.probability for origin in step.origins]
        return {
            "tokens": [self._served.text_of(token) for token in step.tokens],
            "parents": step.parents,
            "path": step.path,
            "sources": [origin.evidence[0] for origin in step.origins],
            "probabilities": [None if probability is None else round(probability, 4) for probability in likely],
        }

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the chunk for an error."""
        return error.body()

    def closing(self) -> list[dict[str, Any]]:
        """Return the last chunks of a stream."""
        chunk = self.usage()
        if not self.request.stream_options.include_usage:
            chunk = {name: value for name, value in chunk.items() if name == "lookahead"}
        return [self._chunk() | chunk] if chunk else []

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": list(choices)}

    def usage(self) -> dict[str, Any]:
        """Return the token counts of the whole request, and statistics of its drafts."""
        answers = self.generation.answers
        counts = [answer.handle.statistics for answer in answers]
        completion = sum(count.tokens for count in counts)
        # each prompt counts once, however many answers it gets
        cached = sum(one.reused_tokens for one in counts[:: self.request.n])
        usage: dict[str, Any] = {
            "usage": self._counts(completion) | {"prompt_tokens_details": {"cached_tokens": cached}}
        }
        steps = [step for count in counts for step in zip(count.nodes_per_step, count.accepted_lengths, strict=True)]
        if drafts := [(nodes - 1, tokens - 1) for nodes, tokens in steps if nodes > 1]:
            usage["metrics"] = {"speculative_decoding": _speculation(drafts)}
        if any(plan.arguments["prediction"] is not None for plan in self.generation.plans):
            accepted, rejected = (sum(tokens) for tokens in zip(*(one.predicted for one in answers), strict=True))
            details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
            usage["usage"]["completion_tokens_details"] = details
        if self.request.lookahead.statistics:
            usage["lookahead"] = {
                "steps": len(steps),
                "nodes": sum(nodes for nodes, _ in steps),
                "tokens_per_step": completion / len(steps) if steps else 0.0,
            }
        return usage

    @abstractmethod
    def choice(self, answer: Answer, whole: Piece) -> dict[str, Any]:
        """Return one complete answer."""

    @abstractmethod
    def delta(self, answer: Answer, piece: Piece | None) -> dict[str, Any]:
        """Return the part of a chunk for one answer."""

    def _counts(self, completion: int) -> dict[str, Any]:
        prompt = sum(len(plan.prompt) for plan in self.generation.plans)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _speculation(drafts: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """Return draft statistics in vLLM's format; `drafts` has the drafted and the accepted tokens of each step."""
    drafted, accepted = (sum(counts) for counts in zip(*drafts, strict=True))
    histogram = Counter(tokens for _, tokens in drafts)
    return {
        "mean_acceptance_length": 1 + accepted / len(drafts),
        "draft_acceptance_rate": accepted / drafted,
        "acceptance_histogram": [histogram[tokens] for tokens in range(max(histogram) + 1)],
        "num_spec_steps": len(drafts),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
    }


class CompletionForm(AnswerForm):
    """Response format of `/v1/completions`."""

    prefix = "cmpl"
    object = chunk_object = "text_completion"
    request: CompletionRequest

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        self._offsets: dict[int, int] = {}

    def choice(self, answer: Answer, whole: Piece) -> dict[str, Any]:
        """Return one complete answer, after the prompt if `echo` is set."""
        echo = self._echo(answer)
        whole = Piece(text=echo.text + whole.text, logprobs=echo.logprobs + whole.logprobs)
        return self.delta(answer, whole) | {"finish_reason": answer.handle.finish_reason}

    def opening(self) -> list[dict[str, Any]]:
        """Return the prompts as chunks, if `echo` is set."""
        answers = self.generation.answers if self.request.echo else []
        return [self._chunk(self.delta(answer, self._echo(answer))) for answer in answers]

    def _echo(self, answer: Answer) -> Piece:
        """Return the text of the prompt and its log-probabilities, if `echo` is set."""
        if not self.request.echo:
            return Piece()
        place = answer.index // self.request.n
        prompt, scores = self.request.prompts[place], self.generation.prompt_scores
        text = prompt if isinstance(prompt, str) else str(self._served.tokenizer.decode(prompt))
        return Piece(text=text, logprobs=scores[place] if scores else [])

    def delta(self, answer: Answer, piece: Piece | None) -> dict[str, Any]:
        """Return text and log-probabilities of a piece, or the finish reason."""
        if piece is None:
            return {"index": answer.index, "text": "", "logprobs": None, "finish_reason": answer.handle.finish_reason}
        logprobs = self._logprobs(answer.index, piece.logprobs) if piece.logprobs else None
        return {"index": answer.index, "text": piece.text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, index: int, entries: Sequence[TokenEvent]) -> dict[str, Any]:
        texts = [self._served.text_of(entry.token) for entry in entries]
        offsets = list(accumulate(map(len, texts), initial=self._offsets.get(index, 0)))
        self._offsets[index] = offsets.pop()
        return {
            "tokens": texts,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": [
                None
                if entry.logprob is None
                else {self._served.text_of(token): logprob for token, logprob in reversed(entry.top)}
                for entry in entries
            ],
            "text_offset": offsets,
        }


class ChatForm(AnswerForm):
    """Response format of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, generation: Generation) -> None:
        super().__init__(generation)
        served, prompt = self._served, generation.plans[0].prompt
        format_ = served.tool_format if callable_tools(self.request) else None
        self._readers = [AnswerReader(served.thinking(prompt), format_, served.reasoning) for _ in generation.answers]

    def choice(self, answer: Answer, whole: Piece) -> dict[str, Any]:
        """Return one complete answer as a message with reasoning and calls."""
        begin = self._readers[answer.index].add(whole.text)
        rest, calls = self._readers[answer.index].finish()
        content, reasoning = begin.content + rest.content, begin.reasoning + rest.reasoning
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        message |= {"tool_calls": calls} if calls else {}
        logprobs, reason = self._logprobs(whole.logprobs), self._finish_reason(answer, calls)
        return {"index": answer.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> list[dict[str, Any]]:
        """Return a chunk with the role for each answer."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        fields = {"delta": delta, "logprobs": None, "finish_reason": None}
        return [self._chunk({"index": answer.index, **fields}) for answer in self.generation.answers]

    def delta(self, answer: Answer, piece: Piece | None) -> dict[str, Any]:
        """Return reasoning and content of a piece; at the end of an answer its calls and finish reason."""
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
        rest, calls = self._readers[answer.index].finish()
        pieces = {"reasoning_content": rest.reasoning, "content": rest.content}
        delta: dict[str, Any] = {name: text for name, text in pieces.items() if text}
        if calls:
            delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(calls)]
        reason = self._finish_reason(answer, calls)
        return {"index": answer.index, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _finish_reason(self, answer: Answer, calls: Sequence[Any]) -> str | None:
        """Return `"tool_calls"` if there are calls, unless the length limit may have cut off further ones."""
        reason = answer.handle.finish_reason
        if not calls or (reason == "length" and may_call_again(self.request, self._served.tool_format)):
            return reason
        return "tool_calls"

    def _logprobs(self, entries: Sequence[TokenEvent]) -> dict[str, Any] | None:
        if not self.request.logprobs:
            return None

        def token_logprob(token: int, logprob: float | None) -> dict[str, Any]:
            served = self._served
            return {"token": served.text_of(token), "logprob": logprob, "bytes": list(served.bytes_of(token))}

        rivals = self.request.top_logprobs or 0
        content = [
            {
                **token_logprob(entry.token, entry.logprob),
                "top_logprobs": [token_logprob(token, logprob) for token, logprob in entry.top[:rivals]],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}
