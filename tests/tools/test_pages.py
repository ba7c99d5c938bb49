"""Code on the pages: Python runs, commands parse unchanged, links have a target.

A block that cannot run here has `<!-- not run: REASON -->` in the line before it. The blocks of a page run in order
and share their names.
"""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import command
from lookahead.cli.app import app
from lookahead.demo import demo_model_path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>.+) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```", re.M | re.S)
_PROGRAMS = re.compile(r"(?:[A-Z_]+=\S+ )*(?:python benchmarks|lookahead|make) ")
MODEL = "Qwen/Qwen3-0.6B"
"""Model of the README's example; the tests use the demo model instead."""
TRIED_ELSEWHERE = {"extending.md"}
"""Pages with blocks that need several models; `tests/drafting/test_extending.py` runs them."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages, without blocks marked as not run."""
    matches = [match for match in _BLOCK.finditer(page.read_text()) if match["language"] in languages]
    return [match["code"] for match in matches if not match["reason"]]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the pages and their `lookahead` commands, split into words by shell rules."""
    for page in PAGES:
        for block in blocks(page, "", "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                if _PROGRAMS.match(line):
                    words = shlex.split(line, comments=True)
                    yield page.name, [word for word in words if not re.match("[A-Z_]+=", word)]


WRITTEN = [page for page in PAGES if page.name not in TRIED_ELSEWHERE and blocks(page, "python")]
COMMANDS = list(commands())


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_python_on_a_page_runs_as_it_stands(
    page: Path, demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, tokenizer = demo
    ids = tokenizer("class Stack:", return_tensors="pt")["input_ids"]
    names: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "input_ids": ids, "path": str(demo_model_path())}
    names |= {"prompts": [ids[0].tolist(), ids[0].tolist()[:2]], "arguments": {"max_new_tokens": 4}}
    for code in blocks(page, "python"):
        shorter = re.sub(r"max_new_tokens=\d+", "max_new_tokens=8", code)  # the same calls in less time
        exec(shorter.replace(MODEL, str(demo_model_path())), names)


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: "" if isinstance(value, list) else value)
def test_a_command_on_a_page_is_accepted(page: str, words: list[str]) -> None:
    program, *rest = words
    if program == "lookahead":
        parse_lookahead(rest)
    elif program == "make":
        parse_make(rest)
    else:
        parse_benchmark(rest[1:])


def parse_lookahead(words: list[str]) -> None:
    """Parse the options of a `lookahead` command without running it."""
    group: Any = typer.main.get_command(app)
    while hasattr(group, "commands"):
        name, *words = words
        group = group.commands[name]
    group.make_context(group.name, list(words))


def parse_benchmark(words: list[str]) -> None:
    """Parse the options of a probe; search other commands' options in their source."""
    if words[0] in command.PROBES:
        try:
            importlib.import_module(words[0])
        except ModuleNotFoundError as error:  # an engine that needs its own environment
            pytest.skip(str(error))
        command.parse(words)
        return
    assert words[0] in command.COMMANDS
    source = Path(sys.modules[command.COMMANDS[words[0]].__module__].__file__ or "").read_text()
    assert [word for word in words if word.startswith("--") and f'"{word}"' not in source] == []


def parse_make(words: list[str]) -> None:
    """Check that the targets exist."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (ROOT / "Makefile").read_text()))
    assert {word for word in words if "=" not in word} <= targets


def test_commands_of_every_kind_are_found_and_a_wrong_option_is_not_accepted() -> None:
    assert {words[0] for _, words in COMMANDS} == {"lookahead", "make", "python"}
    with pytest.raises(Exception, match="no-such-option"):
        parse_lookahead(["generate", "--no-such-option"])
    with pytest.raises(SystemExit):
        parse_benchmark(["replay", "--output", "x.jsonl", "--no-such-option"])
    with pytest.raises(AssertionError):
        parse_make(["no-such-target"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_toml_on_a_page_can_be_read(page: Path) -> None:
    for code in blocks(page, "toml"):
        tomllib.loads(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"(?ms)^```.*?^```", "", page.read_text())
    for target in re.findall(r"(?:\]\(|\bsrc(?:set)?=\")([^)\"\s]+)[)\"]", text):
        if re.match("[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), target
        if heading:
            assert heading in headings(file), target


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs and GitHub make them."""
    lines = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", line.replace("`", "").lower()).strip().replace(" ", "-") for line in lines}


def test_the_readme_counts_families_as_the_page_of_models_does() -> None:
    page, readme = (ROOT / "docs" / "models.md").read_text(), (ROOT / "README.md").read_text()
    (row,) = re.findall(r"(?m)^\| text \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", page)
    _, trees, chains, refused = row
    assert f"({trees} families on trees, {chains} on chains)" in readme
    assert f"[{refused} families](docs/models.md)" in readme
