"""GRPO with TRL, with rollouts decoded by lookahead: one additional line, the same rewards and weights.

    make trl                                     # or, in its environment:
    python examples/trl_grpo.py --output rows.jsonl

Train the demo model for a few steps: plainly, with adaptive drafts, and with 16 nodes per step. Compare the rewards of
all steps and the final weights. Drafts come from the rollouts of earlier steps; the table shows their success while the
weights change, and without this memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

import lookahead
from lookahead import LookaheadConfig
from lookahead.bench.rows import kept_lines
from lookahead.demo import demo_model_path

STEPS, BLOCK, ROLLOUTS, TOKENS = 20, 5, 4, 48
RUNS = {
    "as many as pay": LookaheadConfig(),
    "16": LookaheadConfig(step_budget=16),
    "16, memory of a request": LookaheadConfig(step_budget=16, memory="request"),
}
PROMPTS = [
    "def add(a, b):",
    "class Stack:\n    def push(self, item):",
    "for line in file:",
    "import json\n\ndef load(path):",
]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """Reward lines with `return`."""
    return [sum("return" in line for line in text.splitlines()) - 0.01 * len(text) for text in completions]


def train(prepare: Callable[[PreTrainedModel], None]) -> tuple[PreTrainedModel, list[float], float]:
    """Return the trained model, the mean reward of each step, and the seconds of CPU time."""
    model = AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model_path(), padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prepare(model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = GRPOConfig(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=ROLLOUTS,
            num_generations=ROLLOUTS,
            max_completion_length=TOKENS,
            learning_rate=1e-5,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            seed=7,
        )
        rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
        trainer = GRPOTrainer(model, reward, args=arguments, train_dataset=rows, processing_class=tokenizer)
        begin = process_time()
        trainer.train()
        seconds = process_time() - begin
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    return model, rewards, seconds


class Counted:
    """`generate` of a model, with lookahead, and counts of tokens and steps for each call.

    Without counts, `lookahead.attach(model)` is enough.
    """

    def __init__(self, model: PreTrainedModel, config: LookaheadConfig) -> None:
        self._model, self._config = model, config
        self.calls: list[tuple[int, int]] = []
        model.generate = self.generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate like the model's own `generate`."""
        records: list[Any] = []
        config = self._config
        output = lookahead.generate(self._model, *args, lookahead_config=config, on_step=records.append, **kwargs)
        self.calls.append((sum(len(record.tokens) for record in records), len(records)))
        return output


def compare(nodes: str, plain: PreTrainedModel, expected: list[float]) -> dict[str, Any]:
    """Train with lookahead; return a comparison with the model and the rewards of plain training."""
    counted: list[Counted] = []
    drafted, rewards, seconds = train(lambda model: counted.append(Counted(model, RUNS[nodes])))
    weights = zip(plain.state_dict().values(), drafted.state_dict().values(), strict=True)
    same = rewards == expected and all(torch.equal(one, other) for one, other in weights)
    row = {"example": "trl_grpo", "kind": "run", "nodes": nodes, "same": same, "seconds": seconds}
    for first in range(0, STEPS, BLOCK):
        calls = counted[0].calls[first : first + BLOCK]
        tokens, steps = (sum(call[place] for call in calls) for place in (0, 1))
        row |= {f"S_{first + 1}": tokens / steps, f"reward_{first + 1}": sum(rewards[first : first + BLOCK]) / BLOCK}
    return row


def main() -> int:
    """Run the command; the exit status is 1 if a reward or a weight differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON lines")
    output = parser.parse_args().output
    if output is not None:  # refuse other files before the work
        kept_lines(output, lambda row: row.get("example") == "trl_grpo", restart=True)
    plain, expected, seconds = train(lambda model: None)
    rows = [compare(nodes, plain, expected) | {"plain_seconds": seconds} for nodes in RUNS]
    print(f"CPU seconds, all of training, plainly: {seconds:.1f}")
    for row in rows:
        print(f"nodes: {row['nodes']}; CPU seconds: {row['seconds']:.1f}")
        for first in range(1, STEPS, BLOCK):
            block = f"steps {first:2} - {first + BLOCK - 1:2}"
            print(f"  {block}: mean reward {row[f'reward_{first}']:.3f}, tokens per step {row[f'S_{first}']:.2f}")
        print("  rewards and weights are", "the same, bit for bit" if row["same"] else "NOT the same")
    if output is not None:
        output.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return int(not all(row["same"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
