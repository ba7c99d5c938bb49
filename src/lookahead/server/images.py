"""Images of requests: their sources, limits and decoding."""

from __future__ import annotations

import time
from base64 import b64decode
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from io import BytesIO
from socket import SHUT_RDWR
from threading import Timer
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from PIL import Image

from lookahead.server.errors import ApiError, refused
from lookahead.server.guard import ServerSettings

MAX_IMAGES = 16
"""Images of a request."""

MAX_PIXELS = 2**25
"""Pixels of an image: a small file may decode to gigabytes."""

MAX_PIXELS_AT_ONCE = 2**26
"""Pixels of all images of a request. One request is decoded at a time."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Safe formats: decoders of others are tested less, and one runs a program."""

_MAX_ADDRESS = 2048
"""Characters of an address, data URLs excepted."""

_SECONDS = 10.0
"""Seconds to fetch the images of a request."""


def read_images(urls: Sequence[str], settings: ServerSettings) -> list[bytes]:
    """Fetch the image files of a request, and check their headers without decoding them.

    Raises:
        ApiError: There are too many images, or one is too large, unavailable or invalid.
    """
    if len(urls) > MAX_IMAGES:
        raise refused("messages", f"messages has {len(urls)} images; send at most {MAX_IMAGES}")
    files = []
    total = 0
    deadline = time.monotonic() + _SECONDS
    for url in urls:
        files.append(fetch_image(url, settings, deadline))
        image = _open(files[-1])
        pixels = image.width * image.height
        total += pixels
        if pixels > MAX_PIXELS:
            raise refused("messages", f"messages: an image has more than {MAX_PIXELS} pixels; send a smaller one")
        if total > MAX_PIXELS_AT_ONCE:
            raise refused("messages", f"messages: the images have more than {MAX_PIXELS_AT_ONCE} pixels in all")
    return files


def decode_images(files: Sequence[bytes]) -> list[Image.Image]:
    """Decode image files to RGB.

    Raises:
        ApiError: A file cannot be decoded.
    """
    try:
        return [_open(file).convert("RGB") for file in files]
    except Exception as error:  # decoders raise errors of any type
        raise _invalid_image() from error


def _open(file: bytes) -> Image.Image:
    try:
        return Image.open(BytesIO(file), formats=_FORMATS)
    except Exception as error:  # decoders raise errors of any type
        raise _invalid_image() from error


def _invalid_image() -> ApiError:
    formats = ", ".join(_FORMATS)
    return refused("messages", f"messages: image_url has no image in {formats}; send it as data:image/...;base64,...")


def fetch_image(url: str, settings: ServerSettings, deadline: float) -> bytes:
    """Decode a data URL, or download an image from an allowed host.

    Raises:
        ApiError: The host is not allowed, or does not send the image until `deadline`.
    """
    subject = f"messages: image_url {url[:100]!r}"
    try:
        if url.startswith("data:"):
            head, _, payload = url.partition(",")
            raw = unquote_to_bytes(payload)
            return b64decode(raw) if head.endswith(";base64") else raw
        if len(url) > _MAX_ADDRESS:
            raise refused("messages", f"{subject} has {len(url)} characters; send at most {_MAX_ADDRESS}")
        parts = urlsplit(url)  # the request uses the same parts that are checked here
        if parts.scheme not in ("http", "https") or parts.netloc not in (settings.image_host or ()):
            raise refused(
                "messages",
                f"{subject} has a host that this server does not allow (--image-host); send the image as "
                "data:image/...;base64,...",
            )
        data = _download(parts, subject, settings.max_image_bytes, deadline)
    except (OSError, ValueError, HTTPException) as error:
        raise refused("messages", f"{subject} cannot be read: {error}") from error
    if len(data) > settings.max_image_bytes or time.monotonic() > deadline:
        limit = settings.max_image_bytes
        raise refused("messages", f"{subject} has more than {limit} bytes, or takes longer than {_SECONDS:g} s")
    return data


def _download(parts: SplitResult, subject: str, limit: int, deadline: float) -> bytes:
    """Download until `limit` bytes are exceeded or `deadline` has passed.

    Redirections are not followed, because they could lead to a host that is not allowed.
    """
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    seconds = max(deadline - time.monotonic(), 0.1)
    connection = connect(parts.netloc, timeout=seconds)
    data = b""
    connection.connect()
    watch = Timer(seconds, connection.sock.shutdown, (SHUT_RDWR,))  # `timeout` restarts with each packet
    watch.start()
    try:
        connection.request("GET", f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise refused("messages", f"{subject}: its host answered with status {answer.status}")
        while len(data) <= limit and (part := answer.read1(2**16)):
            data += part
    finally:
        watch.cancel()
        connection.close()
    return data
