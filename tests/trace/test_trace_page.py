"""The page of a trace in a real browser, offline: three runs; slider, keyboard, dark, narrow. Also takes pictures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import lookahead
from lookahead import LookaheadConfig, Trace
from lookahead.demo import DEMO_PROMPT

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect

PICTURES = Path("build/trace")
TOKENS = 160

pytestmark = pytest.mark.usefixtures("compiled_loops")


@dataclass(frozen=True)
class Run:
    """A run of the demo model."""

    title: str
    prompt: str
    settings: dict[str, Any]
    options: dict[str, Any]


RUNS = {
    "code": Run("Code, greedy", DEMO_PROMPT, {"step_budget": 16}, {}),
    "sampled": Run(
        "Code, sampled at temperature 0.8", DEMO_PROMPT, {"step_budget": 16}, {"do_sample": True, "temperature": 0.8}
    ),
    "paper": Run(
        "The method of the paper, W=5, N=4, G=3",
        DEMO_PROMPT,
        {"window_size": 5, "ngram_size": 4, "guess_set_size": 3, "pool_from_prompt": True},
        {},
    ),
}


@pytest.fixture(scope="module")
def pages(demo: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> dict[str, Path]:
    """The page of each run."""
    model, tokenizer = demo
    PICTURES.mkdir(parents=True, exist_ok=True)
    made = {}
    for name, run in RUNS.items():
        inputs = tokenizer(run.prompt, return_tensors="pt").input_ids
        torch.manual_seed(4)
        facts = {"model": "demo model, 5.9 million parameters, float32", "preset": name if name == "paper" else "auto"}
        with Trace(PICTURES / f"{name}.html", tokenizer, title=run.title, facts=facts) as trace:
            config = LookaheadConfig(trace=trace, **run.settings)
            lookahead.generate(model, inputs, lookahead_config=config, max_new_tokens=TOKENS, **run.options)
        made[name] = (PICTURES / f"{name}.html").resolve()
    return made


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Open pages; they may use no network and log no errors."""
    context = browser.new_context(viewport={"width": 1240, "height": 900}, device_scale_factor=1.25)
    wrong: list[str] = []

    def open_page(path: Path, **media: Any) -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith("file:") else wrong.append(request.url))
        page.emulate_media(**media)
        page.goto(path.as_uri())
        return page

    yield open_page
    context.close()
    assert not wrong


def step_of(page: Page) -> int:
    return int(page.locator("#step").input_value())


def show_a_full_step(page: Page) -> None:
    """Go to the step with the longest accepted path and the most other nodes, among trees that fit into the panel."""
    best = """() => {
        const panel = document.getElementById("scroll");
        const fits = (index) => {
            show(index);
            return panel.scrollWidth <= panel.clientWidth && panel.scrollHeight <= panel.clientHeight;
        };
        const ranked = text.steps.map((step, index) => {
            const near = nodesOf(step).filter((node) => node.depth < 5 && !node.taken).length;
            return [3 * Math.min(step.a.length, 6) + Math.min(near, 16), index];
        }).slice(2).sort((one, other) => other[0] - one[0]).map(([, index]) => index);
        show(ranked.find(fits) ?? ranked[0]);
    }"""
    page.evaluate(best)


def take_picture(page: Page, path: Path) -> None:
    """Save a picture of the text and the tree of a step, with panels short enough for a documentation page."""
    page.add_style_tag(content="#text, #scroll { height: 19rem }")
    box = page.locator("#scroll").bounding_box()
    assert box is not None
    clip: Any = {"x": 0, "y": 0, "width": 1240, "height": box["y"] + box["height"] + 4}
    page.screenshot(path=path, full_page=True, clip=clip)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_shows_every_step_of_a_run(opened: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    page = opened(pages[name], color_scheme=scheme)
    expect(page.locator("h1")).to_have_text(RUNS[name].title)
    expect(page.locator("#summary")).to_contain_text(f"{TOKENS} tokens in")
    show_a_full_step(page)
    counts = page.evaluate("({ sent: text.steps[current].t.length, accepted: text.steps[current].a.length })")
    assert page.locator("#tree .node").count() == counts["sent"] + 1
    assert page.locator("#tree .node.taken").count() == counts["accepted"] + 1
    assert page.locator("#tree .own").count() == 1
    assert page.locator("#legend li").count() >= 1
    assert page.locator("#sources tbody tr").count() >= 2
    assert page.locator(".chart").count() == 3
    take_picture(page, PICTURES / f"{name}-{scheme}.png")


def test_slider_and_arrow_keys_choose_the_step(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["code"])
    steps = page.evaluate("text.steps.length")
    assert step_of(page) == 1
    for key, step in {"ArrowRight": 2, "End": steps, "ArrowLeft": steps - 1, "Home": 1}.items():
        page.keyboard.press(key)
        assert step_of(page) == step
        expect(page.locator("#said")).to_contain_text(f"Step {step} of {steps}:")
    page.get_by_label("Step", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#said")).to_contain_text("Step 2 of")
    assert page.locator("#text .now").inner_text() == page.evaluate("text.steps[1].x")
    page.get_by_role("button", name="Last step").click()
    assert step_of(page) == steps
    page.locator("#text span[data-step='3']").click()
    assert step_of(page) == 4
    page.get_by_role("button", name="Play").click()
    expect(page.locator("#said")).to_contain_text("Step 5 of")
    page.get_by_role("button", name="Pause").click()


def test_a_click_describes_a_node(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["code"])
    show_a_full_step(page)
    page.locator("#tree .node").nth(1).click()
    expect(page.locator("#node")).to_contain_text("Named by")
    expect(page.locator("#node")).to_contain_text("After it the model's likeliest token is")
    before = page.locator("#node").inner_text()
    page.locator("#scroll").focus()
    page.keyboard.press("ArrowDown")
    assert page.locator("#node").inner_text() != before
    page.get_by_text("The nodes as a table").click()
    assert page.locator("#nodes tbody tr").count() == page.locator("#tree .node").count() - 1


def test_masks_equal_the_librarys(opened: Any, pages: dict[str, Path]) -> None:
    from lookahead.core.forest import lay_out
    from lookahead.core.token_tree import TokenTree

    page = opened(pages["code"])
    show_a_full_step(page)
    counts = page.evaluate("({ tokens: text.steps[current].t, parents: text.steps[current].p })")
    tree = TokenTree([0])
    tree.add_new_candidates(counts["tokens"], counts["parents"])
    order = page.evaluate("sendingOrder(nodes)")
    assert order == lay_out(tree).order.tolist()


def test_controls_have_names(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["code"])
    unnamed = """[...document.querySelectorAll("button, input, select, [role=img], [role=group]")].filter((each) =>
        !each.labels?.length && !each.textContent && !each.hasAttribute("aria-label")
            && !each.hasAttribute("aria-labelledby")
    ).map((each) => each.outerHTML)"""
    assert page.evaluate(unnamed) == []
    page.locator("h1").click()
    reached = set()
    for _ in range(10):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"play", "on", "last", "step", "text", "scroll", "SUMMARY"} <= reached


def test_nothing_overflows_a_narrow_screen(opened: Any, pages: dict[str, Path]) -> None:
    page = opened(pages["code"], color_scheme="dark")
    page.set_viewport_size({"width": 360, "height": 900})
    show_a_full_step(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert (
        page.evaluate("((e) => e.scrollWidth - e.clientWidth)(document.getElementById('sources').parentElement)") <= 0
    )
    page.locator("#drafts").scroll_into_view_if_needed()
    page.screenshot(path=PICTURES / "narrow-dark.png")


def test_the_page_switches_between_texts(
    opened: Any, demo: tuple[PreTrainedModel, PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    model, tokenizer = demo
    with Trace(tmp_path / "trace.html", tokenizer) as trace:
        for prompt in ("import os", "class Node:"):
            inputs = tokenizer(prompt, return_tensors="pt").input_ids
            lookahead.generate(model, inputs, lookahead_config=LookaheadConfig(trace=trace), max_new_tokens=8)
    page = opened(tmp_path / "trace.html")
    page.get_by_label("Text", exact=True).select_option(index=1)
    expect(page.locator("#text .prompt")).to_have_text("class Node:")


def test_the_page_opens_without_a_recorded_step(opened: Any, tmp_path: Path) -> None:
    Trace().write(tmp_path / "trace.html")
    expect(opened(tmp_path / "trace.html").locator("#said")).to_have_text("Nothing was recorded.")
