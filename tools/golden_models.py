"""Models for an update of the golden record: the demo model, a model of stories, a tiny hybrid.

The text `gguf` is from the model of stories, run on chains like llama.cpp's models with a running state. Drafters see
only the predictions of an engine, and a GGUF file of the model has the same ones.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from golden_record import LISTED, Listed, Recording, Sampling
from lookahead.core.forest import lay_out
from lookahead.core.token_tree import TokenTree
from lookahead.demo import DEMO_PROMPT, demo_model_path

SAMPLED = Sampling(temperature=0.8, top_k=50, top_p=0.95)


class Asked:
    """Function that runs a model on text and tree in one pass, and returns its predictions.

    Args:
        model: A transformers model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def __call__(self, text: list[int], tree: TokenTree) -> dict[int, Listed]:
        """Return the likeliest tokens after each node (`golden_record.Ask`)."""
        layout = lay_out(tree)
        size, before = len(text) + len(tree), len(text)
        ids = torch.tensor([text + layout.tokens.tolist()])
        arguments: dict[str, Any] = {}
        if any(parent != node - 1 for node, parent in enumerate(tree.parents)):
            allowed = torch.ones(size, size, dtype=torch.bool).tril()
            allowed[before:, before:] = torch.from_numpy(layout.ancestor_mask())
            mask = torch.zeros(size, size).masked_fill(~allowed, torch.finfo(torch.float32).min)
            places = torch.cat([torch.arange(before), before + torch.from_numpy(layout.depths)])
            arguments = {"attention_mask": mask[None, None], "position_ids": places[None]}
        logits = self._model(input_ids=ids, use_cache=False, **arguments).logits[0, before:]
        likely, tokens = logits.float().softmax(-1).topk(LISTED)
        likely = likely.half().float()
        listed = zip(tokens.numpy().astype(np.int64), likely.numpy(), strict=True)
        return {int(layout.order[slot]): listing for slot, listing in enumerate(listed)}


def answered(model: Any, prompt: list[int], new: int, sampling: Sampling | None = None) -> Recording:
    """Generate a text with a model; the recording asks the model for further predictions."""
    ids = torch.tensor([prompt])
    more = {"do_sample": sampling is not None, **(asdict(sampling) if sampling else {})}
    torch.manual_seed(0)
    with torch.inference_mode():
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **more)[0].tolist()
    return Recording(prompt, text[len(prompt) :], sampling, ask=Asked(model))


def loaded(path: Path) -> tuple[Any, Any]:
    """Load a model and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.eval(), AutoTokenizer.from_pretrained(path, local_files_only=True)


def record(shared: Path) -> dict[str, Recording]:
    """Record the texts of all models; `shared` is the folder of data and models."""
    torch.set_num_threads(1)
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests/support"))
    from tiny.families import build
    from tiny.variant import Variant

    demo, encode = loaded(demo_model_path())
    stories, spell = loaded(shared / "models/stories260k")
    hybrid = build("granitemoehybrid", Variant(), "sdpa")
    function = (shared / "data/humaneval.jsonl").read_text(encoding="utf-8").splitlines()[45]
    beginnings = [json.loads(line)["prompt"] for line in (shared / "data/stories.jsonl").open(encoding="utf-8")]
    story_ids = [spell(text).input_ids for text in beginnings[:4]]
    few = [5, 11, 7, 3, 13, 2, 17, 19, 5, 11, 7, 3]
    recordings = {
        "demo": answered(demo, encode(json.loads(function)["prompt"]).input_ids, 112),
        "demo sampled": answered(demo, encode(DEMO_PROMPT).input_ids, 80, SAMPLED),
        "stories": answered(stories, story_ids[0], 128),
        "stories sampled": answered(stories, story_ids[1], 128, SAMPLED),
        "stories again": answered(stories, story_ids[2], 96),
        "gguf": answered(stories, story_ids[3], 96),
        "hybrid": answered(hybrid, few, 64),
        "hybrid sampled": answered(hybrid, few, 64, SAMPLED),
    }
    for name, file, number in (("edit", "code_edits", 1), ("trace", "agent_traces", 3), ("talk", "answers", 7)):
        row = json.loads((shared / f"data/{file}.jsonl").read_text(encoding="utf-8").splitlines()[number])
        prompt = encode(row.get("prompt") or row["input"]).input_ids[-500:]
        recordings[f"replay {name}"] = Recording(prompt, encode(row["output"]).input_ids[:200])
    return recordings
