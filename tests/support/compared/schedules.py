"""Random schedules of an `Engine`: requests arrive, are cancelled and preempted, and share prefixes and memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from compared.calls import call
from compared.case import Case, Turn
from compared.models import load
from model_zoo import VOCAB_SIZE
from tiny.variant import Variant

HYBRIDS = ("qwen3_next", "granitemoehybrid", "mamba2", "lfm2", "minimax", "falcon_h1")
"""Families with running states, which draft single paths."""
TREES = ("zoo/llama", "zoo/mistral_sliding", "zoo/gpt2")


def draw_schedule(number: int, hybrids: bool = False) -> Case:
    """Return schedule `number`, for a model with running states or another model."""
    random = Random(f"schedule {number}")
    families = HYBRIDS if hybrids else TREES
    shared = tuple(random.randrange(1, VOCAB_SIZE) for _ in range(random.choice((0, 18, 18, 30))))
    room = random.choice((None, 110, 140))
    drafting = {
        "step_budget": random.choice((1, 12, 24) if room else (None, 1, 12, 24)),
        "memory": random.choice(("request", "process")),
    }
    engine = {
        "max_rows": random.choice((2, 4, 8)),
        "kv_tokens": room,
        "prompt_tokens": random.choice((3, 8, 512)),
        "prefix_cache": random.random() < 0.75,
    }
    turns = tuple(_draw_request(random, shared, drafting) for _ in range(random.randrange(2, 7)))
    case = Case(number, families[number % len(families)], Variant(), "sdpa", False, turns, engine=engine)
    return replace(case, turns=tuple(_with_true_prediction(random, case, turn) for turn in turns))


def _draw_request(random: Random, shared: tuple[int, ...], drafting: dict[str, Any]) -> Turn:
    """Draw a request, usually with the prefix `shared`."""
    tail = tuple(random.randrange(1, VOCAB_SIZE) for _ in range(random.randrange(1, 10))) * random.choice((1, 2, 4))
    prompt = tail if random.random() < 0.3 else shared + tail
    longest = 16 if len(prompt) > 20 else 48  # short prompts are admitted together, and outgrow the memory
    settings: dict[str, Any] = {"max_new_tokens": random.randrange(1, longest)}
    if random.random() < 0.5:
        settings |= {"do_sample": True, "seed": random.randrange(1000), "temperature": random.choice((0.7, 1.0))}
        settings["top_k"] = random.choice((0, 5))
    if random.random() < 0.3:
        settings["repetition_penalty"] = 1.3
    if random.random() < 0.3:
        eos = random.randrange(VOCAB_SIZE - 4)
        settings["eos"] = (eos, eos + 1, eos + 2, eos + 3)
    if random.random() < 0.2:
        settings["no_repeat_ngram_size"] = 2
    if random.random() < 0.2:
        settings["stop_strings"] = [f"w{random.randrange(1, 10)}"]
    if random.random() < 0.3:
        settings["processor"] = True
    extras: dict[str, Any] = {"priority": random.choice((0, 0, 1))}
    if random.random() < 0.4:
        extras["group"] = "one"
    if random.random() < 0.2:
        extras["logprobs"] = random.randrange(3)
    if random.random() < 0.2:
        extras["prediction"] = [random.randrange(VOCAB_SIZE) for _ in range(8)]
    return Turn(
        *(True, (prompt,), (0,)),
        settings=settings,
        drafting=drafting,
        arrival=random.randrange(10),
        cancelled=random.randrange(1, 6) if random.random() < 0.2 else None,
        extras=extras,
    )


def _with_true_prediction(random: Random, case: Case, turn: Turn) -> Turn:
    """Return the request with a prediction that is right but for one token, if it has one; usually."""
    if "prediction" not in turn.extras or random.random() < 0.3:
        return turn
    text = call(load(case)[1], turn, None, ours=False).text
    text[random.randrange(len(text))] = 1
    return replace(turn, extras=turn.extras | {"prediction": text})
