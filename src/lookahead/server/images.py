"""Images of requests: where they may come from, and how large they may be."""

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

MOST_IMAGES = 16
"""Images of a request, at most."""

MOST_PIXELS = 2**25
"""Of an image: a small file may unfold to gigabytes."""

MOST_PIXELS_AT_ONCE = 2**26
"""Of all images of a request. The images of one request at a time are decoded."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Decoders of other formats are seldom tried, and one calls a program."""

_LONGEST_ADDRESS = 2048
"""Characters, of an address that is no data URL."""

_SECONDS = 10.0
"""In which hosts have to send the images of a request."""


def read_images(urls: Sequence[str], settings: ServerSettings) -> list[bytes]:
    """The files of the images of a request. Their heads are checked; they are not decoded yet.

    Raises:
        ApiError: There are too many, they are too large, or one cannot be had or read.
    """
    if len(urls) > MOST_IMAGES:
        raise refused("messages", f"messages has {len(urls)} images; the most is {MOST_IMAGES}")
    files, all_pixels, deadline = [], 0, time.monotonic() + _SECONDS
    for url in urls:
        files.append(fetched(url, settings, deadline))
        image = _opened(files[-1])
        pixels = image.width * image.height
        all_pixels += pixels
        if pixels > MOST_PIXELS:
            raise refused("messages", f"messages: an image has more than {MOST_PIXELS} pixels")
        if all_pixels > MOST_PIXELS_AT_ONCE:
            raise refused("messages", f"messages: the images have more than {MOST_PIXELS_AT_ONCE} pixels in all")
    return files


def decoded(files: Sequence[bytes]) -> list[Image.Image]:
    """Images of `read_images` in RGB.

    Raises:
        ApiError: One cannot be read.
    """
    try:
        return [_opened(file).convert("RGB") for file in files]
    except Exception as error:  # decoders raise what they like
        raise _no_image() from error


def _opened(file: bytes) -> Image.Image:
    try:
        return Image.open(BytesIO(file), formats=_FORMATS)
    except Exception as error:  # likewise
        raise _no_image() from error


def _no_image() -> ApiError:
    return refused(
        "messages", f"messages: image_url holds no image in {', '.join(_FORMATS)}; send it as data:image/...;base64,..."
    )


def fetched(url: str, settings: ServerSettings, deadline: float) -> bytes:
    """What a data URL holds, or a host has under an address, if it is one of those that are allowed.

    Raises:
        ApiError: The host is not allowed, has no such thing, or does not send it until `deadline`.
    """
    said = f"messages: image_url {url[:100]!r}"
    try:
        if url.startswith("data:"):
            head, _, data = url.partition(",")
            raw = unquote_to_bytes(data)
            return b64decode(raw) if head.endswith(";base64") else raw
        if len(url) > _LONGEST_ADDRESS:
            raise refused("messages", f"{said} has {len(url)} characters; the most is {_LONGEST_ADDRESS}")
        parts = urlsplit(url)  # which is checked, and used: no other reading of the address counts
        if parts.scheme not in ("http", "https") or parts.netloc not in (settings.image_host or ()):
            raise refused(
                "messages",
                f"{said} is of no host that this server may ask (--image-host); send the image as "
                "data:image/...;base64,...",
            )
        data_read = _asked_for(parts, said, settings.max_image_bytes, deadline)
    except (OSError, ValueError, HTTPException) as error:
        raise refused("messages", f"{said} cannot be read: {error}") from error
    if len(data_read) > settings.max_image_bytes or time.monotonic() > deadline:
        most = settings.max_image_bytes
        raise refused("messages", f"{said} has more than {most} bytes, or takes longer than {_SECONDS:g} s")
    return data_read


def _asked_for(parts: SplitResult, said: str, most: int, deadline: float) -> bytes:
    """What a host answers, or its beginning if that is more than `most` bytes or `deadline` has come. Redirections are
    not followed: another address might be of a host that is not allowed."""
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    left = max(deadline - time.monotonic(), 0.1)
    connection, data = connect(parts.netloc, timeout=left), b""
    connection.connect()
    watch = Timer(left, connection.sock.shutdown, (SHUT_RDWR,))  # a timeout is that of each packet
    watch.start()
    try:
        connection.request("GET", f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise refused("messages", f"{said} was answered with status {answer.status}")
        while len(data) <= most and (part := answer.read1(2**16)):
            data += part
    finally:
        watch.cancel()
        connection.close()
    return data
