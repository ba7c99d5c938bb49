"""lm-evaluation-harness with lookahead: one additional line, the same results.

    make lm-eval                                 # or, in its environment:
    python examples/evaluate.py --output rows.jsonl

Evaluate the demo model on a generative task from a local file, once plainly and once with lookahead, and compare the
answers of all documents.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import lookahead
from lookahead.bench.rows import kept_lines
from lookahead.demo import demo_model_path

TASK = """
task: continue_code
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["\\n\\n\\n"], do_sample: false, max_gen_toks: 96}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
"""A task's YAML file; braces of templates are doubled for `format`."""

DOCUMENTS = 24


def write_task(folder: Path) -> None:
    """Write a file of prompts from the library's source, and the task that reads it."""
    sources = sorted(Path(lookahead.__file__).parent.glob("core/*.py"))
    functions = [part for path in sources for part in path.read_text().split("\n\n\n") if part.startswith("def ")]
    rows = [{"prompt": text[: len(text) // 2], "target": text[len(text) // 2 :]} for text in functions[:DOCUMENTS]]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "continue_code.yaml").write_text(TASK.format(file=folder / "documents.jsonl"))


def evaluate(model: PreTrainedModel, folder: Path) -> tuple[str, float]:
    """Return the results with all answers, as JSON, and the seconds of CPU time."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path())
    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu")
    begin = process_time()
    results: Any = simple_evaluate(
        wrapped, tasks=["continue_code"], task_manager=TaskManager(include_path=str(folder)), log_samples=True
    )
    seconds = process_time() - begin
    return json.dumps([results["results"], results["samples"]], default=str, sort_keys=True), seconds


def main() -> int:
    """Run the command; the exit status is 1 if the results differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines")
    output = parser.parse_args().output
    if output is not None:  # refuse other files before the work
        kept_lines(output, lambda row: row.get("example") == "evaluate", restart=True)
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    with tempfile.TemporaryDirectory() as name:
        write_task(Path(name))
        expected, plain_seconds = evaluate(model, Path(name))
        lookahead.attach(model)
        results, seconds = evaluate(model, Path(name))
    print(f"CPU seconds: {plain_seconds:.1f} plainly, {seconds:.1f} with lookahead")
    same = results == expected
    print("results and answers are", "the same" if same else "NOT the same")
    if output is not None:
        row = {"example": "evaluate", "kind": "run", "documents": DOCUMENTS, "same": same}
        output.write_text(json.dumps(row | {"plain_seconds": plain_seconds, "seconds": seconds}) + "\n")
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
