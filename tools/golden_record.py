"""Files of recorded texts, with the model's likeliest tokens after every node that was sent.

`golden.py` plays them. Files hold compressed arrays. Probabilities are float16, so that they are the same on every
processor.
"""

from __future__ import annotations

import io
import lzma
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lookahead.core.token_tree import TokenTree
from playback import Listed, paths

LISTED = 8
"""Number of tokens recorded for each node, the number that drafters read."""

NOBODY = np.iinfo(np.uint16).max

Arrays = dict[str, NDArray]
Key = tuple[int, tuple[int, ...]]
"""Key of a node: number of text tokens before it, and the drafted tokens after them, its own included."""

Ask = Callable[[list[int], TokenTree], Mapping[int, Listed]]
"""Run a model on the first tokens of a text and a tree after them; return its predictions for each node."""


class NotRecordedError(LookupError):
    """The record has no predictions for a node."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of a text, named as in `generate`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass
class Recording:
    """A text, and its model's predictions (`Script`).

    Attributes:
        prompt, answer: Token ids.
        sampling: Sampling parameters of the answer; `None` for greedy decoding.
        said: The likeliest tokens by node, with their probabilities.
        ask: Source of predictions that are not recorded; `None` without a model.
        used: Nodes that were requested.
    """

    prompt: list[int]
    answer: list[int]
    sampling: Sampling | None = None
    said: dict[Key, Listed] = field(default_factory=dict)
    ask: Ask | None = None
    used: set[Key] = field(default_factory=set)

    @property
    def text(self) -> list[int]:
        """Prompt and answer."""
        return [*self.prompt, *self.answer]

    def listed(self, cached: int, tree: TokenTree) -> dict[int, Listed]:
        """Return the likeliest tokens after the nodes with logits (`Script`).

        Raises:
            NotRecordedError: A node is not recorded, and there is no model to ask.
        """
        keys = {node: key for node, key in paths(tree, cached).items() if tree.needs_logits[node]}
        unknown = [node for node, key in keys.items() if key not in self.said]
        if unknown and self.ask is None:
            raise NotRecordedError(f"nothing is recorded of {keys[unknown[0]]}")
        if unknown and self.ask is not None:
            for node, listed in self.ask(self.text[:cached], tree).items():
                if node in unknown:
                    self.said[keys[node]] = listed
        self.used.update(keys.values())
        return {node: self.said[key] for node, key in keys.items()}


def save(path: Path, arrays: Arrays) -> None:
    """Write arrays to a file."""
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)  # type: ignore[arg-type]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def load(path: Path) -> Arrays:
    """Read the arrays of a file written by `save`."""
    with np.load(io.BytesIO(lzma.decompress(path.read_bytes()))) as arrays:
        return dict(arrays)


def pack(recordings: Mapping[str, Recording]) -> Arrays:
    """Convert recordings to arrays, with only the nodes in `used`.

    Nodes are sorted by their paths. For each node the arrays hold its depth after the text and its last token; its path
    follows from the nodes before it.
    """
    arrays: Arrays = {}
    for name, recording in recordings.items():
        keys = sorted({(length, path[:end]) for length, path in recording.used for end in range(len(path) + 1)})
        ids = np.full((len(keys), LISTED), NOBODY, dtype=np.uint16)
        likely = np.zeros((len(keys), LISTED), dtype=np.float16)
        for place, key in enumerate(keys):
            if key in recording.used:
                tokens, probabilities = recording.said[key]
                ids[place, : len(tokens)], likely[place, : len(tokens)] = tokens, probabilities
        values = [] if recording.sampling is None else astuple(recording.sampling)
        parts: Arrays = {
            "prompt": np.array(recording.prompt, dtype=np.uint16),
            "answer": np.array(recording.answer, dtype=np.uint16),
            "shaping": np.array(values),
            "length": np.array([length for length, _ in keys], dtype=np.uint16),
            "depth": np.array([len(path) for _, path in keys], dtype=np.uint8),
            "token": np.array([path[-1] if path else 0 for _, path in keys], dtype=np.uint16),
            "ids": ids,
            "likely": likely,
        }
        arrays |= {f"{name}/{part}": values for part, values in parts.items()}
    return arrays


def unpack(arrays: Arrays) -> dict[str, Recording]:
    """Undo `pack`."""
    return {name: _unpacked(arrays, name) for name in dict.fromkeys(key.rpartition("/")[0] for key in arrays)}


def _unpacked(arrays: Arrays, name: str) -> Recording:
    parts = {key.rpartition("/")[2]: values for key, values in arrays.items() if key.rpartition("/")[0] == name}
    said: dict[Key, Listed] = {}
    path: list[int] = []
    ids, likely = parts["ids"].astype(np.int64), parts["likely"].astype(np.float32)
    counts = (parts["ids"] != NOBODY).sum(axis=1).tolist()
    nodes = zip(parts["length"].tolist(), parts["depth"].tolist(), parts["token"].tolist(), counts, strict=True)
    for place, (length, depth, token, count) in enumerate(nodes):
        path[max(depth - 1, 0) :] = [token] if depth else []
        if count:
            said[length, tuple(path)] = ids[place, :count], likely[place, :count]
    temperature, top_k, top_p, min_p = [*parts["shaping"].tolist(), 1.0, 0, 1.0, 0.0][:4]
    sampling = Sampling(temperature, int(top_k), top_p, min_p) if len(parts["shaping"]) else None
    return Recording(parts["prompt"].tolist(), parts["answer"].tolist(), sampling, said)
