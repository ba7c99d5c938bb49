"""Try every family of causal language models of transformers, and write a page of what they are run on.

    python tools/supported_models.py                    # all of them, a few minutes on one core
    python tools/supported_models.py qwen3 mamba2       # some of them; the other rows stay
    python tools/supported_models.py gemma3+image       # with an image in the prompt
    python tools/supported_models.py --output FILE      # that page instead of docs/models.md, with its other rows

Of each family a tiny random model is built, as the fuzzer does it, and asked for a text by lookahead decoding and by
its own `generate`; those of classes that see images once more, with an image of random pixels in the prompt.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import lookahead  # noqa: E402
from fuzz.families import CannotBuild, build, image_families  # noqa: E402
from fuzz.images import image_prompt  # noqa: E402
from fuzz.variant import Variant  # noqa: E402
from lookahead.backends.transformers import runs_on_chains  # noqa: E402
from lookahead.errors import LookaheadError  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
TREES, CHAINS, REFUSED, NOT_TRIED, WRONG = "trees", "chains", "refused", "not tried", "WRONG"
_NEW_TOKENS = 40
IMAGE = "+image"
"""Behind the name of a family: with an image in the prompt."""

_INTRODUCTION = """\
# Models

What happens to each of the {count} families that transformers {version} maps to causal language models
(`AutoModelForCausalLM`). `tools/supported_models.py` wrote this page: of each family it built a tiny random model, and
compared the text of lookahead decoding with that of the model's own `generate`, greedy and sampled.

- **trees**: exact, with all that the other pages describe.
- **chains**: exact; a draft is one path, not a tree, as the model keeps a running state or does not honour the masks
  and positions of trees. One row at a time, without hidden tokens; every preset but `"paper"`.
- **refused**: an error says why, before anything is generated.
- **not tried**: no tiny model could be built. Such a model is tried when it is used, like all others.

A family is judged by its default configuration. What a model of your own can do is found out at its first call, from
its own configuration; see [Architecture](architecture.md#what-the-transformers-backend-takes-care-of).

{summary}. Python {python}, torch {torch}, transformers {version}.

"""
_TABLE = """\
| family | class | runs on | why |
| --- | --- | --- | --- |
"""
_IMAGES = """
## With images

The same for the classes that see images (`AutoModelForImageTextToText`), with an image of random pixels in the prompt:
the model's own prefill reads it, and steps of tokens alone follow; see
[Compatibility](compatibility.md#images-and-sound). A class whose tower could not be built or fed so small is not tried
here but when it is used: its check at the first call says whether it is exact.

{summary}.

"""


@dataclass(frozen=True)
class Row:
    """What came of a family.

    Attributes:
        family: Its model type.
        kind: How it runs.
        reason: Why it does not, if so.
    """

    family: str
    kind: str
    reason: str = ""

    def line(self) -> str:
        """The row of the table."""
        names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if self.sees else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        return f"| `{self.family}` | {names.get(self.family.removesuffix(IMAGE), '')} | {self.kind} | {self.reason} |"

    @property
    def sees(self) -> bool:
        """Whether the prompt had an image."""
        return self.family.endswith(IMAGE)


def written_rows() -> dict[str, Row]:
    """The rows of the page as it is."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    found = re.findall(r"^\| `([\w.+-]+)` \| \w* \| ([\w ]+) \| (.*) \|$", text, re.MULTILINE)
    return {family: Row(family, kind, reason.strip()) for family, kind, reason in found}


def try_family(family: str) -> Row:
    """Build a tiny model of `family` and compare its texts."""
    kind = family.removesuffix(IMAGE)
    name = next((name for name in image_families() if name.partition("/")[0] == kind), "") if kind != family else kind
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    try:
        model = build(name, Variant(window=64), "sdpa")
        prompt = {"input_ids": ids} if kind == family else image_prompt(model, ids.tolist(), 0)
    except CannotBuild as error:
        return Row(family, NOT_TRIED, _in_words(str(error)))
    if kind != family:
        try:
            model.generate(**prompt, max_new_tokens=2)
        except Exception as error:
            return Row(family, NOT_TRIED, _in_words(f"its own generate fails: {type(error).__name__}: {error}"))
    try:
        way = CHAINS if runs_on_chains(model) else TREES
        ours = _texts(model, lookahead.generate, prompt)
    except LookaheadError as error:
        return Row(family, REFUSED, _in_words(str(error)))
    same = all(map(torch.equal, ours, _texts(model, type(model).generate, prompt)))
    return Row(family, way if same else WRONG)


def _texts(model: PreTrainedModel, generate: Callable[..., Any], prompt: dict[str, Any]) -> list[torch.Tensor]:
    """A greedy text of `model`, and a sampled one."""
    texts = []
    for sampled in (False, True):
        torch.manual_seed(0)
        texts.append(generate(model, **prompt, max_new_tokens=_NEW_TOKENS, do_sample=sampled, top_k=None))
    return texts


def page(rows: list[Row]) -> str:
    """The page with `rows`."""
    text, images = [row for row in rows if not row.sees], [row for row in rows if row.sees]
    introduction = _INTRODUCTION.format(
        count=len(text),
        version=transformers.__version__,
        python=platform.python_version(),
        torch=torch.__version__.partition("+")[0],
        summary=_summary(text),
    )
    seen = _IMAGES.format(summary=_summary(images)) + _table(images) if images else ""
    return introduction + _table(text) + seen


def _summary(rows: list[Row]) -> str:
    counts = Counter(row.kind for row in rows)
    words = [f"{counts[kind]} {kind}" for kind in (TREES, CHAINS, REFUSED, NOT_TRIED, WRONG) if counts[kind]]
    return ", ".join(words).capitalize()


def _table(rows: list[Row]) -> str:
    return _TABLE + "\n".join(row.line() for row in rows) + "\n"


def _in_words(error: str) -> str:
    """An error in the cell of a table."""
    text = re.sub(r"^model=\w+ (with attn_implementation='\w+' )?", "", " ".join(error.split()))
    text = re.sub(r"\.? (Use model\.generate|call model\.eval).*$", "", text)
    text = text[:200] + "…" if len(text) > 200 else text.rstrip(";")
    return text.replace("|", "\\|").replace("<", "&lt;")


def main() -> int:
    """Try the families that the command line names, or all, and write the page with what it says of the others."""
    parser = argparse.ArgumentParser(description="Try families of models, and write a page of them.")
    parser.add_argument("families", nargs="*", help="all if none is named")
    parser.add_argument("--output", type=Path, default=PAGE, help=f"the page ({PAGE})")
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    warnings.simplefilter("ignore")
    rows = written_rows()
    images = [name.partition("/")[0] + IMAGE for name in image_families()]
    for family in given.families or [*sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), *images]:
        rows[family] = try_family(family)
        print(rows[family].line(), flush=True)
    given.output.write_text(page([rows[family] for family in sorted(rows)]), encoding="utf-8")
    return 1 if any(row.kind == WRONG for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
