"""A case: a model and calls, in plain values, so that its `repr` suffices to run it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tiny.variant import Variant

ENTRIES = ("generate", "attach", "custom_generate", "threads", "engine", "started engine")
"""Entry points of the library. For the last three, each row is its own call or request."""
APART = ENTRIES[3:]
UNDO = "undo"
"""Value of `change` that undoes the change before."""


@dataclass(frozen=True)
class Turn:
    """One call of `generate`, or requests to an `Engine`.

    Attributes:
        ours: Whether lookahead decoding makes the call; else transformers makes it, and may continue our cache.
        prompts: Token ids of each row, new in this turn.
        padding: Hidden tokens before each row's prompt.
        holes: Indices of other hidden tokens, in long enough rows.
        settings: Arguments of both calls, as plain values; see `settings.arguments`.
        drafting: Arguments of `LookaheadConfig`.
        cache: Cache of the call: `""` none, `"empty"` a new one, `"whole"` the cache of the turn before with the
            whole text, `"tail"` the same cache with only the tokens after it.
        images: Whether each row has an image after its first token.
        entry: Entry point of lookahead decoding, one of `ENTRIES`.
        gap: With a stepped `Engine`: steps between the arrivals of rows.
        mixed: With an `Engine` or threads: whether every second row is greedy text, without settings and image.
        change: Change of the model before the call: a name in `changes`, or `UNDO`.
        change_after: Steps of the `Engine` before the change, if it comes during the run.
        arrival: Of a request: step before its arrival.
        cancelled: Of a request: steps from its arrival to its cancellation; `None` if not cancelled.
        extras: Of a request: other arguments of `Engine.submit`.
    """

    ours: bool
    prompts: tuple[tuple[int, ...], ...]
    padding: tuple[int, ...]
    holes: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    drafting: dict[str, Any] = field(default_factory=dict)
    cache: str = ""
    images: bool = False
    entry: str = "generate"
    gap: int = 0
    mixed: bool = False
    change: str = ""
    change_after: int | None = None
    arrival: int = 0
    cancelled: int | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def rows(self) -> list[Turn]:
        """Return each row as its own call."""
        plain = {"settings": {"max_new_tokens": self.settings["max_new_tokens"]}, "images": False}
        alone = replace(self, padding=(0,), entry="generate")
        return [
            replace(alone, prompts=(row,), arrival=self.gap * place, **(plain if self.mixed and place % 2 else {}))
            for place, row in enumerate(self.prompts)
        ]

    def having(self, **settings: Any) -> Turn:
        """Return the turn with additional settings."""
        return replace(self, settings=self.settings | settings)

    def without(self, *settings: str) -> Turn:
        """Return the turn without some of its settings."""
        return replace(self, settings={name: value for name, value in self.settings.items() if name not in settings})


@dataclass(frozen=True)
class Case:
    """A model, and successive calls of `generate`, or concurrent requests.

    Attributes:
        seed: Number of the case, and seed of its drawing.
        family: Family of the model: a name in `families.family_names` and similar lists, `"zoo/NAME"`, or `"demo"`.
        variant: Variant of the model; only its seed matters for a model of the zoo.
        attention: Attention implementation.
        double: Whether the model is float64.
        turns: The calls.
        kind: Purpose of the case: a setting, or one of `faults.KINDS`; may be empty.
        engine: Options of an `Engine`; if there are any, the turns are its requests.
        ranks: Number of ranks of lookahead decoding; their result is compared with one process.
    """

    seed: int
    family: str
    variant: Variant
    attention: str
    double: bool
    turns: tuple[Turn, ...]
    kind: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    ranks: int = 0

    def having(self, drafting: dict[str, Any] | None = None, **settings: Any) -> Case:
        """Return the case with additional settings in all turns, and another drafting if not None."""
        turns = (turn.having(**settings) for turn in self.turns)
        if drafting is not None:
            turns = (replace(turn, drafting=drafting) for turn in turns)
        return replace(self, turns=tuple(turns))

    def describe(self) -> str:
        """Describe the case in one line, without the prompts."""
        defaults = Variant()
        names = [entry.name for entry in fields(Variant) if entry.name not in ("seed", "pick")]
        model = {name: getattr(self.variant, name) for name in names}
        model = {name: value for name, value in model.items() if value != getattr(defaults, name)}
        dtype = "float64" if self.double else "float32"
        ranks = f" ranks={self.ranks}" if self.ranks else ""
        turns = " | ".join(map(_described, self.turns))
        return f"{self.family} {self.attention} {dtype}{ranks} {_listed(model | self.engine)} | {turns}"


def zoo_case(
    name: str,
    *prompts: Sequence[int],
    weights: int = 0,
    attention: str = "eager",
    drafting: dict[str, Any] | None = None,
    padding: int = 0,
    **settings: Any,
) -> Case:
    """Return a case of one call with a model of the zoo, or with the demo model.

    Args:
        name: Name of the model.
        prompts: Token ids of each row; rows are padded on the left to the longest.
        weights: Seed of the weights.
        attention: Attention implementation.
        drafting: Arguments of `LookaheadConfig`.
        padding: Further hidden tokens before each row.
        settings: Arguments of both calls, as plain values; see `settings.arguments`.
    """
    longest = max(map(len, prompts)) + padding
    turn = Turn(
        ours=True,
        prompts=tuple(map(tuple, prompts)),
        padding=tuple(longest - len(row) for row in prompts),
        settings={"max_new_tokens": 40, "return_dict_in_generate": True} | settings,
        drafting=drafting or {},
    )
    return Case(0, name if name == "demo" else f"zoo/{name}", Variant(weights), attention, False, (turn,))


def _described(turn: Turn) -> str:
    words = [turn.entry if turn.ours else "plain", f"rows={len(turn.prompts)} of {max(map(len, turn.prompts))}"]
    words += [f"padding={list(turn.padding)}"] if any(turn.padding) else []
    words += [f"holes={list(turn.holes)}"] if turn.holes else []
    words += [f"cache={turn.cache}"] if turn.cache else []
    for name in ("images", "gap", "mixed", "change", "change_after", "arrival", "cancelled"):
        value = getattr(turn, name)
        words += [f"{name}={value!r}"] if value != getattr(Turn, name) else []
    return " ".join([*words, _listed(turn.settings | turn.extras), f"[{_listed(turn.drafting)}]" if turn.ours else ""])


def _listed(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
