"""Try every family of causal language models of transformers, and write one row for each: trees, chains or refused.

    python tools/supported_models.py                    # all of them, a few minutes on one core
    python tools/supported_models.py qwen3 mamba2       # some of them; the other rows stay
    python tools/supported_models.py gemma3+image       # with an image in the prompt
    python tools/supported_models.py --output FILE      # into that file, beside the rows of benchmarks/results

For each family a tiny random model is built, as in the fuzzer. It generates texts by lookahead decoding and by its own
`generate`; classes that take images are tried again, with an image of random pixels in the prompt. The tables of
docs/models.md are made from the rows: `make tables RECORD=1`. Some families need packages of the extra `towers`.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torchvision_operators  # noqa: E402, F401

# isort: split
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import lookahead  # noqa: E402
from lookahead.backends.transformers.checks import runs_on_chains  # noqa: E402
from lookahead.bench.rows import kept_lines  # noqa: E402
from lookahead.drafting import compile_loops  # noqa: E402
from lookahead.errors import LookaheadError  # noqa: E402
from tiny.families import CannotBuild, build, image_families  # noqa: E402
from tiny.images import image_prompt  # noqa: E402
from tiny.variant import Variant  # noqa: E402

ROWS = ROOT / "benchmarks" / "results" / "models.jsonl"
TREES, CHAINS, REFUSED, NOT_TRIED, WRONG = "trees", "chains", "refused", "not tried", "WRONG"
_NEW_TOKENS = 40
IMAGE = "+image"
"""Suffix of a family's name: its prompt has an image."""


Row = dict[str, Any]


def read_rows(path: Path = ROWS) -> dict[str, Row]:
    """Read the rows of a file, by family."""
    lines = path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else []
    return {row["family"] + IMAGE * row["image"]: row for row in map(json.loads, lines)}


def row_of(name: str, kind: str, reason: str = "") -> Row:
    """Return the row of a family; `reason` says why lookahead does not run it."""
    family, image = name.removesuffix(IMAGE), name.endswith(IMAGE)
    names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if image else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    facts = {"kind": "family", "family": family, "image": image, "class": names.get(family, "")}
    return {**facts, "runs_on": kind, "reason": reason}


def try_family(family: str) -> Row:
    """Build a tiny model of `family`, and compare its texts with transformers' own."""
    kind = family.removesuffix(IMAGE)
    name = next((name for name in image_families() if name.partition("/")[0] == kind), "") if kind != family else kind
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    try:
        model = build(name, Variant(window=64), "sdpa")
        prompt = {"input_ids": ids} if kind == family else image_prompt(model, ids.tolist(), 0)
    except CannotBuild as error:
        return row_of(family, NOT_TRIED, _in_words(str(error)))
    try:
        tried = model.generate(**prompt, max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
        if not all(bool(torch.isfinite(logits).all()) for logits in tried.logits):
            raise ArithmeticError("its logits are not finite")
    except Exception as error:
        return row_of(family, NOT_TRIED, _in_words(f"its own generate fails: {type(error).__name__}: {error}"))
    try:
        way = CHAINS if runs_on_chains(model) else TREES
        ours = _texts(model, lookahead.generate, prompt)
    except LookaheadError as error:
        return row_of(family, REFUSED, _in_words(str(error)))
    same = all(map(torch.equal, ours, _texts(model, type(model).generate, prompt)))
    return row_of(family, way if same else WRONG)


def _texts(model: PreTrainedModel, generate: Callable[..., Any], prompt: dict[str, Any]) -> list[torch.Tensor]:
    """Generate a greedy and a sampled text with `model`."""
    texts = []
    for sampled in (False, True):
        torch.manual_seed(0)
        texts.append(generate(model, **prompt, max_new_tokens=_NEW_TOKENS, do_sample=sampled, top_k=None))
    return texts


def write_rows(rows: Iterable[Row], path: Path) -> None:
    """Write a header with the versions, and the rows."""
    versions = {"python": platform.python_version(), "torch": torch.__version__.partition("+")[0]}
    header = {"kind": "header", "versions": {**versions, "transformers": transformers.__version__}}
    lines = [json.dumps(row, ensure_ascii=False) for row in [header, *rows]]
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _in_words(error: str) -> str:
    """Shorten an error for the cell of a table."""
    text = re.sub(r"^model=\w+ (with attn_implementation='\w+' )?", "", " ".join(error.split()))
    text = re.sub(r"\.? (Use model\.generate|call model\.eval).*$", "", text)
    text = text[:200] + "…" if len(text) > 200 else text.rstrip(";")
    return text.replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the families on the command line, by default all, and add their rows to the file."""
    compile_loops()  # otherwise the first families might have no drafts
    parser = argparse.ArgumentParser(description="Try families of models, and write a row for each.")
    parser.add_argument("families", nargs="*", help="all if none is named")
    parser.add_argument("--output", type=Path, default=ROWS, help=f"JSON lines ({ROWS})")
    given = parser.parse_args(arguments)
    kept_lines(given.output, lambda row: row.get("kind") == "header", restart=True)  # refuses a file of something else
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    warnings.simplefilter("ignore")
    rows = read_rows()
    images = [name.partition("/")[0] + IMAGE for name in image_families()]
    for family in given.families or [*sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *images]:
        rows[family] = try_family(family)
        print(json.dumps(rows[family], ensure_ascii=False), flush=True)
    write_rows((rows[family] for family in sorted(rows)), given.output)
    return 1 if any(row["runs_on"] == WRONG for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
