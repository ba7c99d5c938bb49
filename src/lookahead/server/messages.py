"""Messages and tools of a chat request."""

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
    """The address of an image."""

    url: str


class ImagePart(Fields, place=PART):
    """An image."""

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl | str


class RefusalPart(Fields, place=PART):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """Text of the refusal."""
        return self.refusal


ContentPart = Annotated[TextPart | RefusalPart | ImagePart, Field(discriminator="type")]


class FunctionCall(Fields):
    """Name and arguments of a call in an earlier answer."""

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
        """Text of all parts."""
        return joined(self.content)

    @property
    def images(self) -> list[str]:
        """Addresses of the images."""
        parts = () if isinstance(self.content, str) else self.content
        addresses = [part.image_url for part in parts if isinstance(part, ImagePart)]
        return [address if isinstance(address, str) else address.url for address in addresses]


def joined(content: str | Sequence[TextPart | RefusalPart | ImagePart]) -> str:
    """Join the text of all parts of a content."""
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
    """A tool; functions are the only type."""

    type: Literal["function"]
    function: Function


class FunctionName(Fields):
    """A function, by name."""

    name: str = Field(max_length=128)


class NamedTool(Fields):
    """The tool that must be called."""

    type: Literal["function"]
    function: FunctionName


class AllowedTools(Fields):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class SomeTools(Fields):
    """The tools that may be called, or must be."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools
