"""The page in a real browser: send, stream, compare, stop, a narrow screen, a server that goes away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server_process import ServerProcess

pytest.importorskip("playwright")
from playwright.sync_api import Page, expect

SCREENSHOTS = Path("build/page")
PROMPT = "def mean(values):\n    return sum(values) / len(values)\n\ndef variance(values):"


@pytest.fixture
def page(browser: Any, server: ServerProcess) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1200, "height": 860})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.set_default_timeout(90_000)
    expect.set_options(timeout=90_000)
    page.goto(server.url)
    enter_key(page)
    yield page
    page.close()
    assert not errors


def enter_key(page: Page) -> None:
    expect(page.locator("#status")).to_contain_text("API key")
    page.get_by_text("Settings").click()
    page.get_by_label("API key").fill("a-key")
    page.get_by_label("Most tokens").fill("48")
    expect(page.locator("#model")).to_have_text("chatty")
    page.get_by_text("Settings").click()


def send(page: Page, text: str = PROMPT) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_streams_with_its_steps(page: Page) -> None:
    send(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    steps = page.locator("#with td").nth(2).inner_text()
    assert 0 < int(steps) < 48
    assert page.locator("#log pre span").count() > 1
    assert page.locator("#tree circle").count() >= 1
    expect(page.locator("#caption")).to_contain_text(f"Step {steps}:")
    color = "(each) => getComputedStyle(each).color"
    legend = {mark.evaluate(color) for mark in page.locator("#legend i").all()}
    drafted = {mark.evaluate(color) for mark in page.locator("#tree circle").all()[1:]}
    assert drafted == legend
    expect(page.locator("#load")).to_contain_text("running")
    expect(page.get_by_label("Message")).to_be_focused()


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_plain_and_lookahead_run_side_by_side(page: Page, temperature: str) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill(temperature)
    page.get_by_text("Settings").click()
    page.get_by_label("Also without lookahead").check()
    send(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    assert page.locator("#without td").nth(1).inner_text() == "1.00"
    answers = page.locator(".sides pre")
    assert answers.nth(0).inner_text() == answers.nth(1).inner_text()
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / "page-light.png")
    page.emulate_media(color_scheme="dark")
    page.screenshot(path=SCREENSHOTS / "page-dark.png")


def test_an_invalid_setting_says_so_where_settings_are_closed(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("9")
    page.get_by_text("Settings").click()
    expect(page.get_by_label("Temperature")).to_be_hidden()
    for press in (lambda: send(page), lambda: page.get_by_role("button", name="Send").click()):
        press()
        expect(page.get_by_role("status")).to_contain_text("Temperature")
        expect(page.get_by_label("Temperature")).to_be_visible()
        assert page.locator("#log .turn").count() == 0
        page.get_by_text("Settings").click()
    page.get_by_text("Settings").click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_have_text("Done.")


def test_answers_can_be_copied(page: Page, server: ServerProcess) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    send(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    page.get_by_role("button", name="Copy: Answer").click()
    expect(page.get_by_role("status")).to_have_text("Copied.")
    assert page.evaluate("navigator.clipboard.readText()") == page.locator("#log .sides pre").text_content()


def test_colours_tell_steps_apart_where_the_system_forces_its_own(page: Page) -> None:
    page.emulate_media(forced_colors="active")
    send(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    colors = (
        "() => [...document.querySelectorAll('#log pre span')].map((each) => getComputedStyle(each).backgroundColor)"
    )
    assert len(set(page.evaluate(colors))) > 1
    filled = (
        "() => new Set([...document.querySelectorAll('#tree circle')].map((each) => getComputedStyle(each).fill)).size"
    )
    assert page.evaluate(filled) > 1


def test_escape_stops_the_answer(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("1500")
    send(page)
    expect(page.locator("#log pre span").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_settings_are_sent_and_stopped_answers_stay_in_the_conversation(page: Page) -> None:
    page.get_by_text("Settings").click()
    for label, value in {"Most tokens": "1500", "Top p": "0.5", "Seed": "7", "System prompt": "Be brief."}.items():
        page.get_by_label(label).fill(value)
    send(page)
    expect(page.locator("#log pre span").first).to_be_attached()
    page.keyboard.press("Escape")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    stopped = page.locator("#log .sides pre").text_content()
    page.get_by_label("Most tokens").fill("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "again")
    body = sent.value.post_data_json
    assert (body["top_p"], body["seed"]) == (0.5, 7)
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "user"]
    assert body["messages"][2]["content"] == stopped
    expect(page.get_by_role("status")).to_have_text("Done.")


def test_edges_cross_no_label(page: Page) -> None:
    send(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    crossings = """() => {
      const labels = [...document.querySelectorAll('#tree text')].map((each) => each.getBBox());
      const inside = (box, {x, y}) => x > box.x && x < box.x + box.width && y > box.y && y < box.y + box.height;
      return [...document.querySelectorAll('#tree path')].filter((path) => {
        for (let at = 0; at <= path.getTotalLength(); at += 1)
          if (labels.some((box) => inside(box, path.getPointAtLength(at)))) return true;
        return false;
      }).length;
    }"""
    assert page.locator("#tree path").count() > 0
    assert page.evaluate(crossings) == 0


def test_a_narrow_screen_has_one_column(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    send(page)
    expect(page.get_by_role("status")).to_have_text("Done.")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    talk, numbers = (page.locator(name).bounding_box() for name in ("#talk", "#numbers"))
    assert talk is not None
    assert numbers is not None
    assert numbers["y"] >= talk["y"] + talk["height"]


def test_every_control_has_a_name_and_is_reached_by_tab(page: Page) -> None:
    page.locator("h1").click()
    reached = set()
    for _ in range(16):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"text", "send", "clear", "compare", "SUMMARY"} <= reached
    unnamed = "[...document.querySelectorAll('input, textarea')].filter((each) => !each.labels.length).length"
    assert page.evaluate(unnamed) == 0


def test_the_page_says_when_the_server_is_gone(page: Page) -> None:
    page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
    send(page, "hello")
    expect(page.get_by_role("status")).to_contain_text("went away")
    expect(page.get_by_label("Message")).to_have_value("hello")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_have_text("Done.")


def test_clear_begins_anew_even_in_the_middle_of_an_answer(page: Page) -> None:
    page.get_by_text("Settings").click()
    page.get_by_label("Most tokens").fill("1500")
    send(page)
    expect(page.locator("#log pre span").first).to_be_visible()
    page.get_by_role("button", name="Clear").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert page.locator("#log .turn").count() == 0
    page.get_by_label("Most tokens").fill("4")
    with page.expect_request("**/v1/chat/completions") as sent:
        send(page, "again")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "again"}]
    expect(page.get_by_role("status")).to_have_text("Done.")


def test_a_server_that_dies_in_the_middle_of_an_answer(page: Page) -> None:
    with ServerProcess("--dtype", "float32") as mortal:
        page.goto(mortal.url)
        expect(page.locator("#model")).to_have_text("demo")
        page.get_by_text("Settings").click()
        page.get_by_label("Most tokens").fill("1500")
        send(page)
        expect(page.locator("#log pre span").first).to_be_visible()
        mortal.process.kill()
        expect(page.get_by_role("status")).to_contain_text("went away")
        expect(page.get_by_label("Message")).to_have_value(PROMPT)
        expect(page.locator("#load")).to_have_text("load unknown")
