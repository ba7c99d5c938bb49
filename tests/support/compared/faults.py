"""Cases like bug reports: models that change, small vocabularies, own generation loops and others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from compared.case import APART, ENTRIES, UNDO, Case, Turn
from compared.changes import EFFECTS, METHODS, OTHERS, PLACES, SHRUNK
from compared.draws import draw_case
from compared.settings import USERS_PROCESSORS, in_any_depth, with_tokens
from tiny.encoder_decoders import encoder_families
from tiny.families import family_names, image_families

USUAL = ("llama", "qwen3", "gemma3_text", "gpt2", "mistral", "mixtral", "phi3", "opt", "qwen3_next", "lfm2")
SEEING = tuple(f"{kind}/multimodal" for kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v"))
"""Classes with calls that write to the model."""
SKIPPING = ("roberta", "xlm-roberta", "camembert", "data2vec-text", "xmod", "xglm", "biogpt", "opt", "trocr")
"""Decoders; some of them skip pad tokens in position ids."""
BATCHED = ("num_return_sequences", "use_cache", "prefill_chunk_size")
"""Settings that do not apply to a single request, or are refused there."""


def draw_fault(seed: int) -> Case:
    """Return case number `seed`."""
    random = Random(f"fault {seed}")
    kind = random.choice([*KINDS, *["changed model"] * 3])
    case = replace(KINDS[kind](seed, random), kind=kind)
    together = ("threads", "engine", "started engine")
    if any(turn.entry in together for turn in case.turns):  # the model stores frequencies
        case = replace(case, variant=replace(case.variant, rope="default"))
    return case


def _base(seed: int, random: Random, families: Sequence[str], others: Callable[[], list[str]], calls: int = 1) -> Case:
    """Draw a case with at least `calls` turns, two times in three from `families`, else from `others`."""
    family = random.choice(families if random.random() < 0.67 else others())
    images = families is SEEING
    case = draw_case(seed, [family], images)
    turns = list(case.turns)
    while len(turns) < calls:
        again = draw_case(seed + 1_000_000 * len(turns), [family], images).turns[0]
        turns.append(replace(again, cache="", ours=True))
    if random.random() < 0.5:
        turns = [replace(turn, settings=_few(turn)) for turn in turns]
    if random.random() < 0.15:
        turns = [replace(turn, drafting=turn.drafting | {"fallback": "plain"}) for turn in turns]
    return replace(case, turns=tuple(turns))


def _few(turn: Turn) -> dict[str, Any]:
    """Return only the required settings of a turn."""
    required = ("max_new_tokens", "return_dict_in_generate", *(("use_cache",) if turn.cache else ()))
    return {name: value for name, value in turn.settings.items() if name in required}


def entered(turn: Turn, random: Random, entries: Sequence[str] = ENTRIES) -> Turn:
    """Return the turn through one of `entries`, without the settings that it does not accept."""
    if turn.cache or not turn.ours:
        entries = [entry for entry in entries if entry not in APART] or ["generate"]
    entry = random.choice(entries)
    left_out: tuple[str, ...] = ()
    if entry == "custom_generate":  # transformers does not pass these on
        left_out = ("streamer", "stop_strings")
    if entry in APART:
        left_out = BATCHED
    if entry == "threads":  # they share torch's generator
        left_out += ("do_sample",)
    turn = replace(turn.without(*left_out), entry=entry)
    if entry not in APART:
        return turn
    prompts = (*turn.prompts, *(row[::-1] + row[:3] for row in turn.prompts), turn.prompts[0] * 2)[:4]
    drafting = {name: value for name, value in turn.drafting.items() if name != "engine"}
    return replace(
        turn,
        prompts=prompts,
        padding=(0,) * len(prompts),
        holes=(),
        drafting=drafting,
        gap=random.choice((0, 0, 1, 3)),
        mixed=random.random() < 0.5,
    )


def _all_entered(case: Case, random: Random, entries: Sequence[str] = ENTRIES) -> Case:
    """Return the case with an entry point for each turn; if the next turn continues its cache, it is a single call."""
    followed = [bool(turn.cache) for turn in case.turns[1:]] + [False]
    calls = [entry for entry in entries if entry not in APART] or ENTRIES[:1]
    turns = [
        entered(turn, random, calls if continued else entries)
        for turn, continued in zip(case.turns, followed, strict=True)
    ]
    return replace(case, turns=tuple(turns))


def _of_vocabulary(turn: Turn, size: int) -> Turn:
    def within(token: int) -> int:
        return token % size

    return replace(turn, settings=with_tokens(turn.settings, within), prompts=in_any_depth(turn.prompts, within))


def _changed(seed: int, random: Random) -> Case:
    """Draw a call and one after a change, or an `Engine` during it; sometimes also a call after its undoing."""
    kind = random.choice([*PLACES, *["object"] * 4, *OTHERS])
    change = f"{kind}: {random.choice(list(EFFECTS))}" if kind in PLACES else kind
    if kind == "object":
        change = f"object: {random.choice(list(METHODS))}"
    entries = ENTRIES
    if change.startswith("object: generate"):  # `attach` replaces it
        entries = ("generate", "custom_generate")
    elif change.startswith(("sampling", "dropout")):  # threads share torch's generator
        entries = tuple(entry for entry in ENTRIES if entry != "threads")
    case = _base(seed, random, USUAL, family_names, calls=random.choice((2, 2, 3)))
    turns = list(_all_entered(case, random, entries).turns)
    if "engine" in entries and not any(turn.cache for turn in turns[1:]) and random.random() < 0.25:
        turns[1] = entered(turns[1], random, ("engine",))
    turn = replace(turns[1], change=change, ours=True)
    # A running engine compares only a part of each weight.
    if turn.entry == "engine" and not kind.startswith("row of a weight") and random.random() < 0.6:
        turn = replace(turn, change_after=random.choice((0, 1, 2, 3, 5, 8)))
        if turns[0].entry == "started engine":  # its thread could be within a step
            turns[0] = replace(turns[0], entry="engine")
    turns[1] = turn
    if len(turns) > 2 and not turns[2].cache and (kind in PLACES or kind == "object"):
        turns[2] = replace(turns[2], change=UNDO, ours=True)
    if change == "embeddings shrunk":
        turns = [turns[0], *(replace(_of_vocabulary(turn, SHRUNK), cache="") for turn in turns[1:])]
    return replace(case, turns=tuple(turns))


def _vocabulary(seed: int, random: Random) -> Case:
    case = _base(seed, random, USUAL, lambda: [*family_names(), *encoder_families()])
    size = random.choice((5, 8, 20, 21, 26, 30, 33, 50, 64, 79, 80, 94))
    turns = tuple(_of_vocabulary(turn, size) for turn in _all_entered(case, random).turns)
    return replace(case, variant=replace(case.variant, vocabulary=size), turns=turns)


def _own_loop(seed: int, random: Random) -> Case:
    case = _base(seed, random, USUAL, family_names)
    owner = random.choice(("class", "class", "class", "object", "layer wrapper"))
    what = random.choice(list(EFFECTS if owner == "layer wrapper" else METHODS))
    case = _all_entered(case, random, ENTRIES[:1] if f"{owner} {what}".startswith("object generate") else ENTRIES)
    first = replace(case.turns[0], change=f"{owner}: {what}")
    return replace(case, turns=(first, *case.turns[1:]))


def _without_cache(seed: int, random: Random) -> Case:
    known = [family for family in SKIPPING if family in family_names()]
    case = _base(seed, random, encoder_families(), lambda: known)
    pads = {"processor": "pads"} if random.random() < 0.7 else {}
    case = replace(case, turns=tuple(replace(turn, cache="") for turn in case.turns))
    case = _all_entered(case, random, ENTRIES[:4])
    settings = {"use_cache": False, **pads}
    return replace(case, turns=tuple(turn.without("prefill_chunk_size").having(**settings) for turn in case.turns))


def _images(seed: int, random: Random) -> Case:
    case = _base(seed, random, SEEING, image_families)
    entries = ("engine", "engine", "engine", "started engine", "threads", "generate")
    turns = []
    for turn in case.turns:  # an image must not end the prompt
        longer = tuple(row if len(row) > 1 else row * 2 for row in turn.prompts)
        padding = tuple(max(map(len, longer)) - len(row) for row in longer)
        turns.append(replace(turn, prompts=longer, padding=padding, cache="", images=True))
    return _all_entered(replace(case, turns=tuple(turns)), random, entries)


def _processors(seed: int, random: Random) -> Case:
    case = _base(seed, random, USUAL, family_names)
    settings: dict[str, Any] = {"processor": random.choice([kind for kind in USERS_PROCESSORS if kind is not True])}
    if random.random() < 0.5:
        settings |= {"do_sample": True, "seed": seed, "top_k": 0, "temperature": random.choice((0.5, 1.0))}
    if random.random() < 0.15:
        settings["criterion"] = "by row"
    case = replace(case, turns=tuple(turn.having(**settings) for turn in case.turns))
    return _all_entered(replace(case, double=case.double or random.random() < 0.1), random)


KINDS: dict[str, Callable[[int, Random], Case]] = {
    "changed model": _changed,
    "small vocabulary": _vocabulary,
    "own loop": _own_loop,
    "without a cache": _without_cache,
    "images in an engine": _images,
    "processors": _processors,
}
"""Functions that draw cases, by kind."""
