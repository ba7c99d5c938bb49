"""Cases of the fuzzer, each drawn from one number: all families of models, and all arguments of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from compared.case import Case, Turn
from compared.settings import draw_settings
from lookahead.backends.transformers.miniature import VOCABULARY
from tiny.encoder_decoders import ENCODER
from tiny.families import INDEXED, keeps_running_state
from tiny.images import IMAGE_TOKEN
from tiny.variant import draw_variant

_OTHER_PRESETS = ("jacobi", "token_recycling", "context_matches", "autoregressive")


def draw_case(seed: int, families: Sequence[str], images: bool = False) -> Case:
    """Return case number `seed`; it also depends on `families`.

    Args:
        seed: Number of the case.
        families: Names of families to draw from.
        images: Whether prompts have images.
    """
    random = Random(f"fuzz {seed}")
    family = random.choice(families)
    variant = draw_variant(random)
    attention = "sdpa" if random.random() < 0.6 else "eager"
    double = random.random() < 0.12
    turns = tuple(_draw_turns(random))
    # Models with running states refuse most of the usual settings, which would test nothing.
    if keeps_running_state(family) and random.random() < 0.9:
        turns = tuple(_for_chains(_with_one_row(turn)) for turn in turns)
    if family in INDEXED:  # trees run until the layers begin to select keys
        variant = replace(variant, window=random.choice((5, 12, 16, 24, 32, 48, 64)))
        if random.random() < 0.9:
            turns = tuple(_with_one_row(turn).without("use_cache") for turn in turns)
    if family.endswith(ENCODER):
        turns = tuple(map(_for_encoder_decoders, turns))
    if images:
        turns = tuple(map(_with_images, turns))
    return Case(seed, family, variant, attention, double, turns)


def draw_drafting(random: Random) -> dict[str, Any]:
    """Draw arguments of `LookaheadConfig`."""
    preset = random.choice(("auto",) * 5 + ("paper",) * 3 + _OTHER_PRESETS)
    values: dict[str, Any] = {"preset": preset}
    if preset in ("auto", "token_recycling", "context_matches") and random.random() < 0.8:
        values["step_budget"] = random.choice((1, 2, 4, 8, 16, 32, 64, 128))
    if preset == "auto":
        values["memory"] = "process" if random.random() < 0.15 else "request"  # a case alone repeats the latter
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


def _with_one_row(turn: Turn) -> Turn:
    """Return the turn with only its longest prompt, without hidden tokens."""
    alone = turn.without("num_return_sequences")
    return replace(alone, prompts=(max(turn.prompts, key=len),), padding=(0,), holes=())


def _for_chains(turn: Turn) -> Turn:
    """Return the turn without settings that need trees."""
    drafting = {name: value for name, value in turn.drafting.items() if name != "pack_weights"}
    return replace(turn, drafting={"preset": "auto"} if drafting["preset"] == "paper" else drafting)


def _for_encoder_decoders(turn: Turn) -> Turn:
    """Return the turn as a separate call, without settings that do not apply to encoder-decoders."""
    return replace(_for_chains(turn.without("guidance_scale", "prefill_chunk_size")), cache="")


def _with_images(turn: Turn) -> Turn:
    """Return the turn with images unless it continues a cache, and without settings that images do not support."""
    turn = turn.without("use_cache", "prefill_chunk_size")
    if turn.cache:
        turn = turn.having(use_cache=True)
    prompts = tuple(tuple(token if token != IMAGE_TOKEN else 1 for token in row) for row in turn.prompts)
    return replace(turn, prompts=prompts, holes=(), images=turn.cache in ("", "empty"))


def _draw_turns(random: Random) -> list[Turn]:
    rows = random.choice((1, 1, 1, 2, 2, 3, 4))
    shape = random.random()
    if shape < 0.6:
        return [_draw_turn(random, rows, ours=True, cache="empty" if random.random() < 0.1 else "")]
    if shape < 0.75:  # calls with nothing in common but the model
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
    # A row that ends early would leave padding inside the next turn's text.
    endless = ("eos", "criterion", "stop_strings", "num_return_sequences", "use_cache", "min_new_tokens", "min_length")
    endless += ("forced_eos_token_id", "exponential_decay_length_penalty")
    # Some configurations turn the cache off, and then there is none to continue.
    return [turn.without(*endless).having(return_dict_in_generate=True, use_cache=True) for turn in turns]


def _draw_turn(
    random: Random, rows: int, ours: bool, cache: str = "", short: bool = False, later: bool = False
) -> Turn:
    longest = 12 if later else random.choice((1, 6, 16, 30, 60))
    lengths = [longest] * rows
    if not later and random.random() < 0.7:
        lengths = [random.randint(1, longest) for _ in range(rows - 1)] + [longest]
        random.shuffle(lengths)
    extra = random.randint(1, 6) if not later and random.random() < 0.1 else 0  # hidden in every row
    padding = tuple(max(lengths) - length + extra for length in lengths)
    holes: tuple[int, ...] = ()
    if not later and random.random() < 0.08 and longest > 3:
        first = random.randint(1, longest + extra - 2)
        holes = tuple(range(first, min(first + random.randint(1, 4), longest + extra - 1)))
    settings = draw_settings(random, rows, 40 if short else 80)
    if cache:
        settings["use_cache"] = True  # another value would contradict the cache
    prompts = tuple(_draw_prompt(random, length) for length in lengths)
    return Turn(ours, prompts, padding, holes, settings, draw_drafting(random), cache)


def _draw_prompt(random: Random, length: int) -> tuple[int, ...]:
    """Draw tokens, some of them in repeated runs."""
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 3 and random.random() < 0.4:
            start = random.randrange(len(tokens))
            tokens += tokens[start : start + random.randint(2, 8)]
        else:
            tokens.append(random.randrange(VOCABULARY) if random.random() < 0.5 else random.randrange(1, 12))
    return tuple(tokens[:length])
