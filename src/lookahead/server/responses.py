"""Answers of `/v1/responses`: items of reasoning, text and calls, and named events about them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from lookahead.server.answers import ChatForm
from lookahead.server.errors import ApiError
from lookahead.server.generation import Answer, Generation
from lookahead.server.outbox import Piece
from lookahead.server.responses_request import HostedTool, ResponsesRequest
from lookahead.server.tools import Part

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_ITEM_FIELDS: dict[str, dict[str, Any]] = {"message": {"role": "assistant"}, "reasoning": {"summary": []}}
_PART_FIELDS: dict[str, dict[str, Any]] = {"message": {"annotations": [], "logprobs": []}, "reasoning": {}}
_EVENT_FIELDS: dict[str, dict[str, Any]] = {"message": {"logprobs": []}, "reasoning": {}}
"""What text of an answer has besides, and reasoning: its item, the part in it, and events about that."""


class ResponsesForm(ChatForm):
    """Of `/v1/responses`. A stream consists of named events, which are numbered."""

    prefix, object, chunk_object, last_event = "resp", "response", "", b""

    def __init__(self, asked: ResponsesRequest, generation: Generation) -> None:
        super().__init__(generation)
        self._asked, self._functions = asked, asked.functions
        self._reader = self._readers[0]
        self._items: list[dict[str, Any]] = []
        self._numbered = 0
        self._is_cut = False

    def whole(self, wholes: Sequence[Piece]) -> dict[str, Any]:
        """See `Form`."""
        self._add(self._reader.add(wholes[0].text))
        self._finish(self.generation.answers[0])
        return self._complete()

    def opening(self) -> list[dict[str, Any]]:
        """See `Form`."""
        begun = self._begun()
        return [self._event("response.created", response=begun), self._event("response.in_progress", response=begun)]

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """See `Form`."""
        return self._finish(answer) if piece is None else self._add(self._reader.add(piece.text))

    def closing(self) -> list[dict[str, Any]]:
        """See `Form`."""
        response = self._complete()
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """See `Form`."""
        return self._event("error", message=error.detail, code=error.code, param=error.param)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._numbered += 1
        return {"type": kind, "sequence_number": self._numbered - 1, **fields}

    def _add(self, part: Part) -> list[dict[str, Any]]:
        """The events of a piece: an item is begun when there is something to put into it."""
        events = []
        for kind, text in (("reasoning", part.reasoning), ("message", part.content)):
            if text:
                if not self._items or self._items[-1]["type"] != kind:
                    events += [*self._close("completed"), *self._open(kind)]
                self._items[-1]["content"][0]["text"] += text
                fields = self._place | {"delta": text} | _EVENT_FIELDS[kind]
                events.append(self._event(f"response.{_PARTS[kind]}.delta", **fields))
        return events

    def _open(self, kind: str) -> list[dict[str, Any]]:
        """Begin an item of text."""
        item: dict[str, Any] = {"type": kind, "id": _identifier(kind), "status": "in_progress", "content": []}
        item |= _ITEM_FIELDS[kind]
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))
        part: dict[str, Any] = {"type": _PARTS[kind], "text": "", **_PART_FIELDS[kind]}
        item["content"] = [part]
        return [added, self._event("response.content_part.added", **self._place, part=dict(part))]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the item of text that is open, if one is."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return []
        item = self._items[-1]
        item["status"] = status
        part: dict[str, Any] = item["content"][0]
        fields = self._place | {"text": part["text"]} | _EVENT_FIELDS[item["type"]]
        return [
            self._event(f"response.{part['type']}.done", **fields),
            self._event("response.content_part.done", **self._place, part=part),
            self._event("response.output_item.done", output_index=len(self._items) - 1, item=item),
        ]

    def _finish(self, answer: Answer) -> list[dict[str, Any]]:
        """The events of the end: what was left, and the calls."""
        rest, calls = self._reader.finish()
        events = self._add(rest)
        if not calls and not self._items:
            events += self._open("message")
        self._is_cut = self._why_ended(answer, calls) == "length"
        events += self._close("incomplete" if self._is_cut and not calls else "completed")
        for call in calls:
            events += self._call(call)
        return events

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a call, which comes whole."""
        tool, namespace = self._functions[call["function"]["name"]]
        item = {"type": "function_call", "id": _identifier("function_call"), "call_id": call["id"]}
        item |= call["function"] | {"name": tool.name, "status": "completed"}
        item |= {} if namespace is None else {"namespace": namespace}
        self._items.append(item)
        index = len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index}
        begun = item | {"arguments": "", "status": "in_progress"}
        done = {"name": item["name"], "arguments": item["arguments"]}
        return [
            self._event("response.output_item.added", output_index=index, item=begun),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **done),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        """Of the text that is open."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _begun(self) -> dict[str, Any]:
        """The response as it begins."""
        request, asked = self.request, self._asked
        choice = asked.tool_choice or "auto"
        return {
            "id": self._head["id"],
            "object": self.object,
            "created_at": self._head["created"],
            "status": "in_progress",
            "model": self._head["model"],
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": request.max_tokens,
            "metadata": asked.metadata,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": asked.text.model_dump(by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in asked.tools if not isinstance(tool, HostedTool)],
            "top_p": request.top_p,
            "truncation": asked.truncation,
            "usage": None,
        }

    def _complete(self) -> dict[str, Any]:
        cut = self._is_cut
        counts = self.usage()
        usage = counts.pop("usage")
        return {
            **self._begun(),
            **counts,
            "status": "incomplete" if cut else "completed",
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }


def _identifier(kind: str) -> str:
    return f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"
