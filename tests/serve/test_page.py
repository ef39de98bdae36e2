"""The page at `/` in headless Chromium, on a real server: a question typed, workers side by side while they write, an
answer.
"""

import pytest

from tests.serve.conftest import NAME, QUESTION
from tests.support.browser import Browser
from tests.support.servers import KEY

CONTROL = "\ue009"  # WebDriver's name of the key
WATCH = """
window.seen = [];
new MutationObserver(() => seen.push(document.querySelectorAll('.workers .card.writing').length))
  .observe(document.getElementById('texts'), {subtree: true, childList: true, characterData: true});
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
    type_into(browser, "seed", str(expected[0]))
    type_into(browser, "question", QUESTION)
    strokes = [("keyDown", CONTROL), ("keyDown", "\ue007"), ("keyUp", "\ue007"), ("keyUp", CONTROL)]
    actions = [{"type": kind, "value": key} for kind, key in strokes]
    browser.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})
    browser.until(lambda: "longest path," in browser.text("status"))
    return browser


def test_a_typed_question_is_answered_with_what_the_api_says(answered, expected):
    message, details = expected[1].choices[0].message, expected[1].usage.completion_tokens_details
    assert answered.text("answer") == message.content
    assert f"{details.longest_path_tokens} tokens on the longest path" in answered.text("status")
    lanes = answered.js("return [...document.querySelectorAll('.card pre')].map(lane => lane.textContent)")
    assert len(lanes) == 5  # director, three workers, director
    assert message.reasoning.startswith("".join(lanes[:4]))


def test_workers_were_seen_writing_side_by_side(answered):
    assert max(answered.js("return window.seen")) == 3
    tops = answered.js(
        "return [...document.querySelectorAll('#round-1 .card')].map(card => card.getBoundingClientRect().top)"
    )
    assert len(tops) == 3
    assert len(set(tops)) == 1


def test_lanes_are_drawn_to_scale(answered):
    widths = answered.js("return [...document.querySelectorAll('#tree rect')].map(box => +box.getAttribute('width'))")
    tokens = answered.js(
        "return [...document.querySelectorAll('#tree title')].map(box => parseInt(box.textContent.split(': ')[1]))"
    )
    scale = widths[0] / tokens[0]
    assert widths == pytest.approx([scale * count for count in tokens], rel=1e-6)


def test_the_page_asks_for_nothing_outside_and_does_not_complain(answered, server):
    addresses = answered.requested()
    assert addresses
    assert all(address.startswith((server.address, "data:", "about:")) for address in addresses)
    complaints = [entry["message"] for entry in answered.log("browser") if "401" not in entry["message"]]
    assert not complaints


def test_every_field_has_a_name_and_the_outcome_is_announced(answered):
    unnamed = "return [...document.querySelectorAll('input, textarea')].filter(field => !field.labels.length).length"
    assert answered.js(unnamed) == 0
    assert answered.js("return document.getElementById('status').getAttribute('role')") == "status"
    assert answered.js("return document.querySelector('#tree svg').getAttribute('aria-label')").startswith(
        "director and 3 workers"
    )
