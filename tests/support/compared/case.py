"""One case: a model, and calls with it, in plain values, so that its `repr` is all that is needed to run it again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tiny.variant import Variant

ENTRIES = ("generate", "attach", "custom_generate", "threads", "engine", "started engine")
"""Doors of the library. By the last three each row is a call or a request of its own."""
APART = ENTRIES[3:]
UNDO = "undo"
"""In place of a change: take back the one before."""


@dataclass(frozen=True)
class Turn:
    """One call of `generate`, or requests to an `Engine`.

    Attributes:
        ours: Whether lookahead decoding makes the call; else it is transformers, which reads what ours left behind.
        prompts: Token ids of each row, new in this turn.
        padding: Hidden tokens before each row's prompt.
        holes: Places of other hidden tokens, in any row that has them.
        settings: Arguments of both calls, as plain values; see `settings.arguments`.
        drafting: Arguments of `LookaheadConfig`.
        cache: What cache is handed over: `""` none, `"empty"` a new one, `"whole"` that of the turn before with the
            whole text, `"tail"` the same with only those tokens that are not in it.
        images: Whether each row has an image behind its first token.
        entry: By which of `ENTRIES` ours is called.
        gap: With an `Engine` that is stepped: after how many steps the next row comes.
        mixed: With an `Engine` or threads: whether every second row is greedy text, without settings and image.
        change: How the model is changed before the call; a name of `changes`, or `UNDO`.
        change_after: After how many steps of the `Engine` instead.
        arrival: Of a request: before which step it comes.
        cancelled: Of a request: after how many steps more it is cancelled; `None` if it is not.
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
        """Each row as a call by itself."""
        plain = {"settings": {"max_new_tokens": self.settings["max_new_tokens"]}, "images": False}
        alone = replace(self, padding=(0,), entry="generate")
        return [
            replace(alone, prompts=(row,), arrival=self.gap * place, **(plain if self.mixed and place % 2 else {}))
            for place, row in enumerate(self.prompts)
        ]

    def having(self, **settings: Any) -> Turn:
        """The turn with other settings beside its own."""
        return replace(self, settings=self.settings | settings)

    def without(self, *settings: str) -> Turn:
        """The turn without some of its settings."""
        return replace(self, settings={name: value for name, value in self.settings.items() if name not in settings})


@dataclass(frozen=True)
class Case:
    """A model, and calls of `generate` with it one after another, or requests at once.

    Attributes:
        seed: Its number, from which it was drawn.
        family: Of the model: one of `families.family_names` and the like, `"zoo/NAME"` of the model zoo, or `"demo"`.
        variant: Of the model; of a model of the zoo the seed alone.
        attention: Attention implementation.
        double: Whether the model is float64.
        turns: The calls.
        kind: For what it was made: a setting, or one of `faults.KINDS`, if for anything.
        engine: Options of an `Engine`; if there are any, the turns are requests to it that come and go.
        ranks: On how many ranks lookahead decoding runs, and is held against itself in one process.
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
        """The case with other settings of all its turns beside their own, and another way to draft if given."""
        turns = (turn.having(**settings) for turn in self.turns)
        if drafting is not None:
            turns = (replace(turn, drafting=drafting) for turn in turns)
        return replace(self, turns=tuple(turns))

    def describe(self) -> str:
        """The case in one line, without the prompts."""
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
    """One call with a model of the zoo, or the demo model.

    Args:
        name: Of the model.
        prompts: Token ids of each row; they are padded on the left to the longest.
        weights: Seed of its weights.
        attention: Attention implementation.
        drafting: Arguments of `LookaheadConfig`.
        padding: Hidden tokens before each row, beside those.
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
