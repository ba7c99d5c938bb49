"""Traces of runs: the nodes of every step, their sources and the accepted path; as objects, and as an HTML page."""

from __future__ import annotations

import html
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import count
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from lookahead.core.files import replaced
from lookahead.core.results import StepResult
from lookahead.core.statistics import Seconds
from lookahead.core.token_tree import NodeKind
from lookahead.core.watching import Explanation, Origin, StepWatcher
from lookahead.errors import InvalidArgumentError
from lookahead.text import TextBuilder
from lookahead.values import check_path as check_any_path
from lookahead.values import require
from lookahead.version import __version__

__all__ = ["Trace", "TracedStep", "TracedText"]

MOST_LISTED = 5
"""Number of most likely tokens to record after each node of the accepted path."""


@dataclass(frozen=True)
class TracedStep:
    """One step of one text. Nodes are counted from the root, which is node 0.

    Attributes:
        tokens: Token of each node; the root has the last token of the text so far.
        parents: Parent of each node; -1 for the root.
        window: Nodes of a lookahead window, which are read and never accepted.
        origins: Source of each node below the root.
        path: Accepted nodes, from the root downwards.
        added: Tokens that the step added to the text: the accepted path, and the model's own token after it.
        predictions: Most likely token after each node; -1 if its logits were not read.
        certainties: Probability of that token; 0 if unknown.
        likeliest: Most likely tokens with their probabilities, for the root and each accepted node; empty for methods
            that do not read them.
        entries: Number of entries in the memory or the pool before the step; `None` without either.
        learned: Number of predictions that the drafter learned from the step.
        seconds: Time of each part of the step, summed over all rows of the batch.
        finished: Whether the step completed the text.
    """

    tokens: list[int]
    parents: list[int]
    window: list[int]
    origins: list[Origin]
    path: list[int]
    added: list[int]
    predictions: list[int]
    certainties: list[float]
    likeliest: list[list[tuple[int, float]]]
    entries: int | None
    learned: int
    seconds: Seconds
    finished: bool

    @classmethod
    def of(cls, result: StepResult, explanation: Explanation, seconds: Seconds, finished: bool) -> TracedStep:
        """Copy the recorded values of a step; see `StepWatcher` for the arguments."""
        tree = result.tree
        root = tree.root
        ids = result.top_ids
        probabilities = result.top_probabilities
        listed = ids.shape[-1] > 0 and len(ids) == len(tree)
        likeliest = []
        for node in result.selected_after if listed else []:
            pairs = zip(ids[node, :MOST_LISTED].tolist(), probabilities[node, :MOST_LISTED].tolist(), strict=True)
            likeliest.append([(token, share) for token, share in pairs if token >= 0])
        return cls(
            tokens=tree.tokens[root:],
            parents=[-1, *(parent - root for parent in tree.parents[root + 1 :])],
            window=[node - root for node, kind in enumerate(tree.kinds) if kind is NodeKind.WINDOW],
            origins=list(explanation.origins),
            path=[node - root for node in result.path],
            added=list(result.tokens),
            predictions=result.predictions[root:].tolist(),
            certainties=probabilities[root:, 0].tolist() if listed else [0.0] * (len(tree) - root),
            likeliest=likeliest,
            entries=explanation.entries,
            learned=int((result.predictions >= 0).sum()),
            seconds=seconds,
            finished=finished,
        )


@dataclass
class TracedText:
    """Trace of one text, which is one row of a call: token ids of the prompt, and the steps so far."""

    prompt: list[int]
    steps: list[TracedStep] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Generated token ids."""
        return [token for step in self.steps for token in step.added]

    @property
    def nodes(self) -> int:
        """Number of nodes in all steps, roots included."""
        return sum(len(step.tokens) for step in self.steps)

    @property
    def step_compression(self) -> float:
        """S, tokens per step."""
        return len(self.tokens) / len(self.steps) if self.steps else 0.0


class Trace:
    """Recorder of the steps of all calls with its configuration. It never changes the text.

    As a context manager it writes its page at the end, also after an error:

        with lookahead.Trace("trace.html", tokenizer) as trace:
            config = lookahead.LookaheadConfig(trace=trace)
            lookahead.generate(model, input_ids, lookahead_config=config, max_new_tokens=200)

    Args:
        path: Path of the page; `write` takes one too.
        tokenizer: Tokenizer for the texts of tokens; the page shows token ids without one.
        title: Heading of the page.
        facts: Further facts about the run for the page, by name.

    Attributes:
        texts: Recorded texts, one for each row of each call, in the order of their start.

    Raises:
        InvalidArgumentError: `path` cannot be written, or an argument has the wrong type.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        title: str = "Lookahead decoding, step by step",
        facts: dict[str, str] | None = None,
    ) -> None:
        if path is not None:
            check_any_path("path", path, _PATH)
        decodes = tokenizer is None or callable(getattr(tokenizer, "decode", None))
        require(decodes, "tokenizer", tokenizer, "has no decode method; give the model's tokenizer, or None")
        require(isinstance(title, str), "title", title, "must be a text")
        require(facts is None or isinstance(facts, Mapping), "facts", facts, "must be texts by name, in a dict")
        self.path = None if path is None else Path(path)
        self.tokenizer = tokenizer
        self.title = title
        self.facts = {str(name): str(fact) for name, fact in (facts or {}).items()}
        self.texts: list[TracedText] = []
        if self.path is not None:
            check_path(self.path)

    def begin(self, prompt: Sequence[int]) -> StepWatcher:
        """Begin a text with this prompt, and return the function to call after each of its steps."""
        text = TracedText(list(prompt))
        self.texts.append(text)
        return lambda *step: text.steps.append(TracedStep.of(*step))

    def write(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write the page, one HTML file that needs no network, and return its path. An old page is replaced atomically.

        Args:
            path: Path of the page; `self.path` if not given.

        Raises:
            InvalidArgumentError: No path is given, or it cannot be written.
        """
        if path is not None:
            check_any_path("path", path, _PATH)
        target = self.path if path is None else Path(path)
        if target is None:
            raise InvalidArgumentError("path is not given; give the path of the page, as in write('trace.html')")
        check_path(target)
        try:
            with replaced(target) as file:
                file.write(make_page(self.texts, self.tokenizer, self.title, self.facts))
        except OSError as error:
            raise _refusal(target, error) from error
        return target

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.path is not None and (self.texts or error is None):
            self.write()

    def __deepcopy__(self, memo: dict[int, Any]) -> Trace:
        return self  # copies of a configuration share the recorder


def check_path(path: Path) -> None:
    """Check that a page can be written to a path.

    Raises:
        InvalidArgumentError: The path is not a file, is not writable, or is a file but not a trace page.
    """
    if path.exists() and not (path.is_file() and os.access(path, os.W_OK)):
        raise InvalidArgumentError(f"trace: {path} is not a file, or is not writable; choose another file")
    try:
        if path.exists() and not _is_page(path):
            raise InvalidArgumentError(
                f"trace: {path} is not a trace page, and was left unchanged; choose another file"
            )
        NamedTemporaryFile(dir=Path(os.path.realpath(path)).parent).close()
    except OSError as error:
        raise _refusal(path, error) from error


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        beginning = file.read(_HEAD)
    return not beginning or _MARK in beginning


def _refusal(path: Path, error: OSError) -> InvalidArgumentError:
    return InvalidArgumentError(f"trace: {path} cannot be written: {error.strerror or error}; choose another file")


FORMAT = 1

_PATH = "must be the path of the page, as in 'trace.html'"

_MARK = b'<meta name="generator" content="lookahead trace">'
_HEAD = 256
"""Mark of a trace page, and the number of bytes at its start that contain the mark."""

_PARTS = ("draft", "forward", "verify", "commit")
"""Parts of a step, in the order of the page's script."""

MOST_PROMPT = 20_000
"""Maximum number of characters of a prompt on the page, counted from its end."""


def make_page(texts: Sequence[TracedText], tokenizer: Any, title: str, facts: dict[str, str]) -> str:
    """Make the page as one self-contained HTML text."""
    data = json.dumps(to_data(texts, tokenizer, facts), ensure_ascii=False, separators=(",", ":"))
    folder = files("lookahead.trace")
    parts = {
        "title": html.escape(title),
        "style": folder.joinpath("page.css").read_text(encoding="utf-8"),
        "script": "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in ("tree.js", "page.js")),
        # Escaped, so that no text can end the script element around it.
        "data": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
    }
    page = folder.joinpath("page.html").read_text(encoding="utf-8")
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], page)
    return page.encode("utf-8", "replace").decode("utf-8")  # a tokenizer may return lone surrogates


Numbers = defaultdict[Any, int]
"""Numbers of values, assigned in the order of first use."""


def to_data(texts: Sequence[TracedText], tokenizer: Any, facts: dict[str, str]) -> dict[str, Any]:
    """Data of the page, as plain numbers and lists.

    Tokens and sets of sources are listed once, and referred to by number. A node is attributed to the first source of
    its set.
    """
    vocabulary, evidence, sources = (Numbers(count().__next__) for _ in range(3))
    shown_texts = [
        {
            "prompt": shown_prompt(text.prompt, tokenizer),
            "promptTokens": len(text.prompt),
            "tokens": len(text.tokens),
            "nodes": text.nodes,
            "steps": [
                {"x": part, **_step(step, vocabulary, evidence)}
                for step, part in zip(
                    text.steps, pieces([step.added for step in text.steps], tokenizer, text.prompt), strict=True
                )
            ],
        }
        for text in texts
    ]
    sets = [[sources[name] for name in names] for names in evidence]
    return {
        "format": FORMAT,
        "version": __version__,
        "facts": facts,
        "vocabulary": [decode([token], tokenizer) for token in vocabulary],
        "sources": list(sources),
        "evidence": sets,
        "texts": shown_texts,
    }


def _step(step: TracedStep, vocabulary: Numbers, evidence: Numbers) -> dict[str, Any]:
    """Data of one step.

    For each node below the root: `t` token, `p` parent, `e` evidence, `q` estimated probability in thousandths (-1 for
    none). For each node: `m` most likely token after it, `c` its probability in percent. `o` is the root's token, `w`
    window nodes, `a` accepted nodes, `k` added tokens, `l` most likely tokens after the root and accepted nodes with
    probabilities in thousandths, `d` microseconds of each part, `n` entries of the memory, `r` predictions learned.
    """
    likely = [-1 if origin.probability is None else round(1000 * origin.probability) for origin in step.origins]
    fields: dict[str, Any] = {
        "o": vocabulary[step.tokens[0]],
        "t": [vocabulary[token] for token in step.tokens[1:]],
        "p": step.parents[1:],
        "e": [evidence[origin.evidence] for origin in step.origins],
        "m": [-1 if token < 0 else vocabulary[token] for token in step.predictions],
        "a": step.path,
        "k": [vocabulary[token] for token in step.added],
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
        fields["l"] = [[[vocabulary[token], round(1000 * share)] for token, share in node] for node in step.likeliest]
    if step.entries is not None:
        fields["n"] = step.entries
    return fields


def decode(tokens: Sequence[int], tokenizer: Any) -> str:
    """Text of tokens, special tokens included; their ids without a tokenizer."""
    if tokenizer is None:
        return " ".join(f"#{token}" for token in tokens)
    return str(tokenizer.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def shown_prompt(prompt: Sequence[int], tokenizer: Any) -> str:
    """End of a prompt's text, at most `MOST_PROMPT` characters."""
    text = decode(prompt[-MOST_PROMPT:], tokenizer)
    return text if len(text) <= MOST_PROMPT else "…" + text[-MOST_PROMPT:]


def pieces(steps: Sequence[Sequence[int]], tokenizer: Any, prompt: Sequence[int]) -> list[str]:
    """Text that each step added. A character with tokens in two steps belongs to the later one."""
    if tokenizer is None:
        return [decode(step, None) + " " for step in steps]
    builder = TextBuilder(tokenizer, prompt, dropped=())
    parts = []
    for step in steps:
        for token in step:
            builder.add(token)
        parts.append(builder.take())
    return [*parts[:-1], *(part + builder.finish() for part in parts[-1:])]
