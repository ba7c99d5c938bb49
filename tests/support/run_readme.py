"""Run the README's script and commands with the demo model, in a temporary folder.

Exits with 1 if one fails, or if transformers reports a deprecated name.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from lookahead.demo import demo_model_path

README = Path(__file__).parents[2] / "README.md"
MODEL = "Qwen/Qwen3-0.6B"
"""Model of the README's examples; the demo model is used instead, as it needs no network."""

COMMANDS = ("generate", "compare", "trace", "batch")
"""Commands that end by themselves within seconds."""


def main() -> int:
    text = README.read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = re.findall(rf"^lookahead (?:{'|'.join(COMMANDS)}) .*$", text, re.MULTILINE)
    model = str(demo_model_path())
    runs = [["-c", script.replace(MODEL, model)]]
    runs += [["-m", *shlex.split(line.replace(MODEL, shlex.quote(model)), comments=True)] for line in lines]
    failed = 0
    with TemporaryDirectory() as folder:
        prompts = Path(folder, "prompts.jsonl")
        prompts.write_text(json.dumps({"id": "1", "prompt": "def add(a, b):"}) + "\n", encoding="utf-8")
        for run in runs:
            name = "the script" if run[0] == "-c" else shlex.join(run[1:])
            call = [sys.executable, "-W", "error::FutureWarning", *run]
            done = subprocess.run(call, cwd=folder, capture_output=True, text=True, timeout=1800)
            is_wrong = done.returncode != 0 or "deprecated" in done.stderr
            failed += is_wrong
            print(f"{'FAILED' if is_wrong else 'ok    '} {name}", flush=True)
            if is_wrong:
                print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    commands = {line.split()[1] for line in lines}
    print(f"{len(runs)} snippets of the README, {failed} failed")
    return int(failed > 0 or commands != set(COMMANDS))


if __name__ == "__main__":
    sys.exit(main())
