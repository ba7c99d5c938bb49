"""Tables of cases, and the functions that draw a case from its number.

Each case has its own random state, so it is independent of the number and order of cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from random import Random
from typing import Any

from transformers import AutoTokenizer

from compared.case import APART, Case, zoo_case
from compared.draws import draw_case, draw_drafting
from compared.faults import draw_fault, entered
from compared.outcome import EQUAL, WRONG, Outcome, run_case
from compared.ranks import run_on_ranks
from compared.schedules import draw_schedule
from compared.settings import NEED_AN_END, PROCESSORS, STOPPING, WARPERS, WATERMARKS, Draws, with_tokens
from lookahead.demo import DEMO_PROMPT, demo_model_path
from model_zoo import ARCHITECTURES, DEMO, ROPE_CONTEXT, VOCAB_SIZE, build, greedy, position_limit
from tiny.encoder_decoders import encoder_families
from tiny.families import INDEXED, family_names, image_families, keeps_running_state

ZOO = tuple(ARCHITECTURES)
END = 1
"""An end token that no setting forbids."""
MODEL_SEEDS = 4
"""Number of sets of weights of each architecture."""

OF_THE_TEXT: Draws = {
    **{name: draw for name, draw in PROCESSORS.items() if name != "remove_invalid_values"},
    **{name: STOPPING[name] for name in NEED_AN_END},
    **WATERMARKS,
    "forced_eos_token_id": STOPPING["forced_eos_token_id"],
    "encoder_no_repeat_ngram_size": lambda random: random.randint(1, 3),
    "allowed": lambda random: random.randint(2, 7),
    "negative_prompt_ids": lambda random: tuple(random.choices(range(VOCAB_SIZE), k=random.randint(1, 6))),
}
"""Settings that change logits, with and without sampling."""
SETTINGS = ("plain", "plain with eos", *WARPERS, *OF_THE_TEXT, "remove_invalid_values")
"""Purposes of cases of settings."""
_NEED = {*NEED_AN_END, "forced_eos_token_id"}
FOR_ROWS = tuple(name for name in OF_THE_TEXT if name not in ("guidance_scale", "negative_prompt_ids", "min_length"))
"""Settings of batches; several have a state for each row."""


def greedy_case(number: int, names: Sequence[str] = ZOO, engine: str = "dynamic") -> Case:
    """Draw a case of greedy text; architectures take turns."""
    name, random = _turn(number, names, "greedy")
    weights, attention = random.randrange(MODEL_SEEDS), random.choice(ARCHITECTURES[name].attention)
    model = build(name, weights, attention)
    prompt = _motif(random)
    # Long candidates are accepted once the text repeats itself.
    prompt += greedy(model, prompt, random.choice((0, 0, random.randint(1, 24))))
    padding = random.choice((0, 0, 0, random.randint(1, 6)))
    new_tokens = _fitting(name, len(prompt) + padding, random.randint(20, 60))
    drafting = _drafting(random) | {"engine": engine}
    case = zoo_case(name, prompt, weights=weights, attention=attention, drafting=drafting, padding=padding)
    settings: dict[str, Any] = {"max_new_tokens": new_tokens}
    if random.random() < 0.5:
        text = greedy(model, prompt, new_tokens)
        settings["eos"] = tuple(random.choice(text[5:] or text) for _ in range(random.choice((1, 3))))
    return replace(case.having(**settings), seed=number)


def sampled_case(number: int, names: Sequence[str] = SETTINGS, model: str = "") -> Case:
    """Draw a text with a leading setting, in turn, and others; usually sampled, with `model` if not empty."""
    leading, random = _turn(number, names, "sampled")
    name = model or (DEMO if random.random() < 0.25 else random.choice(ZOO))
    samples = leading in WARPERS or random.random() < 0.7
    prompt = _code(random) if name == DEMO else _motif(random)
    size = build(DEMO).config.vocab_size if name == DEMO else VOCAB_SIZE
    possible = OF_THE_TEXT | (WARPERS if samples else {})
    settings = _mixed(random, leading, possible)
    if "allowed" in settings:
        settings["allowed"] = (size, settings["allowed"])
    if leading == "plain with eos" or _NEED & settings.keys() or random.random() < 0.2:
        settings["eos"] = STOPPING["eos"](random) if random.random() < 0.7 else ()
    if samples:
        settings = {"do_sample": True, "seed": random.randrange(1 << 31), "top_k": 0} | settings
    if settings.get("processor"):
        settings["processor"] = random.choice((True, "fatigue"))

    def of_the_text(token: int) -> int:
        """Return a token of the prompt, which has an effect, or any other."""
        return prompt[token % len(prompt)] if token % 3 else token * 37 % size

    # transformers recomputes Phi-3's cache at a certain length, which includes padding.
    padding = 0 if name == "phi3_long_rope" else random.choice((0, 0, 0, random.randint(1, 5)))
    drafting = _drafting(random)
    case = zoo_case(
        name,
        prompt,
        weights=random.randrange(MODEL_SEEDS) if name != DEMO else 0,
        attention=random.choice(ARCHITECTURES[name].attention) if name != DEMO else "sdpa",
        drafting=drafting,
        padding=padding,
        max_new_tokens=_fitting(name, len(prompt) + padding, random.randint(12, 48)),
        **_with_end(settings, of_the_text),
    )
    return replace(case, seed=number, kind=leading)


def batch_case(number: int, names: Sequence[str] = ZOO, sampled: bool = False) -> Case:
    """Draw rows of different lengths: one call with scores, one without a dict, sometimes a request or call per row.

    The rows of a batch advance at different speeds, have trees of different sizes and end in different steps.
    """
    name, random = _turn(number, names, "batch sampled" if sampled else "batch")
    longest = random.randint(1, 20)
    prompts = [_row(random, longest) for _ in range(random.randint(2, 5))]
    settings: dict[str, Any] = {"max_new_tokens": _fitting(name, max(map(len, prompts)), random.randint(6, 32), True)}
    if random.random() < 0.6:
        settings["eos"] = _ends(random)
    if random.random() < 0.25:
        settings["criterion"] = _ends(random)
    if random.random() < 0.5:
        chosen = random.sample(FOR_ROWS, random.choice((1, 1, 2, 3)))
        settings |= {name: OF_THE_TEXT[name](random) for name in chosen if "eos" in settings or name not in _NEED}
    if "allowed" in settings:
        settings["allowed"] = (VOCAB_SIZE, settings["allowed"])
    if "green list" in settings:
        settings.pop("SynthID", None)
    if (returns := random.choice((1, 1, 1, 1, 2, 3))) > 1:
        settings |= {"num_return_sequences": returns, "do_sample": True, "top_k": 1}
    if sampled:
        settings |= {"do_sample": True, "seed": random.randrange(1000), "top_k": random.choice((0, 0, 5, 20))}
        settings["temperature"] = random.choice((0.3, 0.7, 1.0, 1.5))
        settings |= random.choice(({}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.8}))
    weights, attention = random.randrange(MODEL_SEEDS), random.choice(ARCHITECTURES[name].attention)
    settings = _with_end(settings, lambda token: token % VOCAB_SIZE)
    case = zoo_case(name, *prompts, weights=weights, attention=attention, drafting=_drafting(random), **settings)
    turn = case.turns[0]
    seen = {"streamer": True} if random.random() < 0.3 else {}
    returned = {"output_scores": True, "output_logits": True} if random.random() < 0.3 else {}
    # A call that returns no cache need not pad its rows.
    turns = [turn.having(**seen, **returned), turn.having(**seen, return_dict_in_generate=False)]
    if random.random() < 0.3 and "rope_parameters" not in ARCHITECTURES[name].overrides:
        turns.append(entered(turn, random, APART[:2]))
    return replace(case, seed=number, turns=tuple(turns))


def _turn(number: int, names: Sequence[str], what: str) -> tuple[str, Random]:
    """Return the next name in turn, and the random state of the case."""
    turn, place = divmod(number, len(names))
    return names[place], Random(f"{what} {names[place]} {turn}")


def _motif(random: Random) -> tuple[int, ...]:
    """Draw random tokens, half of the time a repeated short motif."""
    motif = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, 12))]
    return tuple(motif * random.choice((1, random.randint(2, 3))))


def _row(random: Random, longest: int) -> tuple[int, ...]:
    """Draw up to `longest` random tokens, half of the time a repeated short motif."""
    length = random.randint(1, longest)
    motif = random.choices(range(1, VOCAB_SIZE), k=random.choice((length, random.randint(1, 4))))
    return tuple((motif * length)[:length])


@cache
def _demo_tokens() -> tuple[int, ...]:
    return tuple(AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)(DEMO_PROMPT).input_ids)


def _code(random: Random) -> tuple[int, ...]:
    """Draw a piece of code for the demo model."""
    start = random.randrange(len(_demo_tokens()) - 8)
    return _demo_tokens()[start : start + random.randint(8, 80)]


def _ends(random: Random) -> tuple[int, ...]:
    """Draw stop tokens, which some rows meet soon, and others late or never."""
    return tuple(sorted(random.sample(range(1, VOCAB_SIZE), random.randint(1, 9))))


def _mixed(random: Random, leading: str, possible: Draws) -> dict[str, Any]:
    """Draw the leading setting, and others that are compatible with it."""
    if leading == "remove_invalid_values":
        return {
            leading: True
        }  # it replaces minus infinity by numbers that overflow in other settings, in transformers too
    others = sorted({*possible} - {leading})
    names = [leading, *random.sample(others, random.choice((0, 0, 1, 2, 3, 5)))]
    watermarks = [name for name in names if name in WATERMARKS]
    return {name: possible[name](random) for name in names if name in possible and name not in watermarks[1:]}


def _with_end(settings: dict[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    """Return the settings with `change` applied to their tokens, and `END` as an end token but in no other role."""
    settings = with_tokens(settings, lambda token: max(change(token), END + 1))
    if "forced_eos_token_id" in settings:
        settings["forced_eos_token_id"] = END
    return settings | ({"eos": (END, *settings["eos"])} if "eos" in settings else {})


def _drafting(random: Random) -> dict[str, Any]:
    """Draw drafting as in the fuzzer, but more of the paper's method with its large trees, and steps of any shape."""
    drafting = max(draw_drafting(random), draw_drafting(random), key=lambda one: one["preset"] == "paper")
    drafting = drafting | {"engine": "dynamic"}
    if drafting["preset"] == "paper":
        drafting["pool_from_output"] = random.random() < 0.5
    if drafting["preset"] == "jacobi":
        drafting["max_iterations"] = random.choice((None, random.randint(1, 8)))
    if drafting["preset"] in ("paper", "jacobi"):
        drafting["seed"] = random.randrange(1000)
    return drafting


def _fitting(name: str, length: int, new_tokens: int, rows: bool = False) -> int:
    """Return `new_tokens`, or the number of positions left after `length` tokens if that is less.

    If RoPE depends on the longest row of a batch, rows differ from single calls, in transformers as here; such models
    are compared only below that length.
    """
    limit = position_limit(name) if name != DEMO else None
    if rows and "rope_parameters" in ARCHITECTURES[name].overrides:
        limit = ROPE_CONTEXT
    return new_tokens if limit is None else min(new_tokens, limit + 1 - length)  # the last token is not read


@dataclass(frozen=True)
class Table:
    """Cases of one kind.

    Attributes:
        about: Description.
        draw: Function that draws a case from its number.
        strict: Whether a difference by rounding counts as wrong: models of the zoo have few near-ties.
        names: Families to draw from. A family is dropped after a few cases that do not run for the same reason.
        run: Function that runs a case.
    """

    about: str
    draw: Callable[[int], Case | None]
    strict: bool = False
    names: Callable[[], list[str]] = list
    run: Callable[[Case], Outcome] = run_case

    def judge(self, case: Case) -> Outcome:
        """Run a case and return its outcome."""
        outcome = self.run(case)
        if self.strict and outcome.kind not in (EQUAL, WRONG):
            return replace(outcome, kind=WRONG, detail=f"{outcome.kind}: {outcome.detail}")
        return outcome


def _stateful(number: int) -> Case | None:
    case = draw_case(number, family_names())
    return case if keeps_running_state(case.family) else None


def _ranks_case(number: int) -> Case:
    """Draw calls of other tables, on 1 to 4 ranks in turn."""
    random, kind = Random(f"ranks {number}"), number // 4 % 4
    draws = (greedy_case, sampled_case, batch_case, partial(batch_case, sampled=True))
    case = draws[kind](number // 4)
    turn = case.turns[0].without("criterion", "allowed")  # custom code may not treat rows separately
    if kind > 1 and turn.settings.get("processor"):
        turn = turn.without("processor")
    if kind == 3 and turn.drafting["preset"] not in ("paper", "jacobi", "autoregressive"):
        # Rows draw from one generator in the order of their steps, so texts are equal only if steps are.
        turn = replace(turn, drafting={"preset": "paper"})
    turn = turn.having(streamer=True)
    if random.random() < 0.2:
        turn = turn.having(max_time=600.0)  # a criterion that reads the clock, so one rank decides
    if random.random() < 0.2:
        turn = turn.having(output_logits=True)
    return replace(case, seed=number, turns=(turn,), ranks=1 + number % 4)


TABLES = {
    "all": Table("every family of causal models", lambda number: draw_case(number, family_names()), names=family_names),
    "running states": Table("only families with running states", _stateful, names=family_names),
    "images": Table(
        "only prompts with images, of classes that see them",
        lambda number: draw_case(number, image_families(), images=True),
        names=image_families,
    ),
    "encoders": Table(
        "only models with an encoder for text or speech",
        lambda number: draw_case(number, encoder_families()),
        names=encoder_families,
    ),
    "indexed": Table(
        "only models whose layers pick the keys they attend to",
        lambda number: draw_case(number, INDEXED),
        names=lambda: list(INDEXED),
    ),
    "faults": Table(
        "changed models, small vocabularies, own loops, no cache, images in engines and others", draw_fault
    ),
    "greedy": Table("greedy texts of the model zoo", greedy_case, strict=True),
    "static": Table("the same by steps of fixed shapes", partial(greedy_case, engine="static"), strict=True),
    "sampled": Table("all settings that change logits, seed for seed", sampled_case, strict=True),
    "batches": Table("ragged batches", batch_case, strict=True),
    "sampled batches": Table("the same, sampled", partial(batch_case, sampled=True), strict=True),
    "schedules": Table("requests of an engine that come, go and are preempted", draw_schedule, strict=True),
    "hybrid schedules": Table("the same with running states", partial(draw_schedule, hybrids=True), strict=True),
    "ranks": Table("calls of the tables above on several ranks", _ranks_case, strict=True, run=run_on_ranks),
}
