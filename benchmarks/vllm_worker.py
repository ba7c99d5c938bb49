"""What `benchmarks vllm_drafts` runs in vLLM's environment: one engine, whose drafts come from each method in turn.

vLLM's own methods are its own objects, called with the arguments that vLLM gives them. They all draft for the same
engine in the same process, a few prompts each in turn, so that what else the machine does disturbs them alike. Each
keeps what it learned to itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

# One thread: those of numba, which vLLM's ngram starts, would make OpenMP run the model on several as well.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import vllm

METHODS = ("no drafts", "ngram", "suffix", "lookahead", "lookahead, full drafts")
PROMPT_TOKENS = 700

_BATCHES = 2
"""Of several requests at once the methods take turns after as many prompts as so many batches have: the faster they
take turns, the less of what else the machine does falls on one of them."""

Row = dict[str, Any]


class Switch:
    """A proposer that hands on to one of several."""

    def __init__(self, vllm_config: Any) -> None:
        self.config, self.active, self.runner = vllm_config, "no drafts", None
        speculative = vllm_config.speculative_config
        speculative.prompt_lookup_min, speculative.prompt_lookup_max = 2, 4
        self._drafted = speculative.num_speculative_tokens
        self.drafts = 0

    def begin(self) -> None:
        """Begin a round: nobody has learned anything."""
        # Here, for these import numba, beside which vLLM 0.32 does not start on CPUs.
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        from lookahead.integrations.vllm import LookaheadProposer

        config = self.config
        self.proposers: dict[str, Any] = {"ngram": NgramProposer(config), "suffix": SuffixDecodingProposer(config)}
        self._readers = {}
        for name, adaptive in zip(METHODS[3:], (True, False), strict=True):
            config.additional_config = {"lookahead": {"adaptive": adaptive}}
            self.proposers[name] = LookaheadProposer(config)
            self._model.compute_logits = self._plain
            self.proposers[name].load_model(self._model)
            self._readers[name] = self._model.compute_logits
        self._model.compute_logits = self._plain

    def load_model(self, model: Any) -> None:
        """Each proposer of this library reads the logits along, but only while it drafts."""
        self._model, self._plain = model, model.compute_logits

    def choose(self, name: str) -> None:
        """Let this method draft from now on."""
        self.active = name
        self._model.compute_logits = self._readers.get(name, self._plain)

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any, slot_mappings: Any
    ) -> list[list[int]]:
        """See vLLM."""
        if self.active == "no drafts":
            return [[] for _ in sampled]
        proposer = self.proposers[self.active]
        if self.active == "ngram":
            drafts = proposer.propose(self._drafted, sampled, lengths, tokens, slot_mappings=slot_mappings)
        elif self.active == "suffix":
            drafts = proposer.propose(self._drafted, self.runner.input_batch, sampled, slot_mappings=slot_mappings)
        else:
            drafts = proposer.propose(sampled, lengths, tokens, slot_mappings=slot_mappings)
        self.drafts += sum(map(len, drafts))
        return drafts


def prompts_of(path: Path, count: int) -> Iterator[str]:
    """Texts of a file of prompts, or of edits: what to do, the file, and the beginning of the new one."""
    for line in path.read_text(encoding="utf-8").splitlines()[:count]:
        row = json.loads(line)
        if "instruction" in row:
            yield f"# {row['instruction']}\n\n# Before:\n{row['input']}\n\n# After:\n"
        else:
            yield row.get("prompt") or row["turns"][0]


class Bench:
    """One engine and all methods.

    Args:
        options: What to measure.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        drafts = {"method": "custom_class", "model": "vllm_worker.Switch", "num_speculative_tokens": options.drafted}
        settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "disable_log_stats": True}
        model = vllm.LLM(str(options.model), speculative_config=drafts, max_num_seqs=max(options.batch, 2), **settings)
        torch.set_num_threads(1)
        self._engine, self._tokenizer = model.llm_engine, model.get_tokenizer()
        runner = self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._switch = runner.drafter
        self._switch.runner = runner
        self._count = self._shift = 0

    def texts(self, prompts: Sequence[list[int]], new: int) -> tuple[list[list[int]], Counter[str]]:
        """Continue prompts, so many at once; returns the texts, and counts of steps that carried no prompt and as many
        requests: how many they were, the tokens that they added, the tokens that were drafted for them, and their CPU
        seconds."""
        asked = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        texts: dict[str, list[int]] = {}  # of requests that have a token
        running: set[str] = set()
        counts: Counter[str] = Counter()
        waiting = list(prompts)[::-1]
        while waiting or running:
            while waiting and len(running) < self._options.batch:
                self._count += 1
                running.add(str(self._count))
                self._engine.add_request(str(self._count), {"prompt_token_ids": waiting.pop()}, asked)
            decodes = running <= texts.keys() and len(running) == min(self._options.batch, len(prompts))
            before = sum(map(len, texts.values()))
            drafts, begin = self._switch.drafts, time.process_time()
            outputs = self._engine.step()
            seconds = time.process_time() - begin
            for output in outputs:
                texts[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    running.remove(output.request_id)
            if decodes:
                counts["steps"] += 1
                counts["tokens"] += sum(map(len, texts.values())) - before
                counts["drafts"] += self._switch.drafts - drafts
                counts["microseconds"] += int(1e6 * seconds)
        return [texts[name] for name in sorted(texts, key=int)], counts

    def round(self, prompts: Sequence[list[int]], warm: list[int]) -> dict[str, Counter[str]]:
        """Continue all prompts with each method, after one that does not count; returns what `texts` counts, and how
        many texts are others than those without drafts."""
        options, switch = self._options, self._switch
        totals = {name: Counter[str]() for name in METHODS}
        size = 1 if options.batch == 1 else _BATCHES * options.batch
        groups = [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
        switch.begin()
        for turn, group in enumerate([[warm], *groups]):
            found: dict[str, list[list[int]]] = {}
            self._shift = (self._shift + 1) % len(METHODS)
            for name in (*METHODS[self._shift :], *METHODS[: self._shift]):
                switch.choose(name)
                found[name], counts = self.texts(group, options.new_tokens)
                if turn:
                    totals[name] += counts
            for name in METHODS if turn else ():
                totals[name]["differing"] += sum(map(list.__ne__, found[name], found["no drafts"]))
        return totals

    def rows(self, path: Path) -> Iterator[Row]:
        """A row for each method. Times are the median of the rounds."""
        options = self._options
        texts = [self._tokenizer(text).input_ids[-PROMPT_TOKENS:] for text in prompts_of(path, options.prompts + 1)]
        rounds = [self.round(texts[:-1], texts[-1]) for _ in range(options.rounds)]
        for name in METHODS:
            each = [totals[name] for totals in rounds]
            counts = sum(each, Counter[str]())
            row: Row = {"kind": "run", "task": path.stem, "drafted": options.drafted, "batch": options.batch}
            row |= {"method": name, "prompts": len(texts) - 1, "tokens": counts["tokens"], "steps": counts["steps"]}
            row |= {"drafts": counts["drafts"], "seconds": counts["microseconds"] / 1e6}
            times = [one["microseconds"] / 1000 / one["tokens"] for one in each]
            row |= {"S": row["tokens"] / row["steps"], "ms_per_token": median(times), "rounds": times}
            row |= {"drafts_per_step": row["drafts"] / row["steps"], "differing": counts["differing"]}
            if row["differing"]:
                row["error"] = f"{name}, {path.stem}, {options.drafted} drafted tokens: texts differ"
            yield row


def main() -> None:
    """Measure, and write the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--drafted", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--new-tokens", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--output", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    bench = Bench(options)
    rows = [row for path in options.files for row in bench.rows(path)]
    options.output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
