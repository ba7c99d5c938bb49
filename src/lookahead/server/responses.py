"""Response format of `/v1/responses`: items of reasoning, text and calls, and their events."""

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
"""Further fields of the items, parts and events of text and of reasoning."""


class ResponsesForm(ChatForm):
    """Response format of `/v1/responses`. A stream consists of named, numbered events."""

    prefix, object, chunk_object, last_event = "resp", "response", "", b""

    def __init__(self, source: ResponsesRequest, generation: Generation) -> None:
        super().__init__(generation)
        self._source = source
        self._functions = source.functions
        self._reader = self._readers[0]
        self._items: list[dict[str, Any]] = []
        self._events = 0
        self._is_cut = False

    def whole(self, wholes: Sequence[Piece]) -> dict[str, Any]:
        """Return the response without streaming."""
        self._add(self._reader.add(wholes[0].text))
        self._finish(self.generation.answers[0])
        return self._complete()

    def opening(self) -> list[dict[str, Any]]:
        """Return the events that begin the response."""
        response = self._skeleton()
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """Return the events of a piece, or of the end of the answer."""
        return self._finish(answer) if piece is None else self._add(self._reader.add(piece.text))

    def closing(self) -> list[dict[str, Any]]:
        """Return the event with the complete response."""
        response = self._complete()
        return [self._event(f"response.{response['status']}", response=response)]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """Return the event of an error."""
        return self._event("error", message=error.detail, code=error.code, param=error.param)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1, **fields}

    def _add(self, part: Part) -> list[dict[str, Any]]:
        """Return the events of a piece. The first text of a kind begins an item."""
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
        """Begin an item of text or reasoning."""
        item: dict[str, Any] = {"type": kind, "id": _identifier(kind), "status": "in_progress", "content": []}
        item |= _ITEM_FIELDS[kind]
        self._items.append(item)
        added = self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))
        part: dict[str, Any] = {"type": _PARTS[kind], "text": "", **_PART_FIELDS[kind]}
        item["content"] = [part]
        return [added, self._event("response.content_part.added", **self._place, part=dict(part))]

    def _close(self, status: str) -> list[dict[str, Any]]:
        """End the open item, if there is one."""
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
        """Return the last events of an answer: remaining text, then each call."""
        rest, calls = self._reader.finish()
        events = self._add(rest)
        if not calls and not self._items:
            events += self._open("message")
        self._is_cut = self._finish_reason(answer, calls) == "length"
        events += self._close("incomplete" if self._is_cut and not calls else "completed")
        for call in calls:
            events += self._call(call)
        return events

    def _call(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of a call."""
        tool, namespace = self._functions[call["function"]["name"]]
        item = {"type": "function_call", "id": _identifier("function_call"), "call_id": call["id"]}
        item |= call["function"] | {"name": tool.name, "status": "completed"}
        item |= {} if namespace is None else {"namespace": namespace}
        self._items.append(item)
        index = len(self._items) - 1
        place = {"item_id": item["id"], "output_index": index}
        empty = item | {"arguments": "", "status": "in_progress"}
        function = {"name": item["name"], "arguments": item["arguments"]}
        return [
            self._event("response.output_item.added", output_index=index, item=empty),
            self._event("response.function_call_arguments.delta", **place, delta=item["arguments"]),
            self._event("response.function_call_arguments.done", **place, **function),
            self._event("response.output_item.done", output_index=index, item=item),
        ]

    @property
    def _place(self) -> dict[str, Any]:
        """Indices of the open item."""
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, "content_index": 0}

    def _skeleton(self) -> dict[str, Any]:
        """Return the response without output."""
        request, source = self.request, self._source
        choice = source.tool_choice or "auto"
        return {
            "id": self._head["id"],
            "object": self.object,
            "created_at": self._head["created"],
            "status": "in_progress",
            "model": self._head["model"],
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": source.instructions,
            "max_output_tokens": request.max_tokens,
            "metadata": source.metadata,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": source.text.model_dump(by_alias=True),
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in source.tools if not isinstance(tool, HostedTool)],
            "top_p": request.top_p,
            "truncation": source.truncation,
            "usage": None,
        }

    def _complete(self) -> dict[str, Any]:
        cut = self._is_cut
        counts = self.usage()
        usage = counts.pop("usage")
        return {
            **self._skeleton(),
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
