"""The page of `dccot view` with 10,000 responses in headless Chromium."""

import functools
import math
import random

import pytest

from dccot.eval.view import Page, Pieces
from dccot.lab.worlds.bigram import tokenizer
from dccot.rollout.response import Finish, Segment
from dccot.rollout.tags import TagIds
from dccot.train.rewards import Graded
from tests.support.browser import Browser
from tests.support.rounds import Round, flat, rounds_of

RESPONSES, SAMPLES = 10_000, 8
NEEDLE = "needle in worker two"


@pytest.fixture(scope="module")
def rollouts() -> list[Graded]:
    words, rng, made = tokenizer("spelled"), random.Random(5), []
    tags, vocabulary = TagIds.of(words), words.get_vocab()
    encode = functools.cache(lambda text: words.encode(text, add_special_tokens=False))

    def segment(ids: list[int], inserted=()) -> Segment:
        return Segment(list(inserted), ids, [math.log(1 - rng.random()) / 2 for _ in ids])

    for number in range(RESPONSES):
        texts = [NEEDLE if number == 7777 and i == 2 else "x" * rng.randrange(1, 40) for i in (1, 2, 3)]
        workers = [segment(encode(f"{text}</worker_{i + 1}>"), tags.worker_open[i]) for i, text in enumerate(texts)]
        rounds = [Round(segment(encode("plan " * rng.randrange(1, 9) + "<spawn_workers>")), workers)] * (number % 3 > 0)
        digits = [vocabulary[digit] for digit in str(number)]
        answer = encode("</think><answer>\\boxed{") + digits + encode("}</answer>")
        final = segment(answer, tags.spawn_close if rounds else ())
        response = flat([1], rounds, final, Finish.ANSWERED if number % 11 else Finish.BUDGET)
        verdict = rng.choice(["correct", "wrong", "unparsable", "timed_out", None])
        problem, flaw = number // SAMPLES, rng.choice([None, None, "no_answer", "stray_tag"])
        reward = None if verdict is None else round(rng.random(), 3)
        judged = {"flaw": flaw, "verdict": verdict, "reward": reward, "step": 1}
        asked = f"problem-{problem:04d}", number % SAMPLES, f"How much is {problem} plus {problem}?", str(problem)
        made.append(Graded(*asked, f"<think>\n…</think><answer>\\boxed{{{number}}}</answer>", response, **judged))
    return made


@pytest.fixture(scope="module")
def page(rollouts, tmp_path_factory):
    page = Page(Pieces(tokenizer("spelled").decode))
    for rollout in rollouts:
        page.add(rollout)
    path = tmp_path_factory.mktemp("pages") / "rollouts.html"
    page.write(path, "rollouts.jsonl")
    return path


def open_page(browser: Browser, address: str) -> Browser:
    browser.go("about:blank")
    browser.go(address)
    browser.until(lambda: browser.js("return document.querySelectorAll('.card').length"))
    return browser


@pytest.fixture
def browser(chromium, page):
    return open_page(chromium, page.as_uri())


def chosen(browser: Browser) -> int:
    """The response that the list has chosen, once the detail shows it too."""
    code = """const row = document.querySelector('.row[aria-selected=true]')?.dataset.row;
              return row !== undefined && row === document.getElementById('detail').dataset.row ? ['', row] : null"""
    return int(browser.until(lambda: browser.js(code))[1])


def listed(browser: Browser) -> list[int]:
    return browser.js("return listed")


def test_all_responses_are_listed_and_only_those_in_sight_exist(browser):
    assert browser.text("count") == "10,000 responses"
    assert 0 < browser.js("return document.querySelectorAll('.row').length") < 40
    browser.js("document.getElementById('list').scrollTop = 5000 * 58")
    browser.until(lambda: browser.js("return document.querySelector('.row[data-row=\"5000\"]') !== null"))
    assert browser.js("return document.querySelectorAll('.row').length") < 40


def test_filters_keep_what_they_say(browser, rollouts):
    unjudged = ("timed_out", "crashed", None)
    expected = {
        "2": [r.verdict == "correct" for r in rollouts],
        "3": [r.verdict not in ("correct", *unjudged) for r in rollouts],
        "4": [r.flaw is not None for r in rollouts],
        "5": [r.response.finish != "answered" for r in rollouts],
        "6": [r.verdict in unjudged for r in rollouts],
        "1": [True] * RESPONSES,
    }
    for key, kept in expected.items():
        browser.press(key)
        assert listed(browser) == [row for row, keep in enumerate(kept) if keep]


def test_longest_and_most_parallel_come_first(browser, rollouts):
    browser.press("l")
    lengths = [rollouts[row].response.longest_path for row in listed(browser)]
    assert lengths == sorted(lengths, reverse=True) and chosen(browser) == listed(browser)[0]
    browser.press("3", "m")
    degrees = [rollouts[row].response.parallelism for row in listed(browser)]
    assert degrees == sorted(degrees, reverse=True) and len(degrees) < RESPONSES


def test_responses_without_a_reward_come_last(browser, rollouts):
    for order, sign in (("highest reward", 1), ("lowest reward", -1)):
        browser.js("set({ sort: arguments[0] })", order)
        rewards = [rollouts[row].reward for row in listed(browser)]
        known = [sign * reward for reward in rewards if reward is not None]
        assert known == sorted(known, reverse=True)
        assert all(reward is None for reward in rewards[len(known) :])


def test_keys_move_through_the_list(browser):
    moves = {"j j ArrowDown": 3, "k": 2, "ArrowUp k k k": 0, "PageDown": 10, "End": 9999, "j": 9999, "Home": 0}
    for keys, row in moves.items():
        browser.press(*keys.split())
        assert chosen(browser) == row
    assert browser.js("return location.hash") == "#0"


def test_the_chosen_row_is_always_in_sight(browser):
    browser.press("End")
    chosen(browser)
    assert browser.js("""const list = document.getElementById('list').getBoundingClientRect();
                         const row = document.querySelector('.row[aria-selected=true]').getBoundingClientRect();
                         return row.top >= list.top - 1 && row.bottom <= list.bottom + 1""")


def test_keys_go_round_the_responses_to_one_problem(browser):
    browser.press("j", "n")
    assert chosen(browser) == 2
    browser.press("p", "p", "p")
    assert chosen(browser) == SAMPLES - 1
    browser.press("g")
    assert listed(browser) == list(range(SAMPLES))
    browser.press("g")
    assert len(listed(browser)) == RESPONSES


def test_search_finds_texts_problems_and_answers(browser):
    for query, rows in [(NEEDLE.upper(), [7777]), ("problem-0042", list(range(336, 344))), ("boxed{4321}", [4321])]:
        browser.press("/")
        empty = "const box = document.getElementById('search'); box.value = ''; box.dispatchEvent(new Event('input'))"
        browser.js(empty)
        browser.press(*query)
        browser.until(lambda rows=rows: listed(browser) == rows)
        assert chosen(browser) == rows[0]
        browser.press("Escape")
        browser.until(lambda: len(listed(browser)) == RESPONSES)


def test_what_was_searched_for_is_marked(browser):
    browser.press("/", *NEEDLE)
    browser.until(lambda: listed(browser) == [7777])
    marks = "return [...document.querySelectorAll('mark')].map(mark => mark.textContent)"
    assert browser.until(lambda: browser.js(marks)) == [NEEDLE]


def test_typing_in_the_search_box_is_no_command(browser):
    browser.press("/", "j", "3", "?")
    assert browser.js("return [state.filter, at, document.getElementById('help').open]") == ["all", 0, False]


def test_the_tree_is_drawn_to_scale(browser, rollouts):
    browser.press("j")
    row = chosen(browser)
    response = rollouts[row].response
    boxes = browser.js("""return [...document.querySelectorAll('.tree .segment')].map(segment => {
        const box = segment.querySelector('rect.outline');
        return ['x', 'y', 'width'].map(name => Number(box.getAttribute(name))) })""")
    [first, *workers, last] = boxes
    unit = first[2] / len(rounds_of(response)[0].director)
    for box, segment in zip(boxes, response.segments()):
        assert box[2] == pytest.approx(unit * len(segment), abs=0.1)
    assert {box[0] for box in workers} == {first[0] + first[2]}  # all spawned at once
    # read when the longest is done
    assert last[0] == pytest.approx(workers[0][0] + max(box[2] for box in workers), abs=0.1)
    assert len({box[1] for box in workers}) == len(workers) and first[1] == last[1]  # a lane each
    assert last[0] + last[2] - first[0] == pytest.approx(unit * response.longest_path, abs=0.1)


def test_workers_of_workers_have_lanes_of_their_own(browser):
    """By hand: director 2; workers of 3, of 1 with two of its own (4 and 5) and 2 more, and of 1; director 3."""
    shape = [2, [3, [1, [4, 5], 2], 1], 3]
    found = browser.js(
        "return boxes(arguments[0]).map(box => [box.name, box.lane, box.x, box.length, box.onPath])", shape
    )
    assert found == [
        ["director", 0, 0, 2, True],
        ["worker 1", 1, 2, 3, False],
        ["worker 2", 2, 2, 1, True],
        ["worker 2.1", 3, 3, 4, False],
        ["worker 2.2", 4, 3, 5, True],
        ["worker 2", 2, 8, 2, True],
        ["worker 3", 5, 2, 1, False],
        ["director", 0, 10, 3, True],
    ]
    links = browser.js(
        "return boxes(arguments[0]).map(box => [box.spawned ?? null, box.end ?? null, box.read ?? null])", shape
    )
    assert links == [
        [None, None, None],
        [0, 10, 0],
        [0, None, None],
        [2, 8, 2],
        [2, 8, 2],
        [None, 10, 0],
        [0, 10, 0],
        [None, None, None],
    ]
    lines = browser.js(
        """const [shape, shown] = [arguments[0], columns.shape[0]];
        columns.shape[0] = shape;
        const found = texts(0, boxes(shape).map(() => ({ text: "", logprobs: [] })));
        columns.shape[0] = shown;
        return found.map(line => [...line.querySelectorAll("h3")].map(title => title.firstChild.textContent));""",
        shape,
    )
    below = [["worker 2.1", "worker 2.2"]]  # texts side by side; one that spawned has a line for itself
    assert lines == [["director"], ["worker 1"], ["worker 2"], *below, ["worker 2"], ["worker 3"], ["director"]]


def test_texts_verdict_and_form_are_shown(browser, rollouts):
    wanted = [r.flaw == "stray_tag" and r.verdict == "wrong" and bool(r.response.forks) for r in rollouts]
    row = wanted.index(True)
    browser.js("choose(arguments[0])", row)
    assert chosen(browser) == row
    shown = browser.text("detail")
    rollout = rollouts[row]
    form = "ill-formed: stray_tag", "a tag in the director's text"
    for fact in ("wrong", *form, rollout.question, f"{rollout.reward:.3f}", f"{row}"):
        assert fact in shown
    texts = browser.js("return [...document.querySelectorAll('.card pre')].map(pre => pre.textContent)")
    assert texts == [tokenizer("spelled").decode(segment.tokens) for segment in rollout.response.segments()]


def test_tokens_are_coloured_by_their_own_logprob(browser, rollouts):
    browser.press("j", "c")
    row = chosen(browser)
    painted = "return state.colour === 'log-prob' && CSS.highlights.get('log-prob-16') !== undefined"
    browser.until(lambda: browser.js(painted))
    painted = browser.js("""const found = [];
        document.querySelectorAll('.card pre').forEach((pre, card) => {
          const [nodes, starts] = textNodes(pre);
          for (let shade = 1; shade <= 16; shade++) for (const range of CSS.highlights.get(`log-prob-${shade}`)) {
            const start = nodes.indexOf(range.startContainer), end = nodes.indexOf(range.endContainer);
            if (start >= 0) found.push([card, starts[start] + range.startOffset, starts[end] + range.endOffset, shade]);
          } });
        return found""")
    expected, pieces = [], Pieces(tokenizer("spelled").decode)
    for card, segment in enumerate(rollouts[row].response.segments()):
        at = 0
        for i, piece in enumerate(pieces(segment.tokens)):
            sampled = i - len(segment.inserted)
            if sampled >= 0:
                nats = round(-100 * segment.logprobs[sampled]) / 100
                expected.append([card, at, at + len(piece), 16 * min(1, nats / 5)])
            at += len(piece)
    shades = {tuple(place): shade for *place, shade in painted}
    for *place, shade in expected:
        assert abs(shades.pop(tuple(place), 0) - shade) <= 1
    assert shades == {}
    browser.press("c")
    browser.until(lambda: browser.js("return CSS.highlights.get('log-prob-16').size === 0"))


def test_help_opens_and_closes(browser):
    browser.press("?")
    browser.until(lambda: browser.js("return document.getElementById('help').open"))
    browser.press("Escape")
    browser.until(lambda: not browser.js("return document.getElementById('help').open"))
    browser.press("j")
    assert chosen(browser) == 1


def test_an_empty_selection_says_so(browser):
    browser.js("search('no response holds this')")
    browser.until(lambda: browser.text("count") == "0 of 10,000 responses" and not browser.text("progress"))
    browser.press("j", "n", "g", "c")
    assert "No response is listed" in browser.text("detail")


def test_an_address_with_a_number_opens_that_response(chromium, page):
    assert chosen(open_page(chromium, page.as_uri() + "#4242")) == 4242


def test_the_page_asks_for_nothing_but_itself_and_makes_no_error(chromium, page):
    chromium.requested(), chromium.log("browser")  # of other pages
    open_page(chromium, page.as_uri()).press("j", "c", "3", "l", "n")
    chosen(chromium)
    assert {url for url in chromium.requested() if not url.startswith(("data:", "about:"))} == {page.as_uri()}
    assert chromium.log("browser") == []
