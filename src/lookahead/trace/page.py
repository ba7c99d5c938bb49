"""The page of a trace: one HTML file with its style, its script and its data, compactly."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from lookahead.core.watching import Origin
from lookahead.version import __version__

if TYPE_CHECKING:
    from lookahead.trace.recorder import TracedStep, TracedText


FORMAT = 1

_PARTS = ("draft", "forward", "verify", "commit")
"""Parts of a step, in the order that the script has them in."""


def make_page(texts: Sequence[TracedText], tokenizer: Any, title: str, facts: dict[str, str]) -> str:
    """The page, whole: nothing on it comes from elsewhere."""
    data = json.dumps(to_data(texts, tokenizer, facts), ensure_ascii=False, separators=(",", ":"))
    folder = files("lookahead.trace")
    parts = {
        "title": html.escape(title),
        "style": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "script": "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in ("tree.js", "page.js")),
        # Nothing that a text says may end the element that holds it.
        "data": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page)
    return page.encode("utf-8", "replace").decode("utf-8")  # a tokenizer may give halves of characters


def to_data(texts: Sequence[TracedText], tokenizer: Any, facts: dict[str, str]) -> dict[str, Any]:
    """What the page shows, as plain numbers and lists: tokens and sources are named once, and numbered."""
    vocabulary, evidence = Vocabulary(tokenizer), _Evidence()
    shown_texts = [_text(text, tokenizer, vocabulary, evidence) for text in texts]
    return {
        "format": FORMAT,
        "version": __version__,
        "facts": facts,
        "vocabulary": vocabulary.names,
        "sources": evidence.sources,
        "evidence": evidence.sets,
        "texts": shown_texts,
    }


def _text(text: TracedText, tokenizer: Any, vocabulary: Vocabulary, evidence: _Evidence) -> dict[str, Any]:
    parts = pieces([step.added for step in text.steps], tokenizer, text.prompt)
    return {
        "prompt": shown_prompt(text.prompt, tokenizer),
        "promptTokens": len(text.prompt),
        "tokens": len(text.tokens),
        "nodes": text.nodes,
        "steps": [
            {"x": part, **_step(step, vocabulary, evidence)} for step, part in zip(text.steps, parts, strict=True)
        ],
    }


def _step(step: TracedStep, vocabulary: Vocabulary, evidence: _Evidence) -> dict[str, Any]:
    """One step. By node below the root: `t` token, `p` parent, `e` evidence, `q` estimated probability in thousandths
    (-1 for none). By node: `m` the model's likeliest token, `c` its probability in percent. `w` window nodes, `a`
    accepted ones, `k` tokens added, `l` the likeliest tokens after root and accepted nodes in thousandths, `d`
    microseconds of each part, `n` entries of the memory, `r` predictions learned."""
    likely = [-1 if origin.probability is None else round(1000 * origin.probability) for origin in step.origins]
    fields: dict[str, Any] = {
        "o": vocabulary.number(step.tokens[0]),
        "t": [vocabulary.number(token) for token in step.tokens[1:]],
        "p": step.parents[1:],
        "e": [evidence.number(origin) for origin in step.origins],
        "m": [vocabulary.number(token) for token in step.predictions],
        "a": step.path,
        "k": [vocabulary.number(token) for token in step.added],
        "d": [round(1e6 * getattr(step.seconds, part)) for part in _PARTS],
        "r": step.learned,
    }
    if any(thousandths >= 0 for thousandths in likely):
        fields["q"] = likely
    if any(step.certainties):
        fields["c"] = [round(100 * share) for share in step.certainties]
    if step.window:
        fields["w"] = step.window
    if step.likeliest:
        fields["l"] = [
            [[vocabulary.number(token), round(1000 * share)] for token, share in listed] for listed in step.likeliest
        ]
    if step.entries is not None:
        fields["n"] = step.entries
    return fields


class _Evidence:
    """Sets of sources that named a token, numbered as they come."""

    def __init__(self) -> None:
        self.sources: list[str] = []
        self.sets: list[list[int]] = []
        self._numbers: dict[tuple[str, ...], int] = {}
        self._sources: dict[str, int] = {}

    def number(self, origin: Origin) -> int:
        """The number of a set of sources; a node is attributed to the first of them."""
        if origin.evidence not in self._numbers:
            self._numbers[origin.evidence] = len(self.sets)
            self.sets.append([self._source(name) for name in origin.evidence])
        return self._numbers[origin.evidence]

    def _source(self, name: str) -> int:
        if name not in self._sources:
            self._sources[name] = len(self.sources)
            self.sources.append(name)
        return self._sources[name]


MOST_PROMPT = 20_000
"""Characters of a prompt that are shown: its last ones."""

_CONTEXT = 6
"""Tokens that are decoded again before new ones: one alone may hold half a character, or lose its space."""

_REPLACEMENT = "\ufffd"


class Vocabulary:
    """The tokens of a page, numbered as they come.

    Args:
        tokenizer: Names them; they are shown by their ids without one.

    Attributes:
        names: The text of each.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.names: list[str] = []
        self._tokenizer = tokenizer
        self._numbers: dict[int, int] = {}

    def number(self, token: int) -> int:
        """The number of a token; -1 for none."""
        if token < 0:
            return -1
        if token not in self._numbers:
            self._numbers[token] = len(self.names)
            self.names.append(decode([token], self._tokenizer))
        return self._numbers[token]


def decode(tokens: Sequence[int], tokenizer: Any) -> str:
    """Their text, special tokens included; their ids without a tokenizer."""
    if tokenizer is None:
        return " ".join(f"#{token}" for token in tokens)
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def shown_prompt(prompt: Sequence[int], tokenizer: Any) -> str:
    """The end of a prompt's text."""
    text = decode(prompt[-MOST_PROMPT:], tokenizer)
    return text if len(text) <= MOST_PROMPT else "…" + text[-MOST_PROMPT:]


def pieces(steps: Sequence[Sequence[int]], tokenizer: Any, prompt: Sequence[int]) -> list[str]:
    """The text that each step added. A character that two steps share belongs to the later one."""
    if tokenizer is None:
        return [decode(step, None) + " " for step in steps]
    tokens = list(prompt[-_CONTEXT:])
    begin, given, parts = 0, decode(tokens, tokenizer), []
    for number, step in enumerate(steps):
        tokens += step
        text = decode(tokens[begin:], tokenizer)
        certain = text if number + 1 == len(steps) else text.rstrip(_REPLACEMENT)
        kept = len(given) if certain.startswith(given) else _shared(certain, given)
        parts.append(certain[kept:])
        given = certain
        if len(tokens) - begin > 8 * _CONTEXT and certain == text:
            begin = len(tokens) - _CONTEXT
            given = decode(tokens[begin:], tokenizer)
    return parts


def _shared(one: str, other: str) -> int:
    """Characters that two texts begin with."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
