"""Draw how lookahead decoding works, from a real run: method-{tree,mask,window}.png.

    python tools/method_pictures.py docs/images

A text is decoded greedily with the paper's method and a small window (W=5, N=4, G=3), and every step is recorded. The
pictures show the token tree and the attention mask of one step with accepted candidates. A third picture shows six
consecutive steps: the window forms an n-gram, which is accepted soon afterwards. Tokens, parents and mask are the real
inputs of the model. Needs matplotlib: `pip install '.[plot]'`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure  # not pyplot, which keeps global state and may look for a screen
from matplotlib.patches import FancyBboxPatch, Patch, Rectangle
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead.backends.transformers.runner import ModelRunner
from lookahead.backends.transformers.sampler import TextSampler, TextSequence
from lookahead.core.forest import lay_out
from lookahead.core.step import Batch
from lookahead.core.step import step as decode_step
from lookahead.core.token_tree import NodeKind, TokenTree
from lookahead.demo import DEMO_PROMPT, demo_model_path
from lookahead.drafting import JacobiWindow, NGramPool, PaperDrafter, StepResult
from lookahead.errors import InvalidArgumentError

WINDOW_SIZE, NGRAM_SIZE, GUESS_SET_SIZE = 5, 4, 3
"""W, N and G of the pictures; W and N are the same as in the paper's Fig. 2."""

SHOWN_STEPS = 6

# Colours that most colour-blind readers can distinguish; the window's rows have the colours of Fig. 2, oldest first.
ROOT, CANDIDATE, ACCEPTED, UNSEEN = "#56b4e9", "#cdb4db", "#1b7f3b", "#f2f2f2"
ROWS = ("#f4b860", "#8fd3a8", "#ee8f7a", "#ffffff")
PREDICTED = (ROWS[-1], "predicted by the model in this step")


@dataclass(frozen=True)
class Step:
    """Record of one step.

    Attributes:
        tree: The token tree that was sent.
        guesses: Candidates from the pool.
        rows: The window before the step; during warm-up it has fewer rows, and forms no n-grams.
        result: Predictions and accepted nodes.
    """

    tree: TokenTree
    guesses: list[tuple[int, ...]]
    rows: list[list[int]]
    result: StepResult

    @property
    def root(self) -> int:
        """Token id of the last decided token."""
        return self.tree.tokens[self.tree.root]

    @property
    def path(self) -> list[int]:
        """Accepted nodes."""
        return self.result.path

    @property
    def new_row(self) -> list[int]:
        """Prediction of the model at the end of each column."""
        if len(self.rows) < NGRAM_SIZE - 1:
            return []
        return [int(self.result.predictions[node]) for node in self.window_rows()[-1]]

    @property
    def ngrams(self) -> list[tuple[int, ...]]:
        """N-grams added to the pool by the step, one for each column."""
        if not self.new_row:
            return []
        return list(zip([self.root, *self.rows[0]], *self.rows[1:], self.new_row, strict=True))

    def window_rows(self) -> list[list[int]]:
        """The window's nodes, row 0 (without the root) first."""
        nodes = iter([node for node, kind in enumerate(self.tree.kinds) if kind is NodeKind.WINDOW])
        return [[next(nodes) for _ in row] for row in self.rows]


class WatchedDrafter(PaperDrafter):
    """Drafter of the paper's method that records every step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._own_window = JacobiWindow(WINDOW_SIZE, NGRAM_SIZE, seed=0)
        self._own_pool = NGramPool(NGRAM_SIZE, GUESS_SET_SIZE)
        super().__init__(self._own_window, self._own_pool)

    def propose(self, tree: TokenTree) -> None:
        """Draft, and record the draft."""
        self._drafted = (tree, self._own_pool.lookup(tree.tokens[tree.root]), self._own_window.rows)
        super().propose(tree)

    def observe(self, result: StepResult) -> None:
        """Record the result of the step, and learn."""
        self.steps.append(Step(*self._drafted, result))
        super().observe(result)


def watch(model: Any, tokens: list[int], length: int) -> list[Step]:
    """Decode `length` new tokens greedily, and return the steps."""
    drafter = WatchedDrafter()
    end = len(tokens) + length
    sequence = TextSequence(
        torch.tensor([tokens]), tokens, drafter, TextSampler(), lambda text: len(text.tokens) >= end
    )
    with torch.no_grad():
        runner, batch = ModelRunner(model, 1), Batch([sequence])
        while not batch.finished:
            decode_step(runner, batch)
    return drafter.steps


def choose_step(steps: Sequence[Step]) -> Step:
    """Choose the step for tree and mask: most tokens accepted, then most candidates, then the earliest."""
    full = [step for step in steps if step.new_row and step.path]
    if not full:
        raise InvalidArgumentError("no candidate was accepted in this text: choose another --prompt, or more --tokens")
    return max(full, key=lambda step: (len(step.path), step.tree.kinds.count(NodeKind.CANDIDATE)))


class Life(NamedTuple):
    """An n-gram: its column in the window, its tokens, and the indices of the steps that finished and accepted it."""

    column: int
    tokens: tuple[int, ...]
    found: int
    accepted: int


def choose_life(steps: Sequence[Step]) -> Life:
    """Choose the n-gram for the picture of the window: formed completely and accepted in the six steps shown."""
    lives = []
    for accepted, step in enumerate(steps):
        guess = tuple(step.tree.tokens[node] for node in step.path)
        first = max(accepted - SHOWN_STEPS + NGRAM_SIZE, 2 * NGRAM_SIZE)
        for found in range(first, accepted):
            for column, ngram in enumerate(steps[found].ngrams):
                # Column 0 begins with a decided token: not all of its n-gram comes from the window.
                if column and guess and ngram[0] == step.root and ngram[1 : 1 + len(guess)] == guess:
                    lives.append(Life(column, ngram, found, accepted))
    if not lives:
        raise InvalidArgumentError(
            "no n-gram was found and accepted within six steps: choose another --prompt, or --tokens"
        )
    return max(lives, key=lambda life: (len(steps[life.accepted].path), len(set(life.tokens)), -life.accepted))


def label(tokenizer: Any, token: int) -> str:
    """Text of a token for a picture: blanks and line breaks visible, several blanks counted, long tokens shortened."""
    text = re.sub(" {2,}", lambda blanks: f"␣×{len(blanks[0])}", tokenizer.decode([token]))
    text = text.replace(" ", "␣").replace("\n", "↵").replace("\t", "→")
    text = text if len(text) <= 8 else f"{text[:4]}…{text[-3:]}"
    return text.replace("$", r"\$")


class Canvas:
    """Figure with tokens as boxes."""

    def __init__(self, width: float, height: float, name: Callable[[int], str], token_size: float = 8.5) -> None:
        self._figure = Figure(figsize=(width, height), layout="constrained")
        self.axes = self._figure.add_subplot()
        self.axes.set_axis_off()
        self._name = name
        self._token_size = token_size

    def box(self, x: float, y: float, token: int, colour: str, *, edge: str = "#777777", bold: bool = False) -> None:
        """Draw a token, with its centre at (x, y)."""
        style: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": colour, "edgecolor": edge}
        style |= {"linestyle": "--" if colour == ROWS[-1] else "-"}
        style |= {"linewidth": 2.2, "zorder": 3} if bold else {"linewidth": 0.8, "zorder": 2}
        self.axes.add_patch(FancyBboxPatch((x - 0.44, y - 0.3), 0.88, 0.6, **style))
        self.text(x, y, self._name(token), zorder=4, family="monospace", size=self._token_size)

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write text at (x, y), centred by default."""
        self.axes.text(x, y, text, **{"ha": "center", "va": "center", "size": 9, **style})

    def line(self, start: tuple[float, float], end: tuple[float, float], *, bold: bool = False) -> None:
        """Draw a line from the right side of a box to the left side of another."""
        style = {"color": ACCEPTED, "linewidth": 2.2} if bold else {"color": "#999999", "linewidth": 0.9}
        self.axes.plot([start[0] + 0.44, end[0] - 0.44], [start[1], end[1]], zorder=1, **style)

    def save(self, path: Path, title: str, limits: tuple[float, float, float, float], **legend: Any) -> None:
        """Write a PNG file; `limits` are the left, right, bottom and top of the drawn area."""
        self.axes.set_xlim(*limits[:2])
        self.axes.set_ylim(*limits[2:])
        self.axes.set_title(title, size=11, loc="left")
        self.axes.legend(fontsize=8.5, frameon=False, **legend)
        self._figure.savefig(path, format="png", dpi=130)


def patches(*more: tuple[str, str]) -> list[Any]:
    """Entries of a legend that explains the colours."""
    entries = [(ROOT, "root: last decided token"), (CANDIDATE, "candidate, from the pool")]
    entries += [(colour, f"window, row {row}") for row, colour in enumerate(ROWS[:-1])]
    edges = {"(green)": {"edgecolor": ACCEPTED, "linewidth": 2}, "(black)": {"edgecolor": "black", "linewidth": 2}}
    usual: dict[str, Any] = {"edgecolor": "#777777", "linewidth": 0.8}
    return [
        Patch(facecolor=colour, label=text, **edges.get(text.rpartition(" ")[2], usual))
        for colour, text in [*entries, *more]
    ]


def colours_of(step: Step) -> dict[int, str]:
    """Colour of each node, from the root."""
    colours = {step.tree.root: ROOT}
    colours |= {node: CANDIDATE for node, kind in enumerate(step.tree.kinds) if kind is NodeKind.CANDIDATE}
    for row, nodes in enumerate(step.window_rows()):
        colours |= dict.fromkeys(nodes, ROWS[row])
    return colours


def tree_places(step: Step) -> dict[int, tuple[float, float]]:
    """Position of each node: x is its depth; candidates are above the trunk, columns of the window below."""
    tree = step.tree
    depth = {node: float(tree.depths[node] - tree.depths[tree.root]) for node in range(tree.root, len(tree))}
    places = {tree.root: (0.0, 0.0)}
    level = 0.0
    for node in [node for node, kind in enumerate(tree.kinds) if kind is NodeKind.CANDIDATE]:
        parent = tree.parents[node]
        goes_on = parent != tree.root and all(tree.parents[other] != parent for other in places)
        level += not goes_on
        places[node] = (depth[node], places[parent][1] if goes_on else level)
    rows = step.window_rows()
    places |= {node: (depth[node], 0.0) for node in rows[0]}
    places |= {node: (depth[node], -1.0 - column) for row in rows[1:] for column, node in enumerate(row)}
    return places


def draw_tree(path: Path, step: Step, name: Callable[[int], str]) -> None:
    """Draw the token tree of a step."""
    canvas, tree, places, colours = Canvas(11, 6.2, name), step.tree, tree_places(step), colours_of(step)
    accepted = {tree.root, *step.path}
    for node, place in places.items():
        if node != tree.root:
            canvas.line(places[tree.parents[node]], place, bold=node in accepted)
        edge = ACCEPTED if node in step.path else "#777777"
        canvas.box(*place, tree.tokens[node], colours[node], edge=edge, bold=node in step.path)
    for node, token in zip(step.window_rows()[-1], step.new_row, strict=True):
        x, y = places[node]
        canvas.line((x, y), (x + 1, y))
        canvas.box(x + 1, y, token, ROWS[-1])
    x, y = places[step.path[-1]]
    canvas.line((x, y), (x + 1, y), bold=True)
    canvas.box(x + 1, y, step.result.tokens[-1], ROWS[-1], edge=ACCEPTED, bold=True)
    deepest, top = WINDOW_SIZE + NGRAM_SIZE - 2, max(y for _, y in places.values())
    for place in range(deepest + 1):
        canvas.text(place, top + 0.75, str(place), size=8.5, color="#555555")
    canvas.text(-1.2, top + 0.75, "tokens after\nthe root:", size=8.5, color="#555555")
    canvas.text(-1.2, (1 + top) / 2, "verification\nbranch", weight="bold")
    canvas.text(-1.2, 0, "cached text …", color="#555555", style="italic")
    canvas.text(-1.2, -(1 + WINDOW_SIZE) / 2, "lookahead\nbranch", weight="bold")
    handles = patches(PREDICTED, (CANDIDATE, "accepted (green)"))
    place = {"loc": "lower left", "bbox_to_anchor": (0.62, 0.02) if top > 3 else (0.0, -0.02)}
    count = len(tree) - tree.root
    title = f"One step: {count} nodes sent, {len(step.result.tokens)} tokens decided (W={WINDOW_SIZE}, N={NGRAM_SIZE})"
    canvas.save(path, title, (-1.9, deepest + 0.6, -WINDOW_SIZE - 0.6, top + 1.2), handles=handles, **place)


def draw_mask(path: Path, step: Step, name: Callable[[int], str]) -> None:
    """Draw the attention mask of the same step, with its nodes in the order of sending."""
    tree, colours, layout = step.tree, colours_of(step), lay_out(step.tree)
    nodes = [int(node) for node in layout.order[tree.root :]]
    mask = layout.ancestor_mask()[tree.root :, tree.root :]
    canvas, count = Canvas(9, 9, name), len(nodes)
    for row, node in enumerate(nodes):
        y = -row
        canvas.axes.add_patch(Rectangle((-3, y - 0.5), 2.6, 1, facecolor=colours[node], edgecolor="white", alpha=0.55))
        for column in range(count):
            colour = colours[node] if mask[row, column] else UNSEEN
            canvas.axes.add_patch(Rectangle((column - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white"))
            if mask[row, column]:
                place = tree.depths[nodes[column]] - tree.depths[tree.root]
                canvas.text(column, y, str(place), size=8)
        accepted = node in step.path
        style: dict[str, Any] = {"family": "monospace", "size": 8, "color": ACCEPTED if accepted else "black"}
        style["weight"] = "bold" if accepted else "normal"
        canvas.text(-3.2, y, name(tree.tokens[node]), ha="right", **style)
        canvas.text(row, 0.8, name(tree.tokens[node]), rotation=90, va="bottom", **style)
    canvas.text(-1.7, 0.8, "cached text", rotation=0, va="bottom", size=8.5)
    canvas.text(-5.6, -count / 2, "token that is computed", rotation=90)
    canvas.text(count / 2, 3.4, "token that it sees; digits: tokens after the root", va="bottom")
    title = f"The mask of that step: {count} nodes, each sees its ancestors, itself and all cached text"
    place = {"loc": "upper center", "bbox_to_anchor": (0.55, 0.02), "ncol": 5, "columnspacing": 1.0}
    canvas.save(path, title, (-5.9, count - 0.4, -count - 0.6, 4.3), handles=patches(), **place)


def draw_window(path: Path, steps: Sequence[Step], life: Life, name: Callable[[int], str]) -> None:
    """Draw the window over six steps, and an n-gram in it."""
    first = life.found - NGRAM_SIZE + 1
    height = 0.8 * NGRAM_SIZE + 1.5
    canvas = Canvas(12, 13, name, token_size=7.5)
    right = SHOWN_STEPS + WINDOW_SIZE + NGRAM_SIZE - 2
    for number in range(SHOWN_STEPS):
        step, top = steps[first + number], -number * height
        canvas.text(-0.9, top, f"step {first + number + 1}: text", size=8.5, ha="right", weight="bold")
        verified = first + number == life.accepted
        canvas.box(number, top, step.root, ROOT, edge="black" if verified else "#777777", bold=verified)
        for index, token in enumerate(step.result.tokens):
            colour = CANDIDATE if index < len(step.path) else ROWS[-1]
            canvas.box(number + 1 + index, top, token, colour, edge=ACCEPTED, bold=True)
        rows = [*step.rows, step.new_row]
        for row, tokens in enumerate(rows):
            y = top - 1 - row * 0.8
            canvas.text(-0.9, y, f"row {row}" if row < NGRAM_SIZE - 1 else "new", size=8.5, color="#555555", ha="right")
            for index, token in enumerate(tokens):
                column = index + 1 if row == 0 else index  # row 0 begins with the root, which the text line shows
                born = number - (NGRAM_SIZE - 1 - row)  # how many steps ago row `row` was added
                mine = column == life.column and 0 <= born < NGRAM_SIZE and first + number <= life.found
                edge = "black" if mine else "#999999"
                canvas.box(number + column + row, y, token, ROWS[row], edge=edge, bold=mine)
        canvas.text(right + 0.2, top - 1.3, _story(first + number, life, name), ha="left", va="center", size=9)
        if number:
            canvas.axes.plot([-2.2, right + 3.6], [top + 0.55] * 2, color="#dddddd", linewidth=0.8)
    spelled = " ".join(name(token) for token in life.tokens)
    caption = f"Steps {first + 1} to {first + SHOWN_STEPS} (W={WINDOW_SIZE}, N={NGRAM_SIZE})"
    title = f"{caption}, and the life of the n-gram  {spelled}"
    handles = patches(
        PREDICTED, (CANDIDATE, "accepted candidate (green)"), (ROWS[-1], "the n-gram that is followed (black)")
    )
    limits = (-2.2, right + 3.6, -SHOWN_STEPS * height + 0.7, 0.7)
    canvas.save(path, title, limits, handles=handles, loc="upper center", bbox_to_anchor=(0.45, 0.01), ncol=4)


def _story(step: int, life: Life, name: Callable[[int], str]) -> str:
    """Caption of a step: the event in the life of the n-gram."""
    if step < life.found:
        number = step - life.found + NGRAM_SIZE - 1
        return f"column {life.column} gets token {number + 1}:  {name(life.tokens[number])}"
    if step == life.found:
        return "the n-gram is whole\nand goes into the pool"
    if step == life.accepted:
        return "its first token is the root:\nit is verified and accepted"
    return "it waits in the pool" if step < life.accepted else "the text goes on behind it"


def draw(folder: Path, model: Path, prompt: str, length: int) -> None:
    """Decode a text of `length` new tokens, and draw into a folder.

    Raises:
        InvalidArgumentError: The text has no suitable step.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    steps = watch(loaded, tokenizer(prompt).input_ids, length)
    folder.mkdir(parents=True, exist_ok=True)
    step, life = choose_step(steps), choose_life(steps)
    name = partial(label, tokenizer)
    draw_tree(folder / "method-tree.png", step, name)
    draw_mask(folder / "method-mask.png", step, name)
    draw_window(folder / "method-window.png", steps, life, name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--model", type=Path, default=demo_model_path(), help="folder of the model (the demo model)")
    parser.add_argument("--prompt", default=DEMO_PROMPT, help="text to go on with (the demo's)")
    parser.add_argument("--tokens", type=int, default=120, help="tokens to generate (120)")
    options = parser.parse_args(arguments)
    try:
        draw(options.folder, options.model, options.prompt, options.tokens)
    except (InvalidArgumentError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
