"""The page at `/` in headless Chromium, on a real server: a question typed, workers side by side while they write, an
answer; a second question meanwhile, and what happens to both.
"""

import json
import re

import pytest

from dccot.rollout.response import Rollout
from tests.serve.conftest import NAME, QUESTION
from tests.support.browser import Browser
from tests.support.serve_faults import STALLED
from tests.support.servers import KEY

ENTER = "\ue007"  # WebDriver's name of the key
WATCH = """
window.seen = [];
new MutationObserver(() => seen.push(document.querySelectorAll('.workers .card.writing').length))
  .observe(document.getElementById('runs'), {subtree: true, childList: true, characterData: true});
"""


@pytest.fixture(scope="module")
def browser(server):
    opened = Browser()
    opened.go(f"{server.address}/")
    yield opened
    opened.close()


def type_into(browser, name: str, text: str) -> None:
    browser.js("const field = document.getElementById(arguments[0]); field.value = ''; field.focus()", name)
    browser.press(*text)


@pytest.fixture(scope="module")
def expected(first):
    """(seed, answer) of a response in which workers were spawned once, and then the director answered."""

    def wanted(answer) -> bool:
        content, details = answer.choices[0].message.content, answer.usage.completion_tokens_details
        return details.rounds == 1 and content and "spawn" not in content and details.longest_path_tokens > 30

    return first(wanted)


@pytest.fixture(scope="module")
def answered(browser, expected):
    """The page after a question was typed and asked with the keyboard alone."""
    browser.until(lambda: "API key" in browser.text("status"))
    type_into(browser, "key", KEY)
    browser.js("document.getElementById('key').dispatchEvent(new Event('change'))")
    browser.until(lambda: browser.text("model") == NAME)
    browser.js(WATCH)
    ask(browser, QUESTION, expected[0])
    browser.until(lambda: "longest path," in state(browser))
    return browser


def ask(browser, question: str, seed: int) -> None:
    browser.js("document.getElementById('more').open = true")
    type_into(browser, "seed", str(seed))
    type_into(browser, "question", question)
    browser.press(ENTER)


def of(browser, part: str, run: int = 0) -> str:
    """The text of a part of a run; the newest is the first."""
    return browser.js(f"return document.querySelectorAll('.run')[{run}].querySelector('{part}').textContent")


def state(browser, run: int = 0) -> str:
    return of(browser, ".state", run)


def press(browser, name: str, run: int = 0) -> None:
    buttons = f"[...document.querySelectorAll('.run')[{run}].querySelectorAll('button')]"
    browser.js(f"{buttons}.find(each => each.textContent === '{name}').click()")


def test_a_typed_question_is_answered_with_what_the_api_says(answered, expected):
    message, details = expected[1].choices[0].message, expected[1].usage.completion_tokens_details
    assert of(answered, ".said") == message.content
    assert f"{details.longest_path_tokens} tokens on the longest path" in state(answered)
    lanes = answered.js("return [...document.querySelectorAll('.card pre')].map(lane => lane.textContent)")
    assert len(lanes) == 5  # director, three workers, director
    assert message.reasoning.startswith("".join(lanes[:4]))


def test_workers_were_seen_writing_side_by_side(answered):
    assert max(answered.js("return window.seen")) == 3
    tops = answered.js(
        "return [...document.querySelectorAll('.workers > .card')].map(card => card.getBoundingClientRect().top)"
    )
    assert len(tops) == 3
    assert len(set(tops)) == 1


def test_lanes_are_drawn_to_scale(answered):
    widths = answered.js("return [...document.querySelectorAll('.tree rect')].map(box => +box.getAttribute('width'))")
    tokens = answered.js(
        "return [...document.querySelectorAll('.tree title')].map(box => parseInt(box.textContent.split(': ')[1]))"
    )
    scale = widths[0] / tokens[0]
    assert widths == pytest.approx([scale * count for count in tokens], rel=1e-6)


def test_workers_of_a_worker_are_drawn_inside_its_card(answered):
    """Worker 1 spawned two. By hand: 5 + the longest of (1 + the longest of (2, 4) + 3, 6) + 7 tokens."""
    pieces = [[0, 0], 5], [[0, 1], 1], [[0, 2], 6], [[0, 1, 0, 1], 2], [[0, 1, 0, 2], 4], [[0, 1, 1, 0], 3], [[1, 0], 7]
    cards, facts = answered.js(
        """const run = new Run("nested", 0);
        for (const [path, tokens] of arguments[0]) run.write(path, path.join("."), tokens);
        run.draw();
        const name = card => card?.getAttribute("aria-label") ?? null, all = [...run.element.querySelectorAll(".card")];
        const cards = all.map(card => [name(card), name(card.parentElement.closest(".card")), card.innerText]);
        const facts = [...run.facts.querySelectorAll("dd")].map(each => each.textContent);
        run.element.remove();
        return [cards, facts];""",
        pieces,
    )
    above = {None: ["director", "worker 1", "worker 2", "director, having read the workers"]}
    above["worker 1"] = ["worker 1.1", "worker 1.2"]
    assert {key: [name for name, inside, _ in cards if inside == key] for key in above} == above
    [text] = [text for name, _, text in cards if name == "worker 1"]
    assert re.findall(r"^[\d.]+$", text, re.M) == ["0.1", "0.1.0.1", "0.1.0.2", "0.1.1.0"]  # its own after theirs
    assert facts[:2] == ["20", "28"]


def test_the_page_asks_for_nothing_outside_and_does_not_complain(answered, server):
    addresses = answered.requested()
    assert addresses
    assert all(address.startswith((server.address, "data:", "about:")) for address in addresses)
    complaints = [entry["message"] for entry in answered.log("browser") if "401" not in entry["message"]]
    assert not complaints


def test_every_field_has_a_name_and_the_outcome_is_announced(answered):
    unnamed = "return [...document.querySelectorAll('input, textarea')].filter(field => !field.labels.length).length"
    assert answered.js(unnamed) == 0
    assert answered.js("return document.querySelector('.run .state').getAttribute('role')") == "status"
    assert answered.js("return document.querySelector('.tree svg').getAttribute('aria-label')").startswith(
        "director and 3 workers"
    )


def test_a_page_on_a_phone_is_as_wide_as_the_phone(answered):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    answered.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": phone})
    assert answered.js("return [innerWidth, document.documentElement.scrollWidth]") == [390, 390]
    tops = answered.js("return [...document.querySelectorAll('.workers .card')].map(card => card.offsetTop)")
    assert len(set(tops)) == 3
    answered.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}})


def test_a_run_is_saved_as_a_line_of_the_files_that_dccot_view_opens(answered, expected):
    answered.js("URL.createObjectURL = blob => { window.saved = blob; return '#'; }")
    press(answered, "Save run")
    rollout = Rollout.from_json(json.loads(answered.js("return saved.text()")))
    assert rollout.question == QUESTION
    assert rollout.response.longest_path == expected[1].usage.completion_tokens_details.longest_path_tokens


def test_a_second_question_is_answered_while_one_runs_and_either_is_cancelled_or_refused_alone(answered, expected):
    said = of(answered, ".said")
    ask(answered, QUESTION, STALLED)
    ask(answered, QUESTION, expected[0])
    answered.until(lambda: of(answered, ".said") == said and "longest path," in state(answered))
    assert state(answered, 1) == "The director is writing."
    press(answered, "Cancel", 1)
    answered.until(lambda: state(answered, 1) == "Cancelled.")
    ask(answered, "<｜User｜>", 1)
    answered.until(lambda: "holds the special token" in state(answered))
    assert not of(answered, ".said")
    shown = answered.js("return [...document.querySelectorAll('.run .state')].map(each => each.textContent)")
    answered.go(answered.js("return location.href"))
    answered.until(lambda: len(shown) == answered.js("return document.querySelectorAll('.run').length"))
    assert answered.js("return [...document.querySelectorAll('.run .state')].map(each => each.textContent)") == shown
