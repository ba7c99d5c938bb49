"""Messages of conversations, and tools that these may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from lookahead.server.fields import CALL, MESSAGE, PART, TOOL, Fields, Many


class TextPart(Fields, place=PART):
    """A piece of a message."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class ImageUrl(Fields, place=PART):
    """Where an image is."""

    url: str


class ImagePart(Fields, place=PART):
    """An image, as chats and `/v1/responses` have it."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str


class RefusalPart(Fields, place=PART):
    """A piece of an earlier answer, in which it refuses something."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """What it says."""
        return self.refusal


ContentPart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """What an earlier answer called."""

    name: str = Field(max_length=256)
    arguments: str


class ToolCall(Fields, place=CALL):
    """A call in an earlier answer."""

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Fields, place=MESSAGE):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[ContentPart] = ""
    reasoning_content: str | None = None
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(default=None, max_length=128)
    tool_call_id: str | None = Field(default=None, max_length=256)

    @property
    def text(self) -> str:
        """All of its text."""
        return joined(self.content)

    @property
    def images(self) -> list[str]:
        """Addresses of its images."""
        parts = () if isinstance(self.content, str) else self.content
        places = [part.image_url for part in parts if isinstance(part, ImagePart)]
        return [place if isinstance(place, str) else place.url for place in places]


def joined(content: str | Sequence[TextPart | RefusalPart | ImagePart]) -> str:
    """The text of a content that may come in parts."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if not isinstance(part, ImagePart))


class Function(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = Field(default=True, description="arguments always follow the schema")


class FunctionTool(Fields, place=TOOL):
    """A tool of the one type that there is."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """A function, by name."""

    name: str = Field(max_length=128)


class NamedTool(Fields):
    """The tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Fields):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class SomeTools(Fields):
    """The tools that may be called, or have to be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
