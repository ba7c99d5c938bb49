"""Microseconds of drafting and learning per step, in runs of the demo model, beside those of another commit.

    python benchmarks/drafting_steps.py --base COMMIT [--turns N]

Two processes, one of each checkout, take turns. Counted is what steps book as drafting: all that happens before the
pass and after the tokens are kept. One line is one text at 16 nodes, the other 16 texts of a batch at 4 nodes each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

from worth import ROOT, Source

TEXTS, TOKENS, ROWS, NODES = 6, 128, 16, 4


def measure() -> dict[str, float]:
    """Microseconds per step of each line, with the library that this process imports."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import lookahead
    from lookahead import LookaheadConfig
    from lookahead.demo import demo_model_path

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True)
    source = (ROOT / "src/lookahead/core/token_tree.py").read_text(encoding="utf-8")
    prompts = [tokenizer(source[begin : begin + 600]).input_ids[:200] for begin in range(0, 9600, 600)]
    length = min(map(len, prompts))

    def run(rows: list[list[int]], nodes: int) -> tuple[float, int]:
        ids = torch.tensor([row[:length] for row in rows])
        output = lookahead.generate(
            model,
            ids,
            attention_mask=torch.ones_like(ids),
            lookahead_config=LookaheadConfig(step_budget=nodes),
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
        )
        return output.statistics.seconds.draft, output.statistics.steps

    run(prompts[:1], 16)  # compiles
    alone = [run([prompt], 16) for prompt in prompts[:TEXTS]]
    together = [run(prompts[:ROWS], NODES) for _ in range(3)][1:]
    lines = {"one text, 16 nodes": alone, f"{ROWS} rows of {NODES} nodes": together}
    return {name: 1e6 * sum(part for part, _ in runs) / sum(steps for _, steps in runs) for name, runs in lines.items()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="commit to compare with")
    parser.add_argument("--turns", type=int, default=3, help="turns of both (3)")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure()))
        return 0
    sources = {"base": Source(options.base).folder / "src", "here": ROOT / "src"}
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for _ in range(options.turns):
        for name, folder in sources.items():
            command = [sys.executable, __file__, "--base", options.base, "--measure"]
            environment = os.environ | {"PYTHONPATH": str(Path(folder)), "OMP_NUM_THREADS": "1"}
            output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows[name].append(json.loads(output.splitlines()[-1]))
    print("| microseconds a step | base | here | here / base |\n| --- | ---: | ---: | ---: |")
    for line in rows["base"][0]:
        base, here = (median(row[line] for row in rows[name]) for name in sources)
        print(f"| {line} | {base:.0f} | {here:.0f} | {here / base:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
