"""Files of recorded texts, with the model's likeliest tokens after every node that was sent.

`golden.py` plays them. Probabilities are float16, so that they are the same on every processor.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lookahead.core.token_tree import TokenTree
from playback import Listed, paths

LISTED = 8
"""Number of tokens recorded for each node, the number that drafters read."""

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


def save(path: Path, content: Any) -> None:
    """Write JSON values to a compressed file."""
    text = json.dumps(content, separators=(",", ":")).encode()
    path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def load(path: Path) -> Any:
    """Read the values of a file written by `save`."""
    return json.loads(lzma.decompress(path.read_bytes()))


def pack(recordings: Mapping[str, Recording]) -> dict[str, Any]:
    """Convert recordings to JSON values, with only the nodes in `used`; probabilities are the bits of float16."""
    return {
        name: {
            "prompt": one.prompt,
            "answer": one.answer,
            "sampling": one.sampling and asdict(one.sampling),
            "said": [
                (*key, one.said[key][0].tolist(), one.said[key][1].astype(np.float16).view(np.uint16).tolist())
                for key in sorted(one.used)
            ],
        }
        for name, one in recordings.items()
    }


def unpack(content: Mapping[str, Any]) -> dict[str, Recording]:
    """Undo `pack`."""
    recordings = {}
    for name, one in content.items():
        said = {
            (length, tuple(path)): (np.array(ids), np.array(bits, dtype=np.uint16).view(np.float16).astype(np.float32))
            for length, path, ids, bits in one["said"]
        }
        sampling = one["sampling"] and Sampling(**one["sampling"])
        recordings[name] = Recording(one["prompt"], one["answer"], sampling, said)
    return recordings
