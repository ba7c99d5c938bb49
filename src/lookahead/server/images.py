"""Images in a conversation: from data URLs, and from hosts that whoever starts the server allows."""

from __future__ import annotations

import base64
import time
from io import BytesIO
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, build_opener

from PIL import Image

from lookahead.server.errors import ApiError, refused
from lookahead.server.guard import Limits

MOST_IMAGES = 16
"""Images of a request, at most."""

_MOST_PIXELS = 2**25
"""Of an image: a small file may unfold to gigabytes."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Decoders of other formats are seldom tried, and one calls a program."""

_SECONDS = 10.0
"""In which a host has to send an image."""


def read_images(urls: list[str], limits: Limits) -> list[Image.Image]:
    """The images of a request, in RGB.

    Raises:
        ApiError: There are too many, or one cannot be had or read.
    """
    if len(urls) > MOST_IMAGES:
        raise refused("messages", f"messages has {len(urls)} images; the most is {MOST_IMAGES}")
    return [_decoded(_of_data(url) if url.startswith("data:") else _fetched(url, limits)) for url in urls]


def _decoded(data: bytes) -> Image.Image:
    try:
        image = Image.open(BytesIO(data), formats=_FORMATS)
        if image.width * image.height <= _MOST_PIXELS:
            return image.convert("RGB")
    except Exception as error:  # decoders raise what they like
        raise refused("messages", f"messages: image_url holds no image in {', '.join(_FORMATS)}") from error
    raise refused("messages", f"messages: an image has more than {_MOST_PIXELS} pixels")


def _of_data(url: str) -> bytes:
    head, _, text = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("another encoding")
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise refused("messages", "messages: image_url must be data:image/...;base64,...") from error


class _NoRedirects(HTTPRedirectHandler):
    """Another address might be of a host that is not allowed."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _fetched(url: str, limits: Limits) -> bytes:
    """What a host has under an address, if it is one of those that are allowed."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or parts.netloc not in limits.image_hosts:
        raise refused(
            "messages",
            f"messages: image_url {url[:100]!r} is of no host that this server may ask (--image-host); send the image "
            "as data:image/...;base64,...",
        )
    data, deadline = b"", time.monotonic() + _SECONDS
    try:
        with build_opener(_NoRedirects).open(url, timeout=_SECONDS) as answer:
            while part := answer.read1(2**16):
                data += part
                if len(data) > limits.image_bytes or time.monotonic() > deadline:
                    raise ApiError(
                        400, f"{url[:100]!r} has more than {limits.image_bytes} bytes, or takes too long", "messages"
                    )
    except HTTPError as error:
        raise ApiError(400, f"{url[:100]!r} was answered with status {error.code}", "messages") from error
    except (OSError, ValueError) as error:
        raise ApiError(400, f"{url[:100]!r} cannot be read: {error}", "messages") from error
    return data
