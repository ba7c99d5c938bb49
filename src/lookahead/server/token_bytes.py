"""The bytes of single tokens, which may be parts of a character."""

from __future__ import annotations

import re
from functools import cache

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def token_bytes(text: str, piece: str) -> bytes:
    """The bytes of a token.

    Args:
        text: The token, decoded by itself.
        piece: As the vocabulary has it.
    """
    if "\ufffd" not in text:
        return text.encode()
    if match := _BYTE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    known = _byte_level()
    if all(character in known for character in piece):
        return bytes(known[character] for character in piece)
    return text.encode()


@cache
def _byte_level() -> dict[str, int]:
    """Bytes by the characters that stand for them in byte-level vocabularies: printable Latin-1 characters stand for
    themselves, all others for the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
