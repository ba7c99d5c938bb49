"""Random JSON schemas of common kinds, with few enough values that answers end."""

from __future__ import annotations

from random import Random
from typing import Any

_NAMES = ("name", "id", "tags", "count", "unit", "price", "active", "kind", "items", "note", "ünit", 'q"uote')
_PATTERNS = ("^[a-z]{2,4}$", "^[A-Z][0-9]{3}$", "^(yes|no)$")


def random_schema(random: Random) -> dict[str, Any]:
    """A schema of an object."""
    if random.random() < 0.2:
        definition = _object(random, 1)
        parts = {"one": {"$ref": "#/$defs/part"}, "two": {"$ref": "#/$defs/part"}}
        return {"$defs": {"part": definition}, **_closed(parts, list(parts))}
    return _object(random, 2)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(_NAMES, random.randrange(1, 4))
    required = [name for name in names if random.random() < 0.7]
    return _closed({name: _value(random, depth - 1) for name in names}, required)


def _closed(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _value(random: Random, depth: int) -> dict[str, Any]:
    low = random.randrange(-20, 20)
    kinds: list[dict[str, Any]] = [
        {"type": "boolean"},
        {"type": "null"},
        {"type": "integer", "minimum": low, "maximum": low + random.randrange(1, 300)},
        {"type": "string", "maxLength": random.randrange(1, 8)},
        {"type": "string", "pattern": random.choice(_PATTERNS)},
        {"type": "string", "format": random.choice(["date", "time", "uuid"])},
        {"enum": random.sample(["red", "green", "dark blue", 7, None, True], 3)},
        {"const": random.choice(["fixed", 42, False])},
        {"type": ["boolean", "null"]},
        {"anyOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}]},
    ]
    if depth > 0:
        kinds += [
            _object(random, depth),
            {"type": "array", "items": _value(random, depth - 1), "minItems": 1, "maxItems": 3},
        ] * 2
    return random.choice(kinds)
