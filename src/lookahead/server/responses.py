"""Answers in the form of `/v1/responses`: one message of text."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from lookahead.server.answers import Form
from lookahead.server.errors import ApiError
from lookahead.server.generation import Answer, Generation, Piece
from lookahead.server.plan import Plan
from lookahead.server.requests import ChatRequest
from lookahead.server.served_model import ServedModel


class ResponsesForm(Form):
    """Of `/v1/responses`. A stream consists of named events, which are numbered."""

    prefix, object, chunk_object, last_event = "resp", "response", "", b""
    _request: ChatRequest

    def __init__(self, served: ServedModel, request: ChatRequest, plans: Sequence[Plan]) -> None:
        super().__init__(served, request, plans)
        self._message = f"msg_{secrets.token_hex(12)}"
        self._text = ""
        self._numbered = 0

    def whole(self, generation: Generation, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """See `Form`."""
        self._text = "".join(piece.text for piece in pieces[0])
        return self._response(generation)

    def opening(self, generation: Generation) -> list[dict[str, Any]]:
        """See `Form`."""
        begun = self._response(None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place, part=self._part()),
        ]

    def chunks(self, answer: Answer, piece: Piece | None) -> list[dict[str, Any]]:
        """See `Form`."""
        if piece is None or not piece.text:
            return []
        self._text += piece.text
        return [self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])]

    def closing(self, generation: Generation) -> list[dict[str, Any]]:
        """See `Form`."""
        whole = self._response(generation)
        return [
            self._event("response.output_text.done", **self._place, text=self._text, logprobs=[]),
            self._event("response.content_part.done", **self._place, part=self._part()),
            self._event("response.output_item.done", output_index=0, item=whole["output"][0]),
            self._event(f"response.{whole['status']}", response=whole),
        ]

    def failure(self, error: ApiError) -> dict[str, Any]:
        """See `Form`."""
        return self._event("error", message=error.message, code=error.code, param=error.param)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message, "output_index": 0, "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._numbered += 1
        return {"type": kind, "sequence_number": self._numbered - 1, **fields}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": []}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message, "status": status, "role": "assistant", "content": content}

    def _response(self, generation: Generation | None) -> dict[str, Any]:
        """The response: as it begins, or complete."""
        request = self._request
        told: dict[str, Any] = {
            "id": self._head["id"],
            "object": self.object,
            "created_at": self._head["created"],
            "status": "in_progress",
            "model": self._head["model"],
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": request.max_tokens,
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text" if request.response_format is None else request.response_format.type}},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
            "usage": None,
        }
        if generation is None:
            return told
        cut = generation.answers[0].finish_reason == "length"
        status = "incomplete" if cut else "completed"
        counts = self.usage(generation)
        usage = counts.pop("usage")
        return {
            **told,
            **counts,
            "status": status,
            "completed_at": int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [self._item(status, [self._part()])],
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
