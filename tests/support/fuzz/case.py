"""One case of the fuzzer, drawn from one number."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Any

from fuzz.encoder_decoders import ENCODER
from fuzz.families import INDEXED, keeps_running_state
from fuzz.images import IMAGE_TOKEN
from fuzz.settings import draw_settings
from fuzz.variant import Variant, draw_variant
from lookahead.backends.transformers.miniature import VOCABULARY


@dataclass(frozen=True)
class Turn:
    """One call of `generate`.

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

    @property
    def rows(self) -> list[Turn]:
        """Each row as a call by itself."""
        plain = {"settings": {"max_new_tokens": self.settings["max_new_tokens"]}, "images": False}
        return [
            replace(self, prompts=(row,), padding=(0,), entry="generate", **(plain if self.mixed and place % 2 else {}))
            for place, row in enumerate(self.prompts)
        ]


ENTRIES = ("generate", "attach", "custom_generate", "threads", "engine", "started engine")
"""Doors of the library. By the last three each row is a call or a request of its own."""
APART = ENTRIES[3:]
UNDO = "undo"
"""In place of a change: take back the one before."""


@dataclass(frozen=True)
class Case:
    """A model, and calls of `generate` with it one after another.

    Attributes:
        seed: What it was drawn from.
        family: Of the model.
        variant: Of the model.
        attention: Attention implementation.
        double: Whether the model is float64.
        turns: The calls.
        fault: Of which of `faults.KINDS` it is, if any.
    """

    seed: int
    family: str
    variant: Variant
    attention: str
    double: bool
    turns: tuple[Turn, ...]
    fault: str = ""

    def describe(self) -> str:
        """The case in one line, without the prompts."""
        defaults = Variant()
        names = [entry.name for entry in fields(Variant) if entry.name not in ("seed", "pick")]
        model = {name: getattr(self.variant, name) for name in names}
        model = {name: value for name, value in model.items() if value != getattr(defaults, name)}
        dtype = "float64" if self.double else "float32"
        return f"{self.family} {self.attention} {dtype} {_listed(model)} | " + " | ".join(map(_described, self.turns))


_OTHER_PRESETS = ("jacobi", "token_recycling", "context_matches", "autoregressive")


def draw_case(seed: int, families: list[str], images: bool = False) -> Case:
    """The case number `seed`; it depends on `families` as well, of which it takes one.

    Args:
        seed: Its number.
        families: Names of families.
        images: Whether its prompts have images.
    """
    random = Random(f"fuzz {seed}")
    family = random.choice(families)
    variant = draw_variant(random)
    attention = "sdpa" if random.random() < 0.6 else "eager"
    double = random.random() < 0.12
    turns = tuple(_draw_turns(random))
    # Most of what is drawn for others is refused for these, and would say nothing of them.
    if keeps_running_state(family) and random.random() < 0.9:
        turns = tuple(map(_for_running_states, turns))
    if family in INDEXED:  # most texts begin on trees, and end where keys are picked
        variant = replace(variant, window=random.choice((5, 12, 16, 24, 32, 48, 64)))
        if random.random() < 0.9:
            turns = tuple(without(_with_one_row(turn), "use_cache") for turn in turns)
    if family.endswith(ENCODER):
        turns = tuple(map(_for_encoder_decoders, turns))
    if images:
        turns = tuple(map(_with_images, turns))
    return Case(seed, family, variant, attention, double, turns)


def without(turn: Turn, *settings: str) -> Turn:
    """The turn without some of its settings."""
    return replace(turn, settings={name: value for name, value in turn.settings.items() if name not in settings})


def _with_one_row(turn: Turn) -> Turn:
    """The turn with its longest prompt alone, without hidden tokens."""
    return replace(without(turn, "num_return_sequences"), prompts=(max(turn.prompts, key=len),), padding=(0,), holes=())


def _for_chains(turn: Turn) -> Turn:
    """The turn without settings that need trees."""
    drafting = {name: value for name, value in turn.drafting.items() if name != "pack_weights"}
    return replace(turn, drafting={"preset": "auto"} if drafting["preset"] == "paper" else drafting)


def _for_running_states(turn: Turn) -> Turn:
    return _for_chains(_with_one_row(turn))


def _for_encoder_decoders(turn: Turn) -> Turn:
    """The turn as a call by itself, without what has no meaning for a decoder."""
    return replace(_for_chains(without(turn, "guidance_scale", "prefill_chunk_size")), cache="")


def _with_images(turn: Turn) -> Turn:
    """The turn with images, unless it goes on from a cache, and without what is refused for them."""
    settings = dict(without(turn, "use_cache", "prefill_chunk_size").settings)
    if turn.cache:
        settings["use_cache"] = True
    prompts = tuple(tuple(token if token != IMAGE_TOKEN else 1 for token in row) for row in turn.prompts)
    return replace(turn, prompts=prompts, holes=(), settings=settings, images=turn.cache in ("", "empty"))


def _draw_turns(random: Random) -> list[Turn]:
    rows = random.choice((1, 1, 1, 2, 2, 3, 4))
    shape = random.random()
    if shape < 0.6:
        return [_draw_turn(random, rows, ours=True, cache="empty" if random.random() < 0.1 else "")]
    if shape < 0.75:  # calls that share nothing but the model
        makers = random.choice(((True, False, True), (True, True), (True, False), (False, True, True)))
        return [_draw_turn(random, random.choice((1, rows)), ours, short=True) for ours in makers]
    makers = random.choice(((False, True), (True, False), (True, True), (True, False, True), (False, True, False)))
    caches = [
        "empty" if random.random() < 0.3 else "",
        *(random.choice(("whole", "whole", "tail")) for _ in makers[1:]),
    ]
    turns = [
        _draw_turn(random, rows, ours, cache, short=True, later=number > 0)
        for number, (ours, cache) in enumerate(zip(makers, caches, strict=True))
    ]
    # A row that ends before others would leave padding inside of the next turn's text.
    endless = ("eos", "criterion", "stop_strings", "num_return_sequences", "use_cache", "min_new_tokens", "min_length")
    endless += ("forced_eos_token_id", "exponential_decay_length_penalty")
    for turn in turns:
        for name in endless:
            turn.settings.pop(name, None)
        turn.settings["return_dict_in_generate"] = True
        turn.settings["use_cache"] = True  # some configurations say otherwise, and then there is no cache to hand on
    return turns


def _draw_turn(
    random: Random, rows: int, ours: bool, cache: str = "", short: bool = False, later: bool = False
) -> Turn:
    longest = 12 if later else random.choice((1, 6, 16, 30, 60))
    lengths = [longest] * rows
    if not later and random.random() < 0.7:
        lengths = [random.randint(1, longest) for _ in range(rows - 1)] + [longest]
        random.shuffle(lengths)
    extra = random.randint(1, 6) if not later and random.random() < 0.1 else 0  # hidden from every row
    padding = tuple(max(lengths) - length + extra for length in lengths)
    holes: tuple[int, ...] = ()
    if not later and random.random() < 0.08 and longest > 3:
        first = random.randint(1, longest + extra - 2)
        holes = tuple(range(first, min(first + random.randint(1, 4), longest + extra - 1)))
    settings = draw_settings(random, rows, 40 if short else 80)
    if cache:
        settings["use_cache"] = True  # anything else would contradict it
    return Turn(
        ours=ours,
        prompts=tuple(_draw_prompt(random, length) for length in lengths),
        padding=padding,
        holes=holes,
        settings=settings,
        drafting=_draw_drafting(random),
        cache=cache,
    )


def _draw_prompt(random: Random, length: int) -> tuple[int, ...]:
    """Tokens of which some come in runs that were there before."""
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 3 and random.random() < 0.4:
            start = random.randrange(len(tokens))
            tokens += tokens[start : start + random.randint(2, 8)]
        else:
            tokens.append(random.randrange(VOCABULARY) if random.random() < 0.5 else random.randrange(1, 12))
    return tuple(tokens[:length])


def _draw_drafting(random: Random) -> dict[str, Any]:
    preset = random.choice(("auto",) * 5 + ("paper",) * 3 + _OTHER_PRESETS)
    values: dict[str, Any] = {"preset": preset}
    if preset in ("auto", "token_recycling", "context_matches") and random.random() < 0.8:
        values["step_budget"] = random.choice((1, 2, 4, 8, 16, 32, 64, 128))
    if preset == "auto" and random.random() < 0.15:
        values["memory"] = "process"
    if preset == "paper":
        values |= {
            "window_size": random.randint(1, 12),
            "ngram_size": random.randint(2, 6),
            "guess_set_size": random.randint(1, 10),
            "pool_from_prompt": random.random() < 0.5,
            "share_pool": random.random() < 0.2,
        }
    if preset == "jacobi":
        values["block_size"] = random.randint(1, 16)
    if random.random() < 0.25:
        values["engine"] = "static"
    if random.random() < 0.1:
        values["pack_weights"] = True
    return values


def _described(turn: Turn) -> str:
    words = [turn.entry if turn.ours else "plain", f"rows={len(turn.prompts)} of {max(map(len, turn.prompts))}"]
    words += [f"padding={list(turn.padding)}"] if any(turn.padding) else []
    words += [f"holes={list(turn.holes)}"] if turn.holes else []
    words += [f"cache={turn.cache}"] if turn.cache else []
    for name in ("images", "gap", "mixed", "change", "change_after"):
        value = getattr(turn, name)
        words += [f"{name}={value!r}"] if value != getattr(Turn, name) else []
    return " ".join([*words, _listed(turn.settings), f"[{_listed(turn.drafting)}]" if turn.ours else ""])


def _listed(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
