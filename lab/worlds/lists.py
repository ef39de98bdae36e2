"""Problems in plain English for a pretrained model: judge the things in three boxes one by one and count.

    things    Box A: tiger, spoon, oak, … Box B: … Box C: … How many animals are there?
    numbers   Box A: 12, 83, … Box B: … Box C: … How many even numbers are there?
    walk      Start at 4. Go up 3, down 2, … Where are you?

A sequential solution judges box after box and adds up the counts; a walk is followed step by step and does not split.

    <think>
    Three boxes.
    Box A: tiger: animals, 1; spoon: furniture, no; oak: plants, no. So 1.
    Box B: …
    Box C: …
    1 + 0 = 1, 1 + 2 = 3.
    </think><answer>\\boxed{3}</answer>

`rewrite_parallel` gives each box to a worker and leaves the other words as they are. In a walk the director goes to the
end and each worker checks a third of the steps. A fifth of the words and all problems of the test split appear in no
other split.

    <folder>/problems/{train,validation,test}.jsonl      id, question, gold
    <folder>/base.jsonl                                  the same with a solution, to learn from and to rewrite
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from dccot.core.config import Positive, Seed
from dccot.core.files import write_jsonl_atomic
from dccot.data.problems import Problem
from dccot.data.task import Task
from dccot.lab.worlds.arithmetic import answered, spawned
from dccot.rollout.tags import THINK_OPEN

WORDS = {
    "animals": "tiger horse wolf rabbit eagle shark frog camel monkey snake dolphin sheep goat bear zebra giraffe "
    "elephant mouse owl beaver donkey penguin lizard whale fox",
    "foods": "bread cheese butter soup pasta pizza salad sausage pancake sandwich omelette yogurt cake cookie "
    "porridge muffin noodles rice steak pudding jam honey waffle bacon curry",
    "vehicles": "car bus truck bicycle tram train ferry helicopter tractor scooter airplane ambulance taxi canoe "
    "submarine motorcycle van yacht sled rocket wagon limousine jeep raft lorry",
    "instruments": "violin piano guitar trumpet flute drum cello harp clarinet trombone banjo saxophone accordion oboe "
    "tuba ukulele harmonica bassoon mandolin xylophone tambourine viola lute piccolo bagpipe",
    "clothes": "shirt jacket trousers skirt sock glove scarf coat hat sweater dress boot belt blouse vest shoe "
    "sandal shorts cap jeans pajamas cardigan mitten tie apron",
    "plants": "oak rose tulip fern cactus maple daisy pine ivy bamboo lily orchid willow birch moss sunflower "
    "clover lavender palm daffodil violet elm cedar poppy thistle",
    "furniture": "chair table sofa bed desk wardrobe bookshelf stool bench cupboard drawer armchair dresser couch "
    "cradle nightstand recliner cabinet mattress footstool sideboard hammock crib throne ottoman",
    "countries": "France Japan Brazil Egypt Canada Norway India Mexico Kenya Italy Spain Peru Greece Poland Chile "
    "Sweden Cuba Nepal Finland Germany Portugal Vietnam Ireland Argentina Morocco",
}
HELD_OUT = 5  # every fifth word of a category is for the test split only
FAMILIES = {"things": 0.6, "numbers": 0.25, "walk": 0.15}
BOXES, SIZES, MOST = "ABC", range(4, 7), 3  # things per box, of which so many count at most
WALKS = range(5, 9)  # steps
SPLITS = ("base", "train", "validation", "test")


@dataclass
class ListsConfig:
    seed: Seed = 0
    base: Positive = 800  # problems with solutions, for the sequential model to learn from
    train: Positive = 1500
    validation: Positive = 40
    test: Positive = 100


@dataclass(frozen=True)
class ListProblem(Problem):
    """A problem with its sequential solution. Its id is `split-family-number`."""

    solution: str


def words_of(category: str, split: str) -> list[str]:
    words = enumerate(WORDS[category].split())
    return [word for number, word in words if (number % HELD_OUT == 0) == (split == "test")]


def problem_stream(seed: int, split: str, taken: set[str]) -> Iterator[ListProblem]:
    """Endless problems of one split; `taken` are questions that no split may ask again."""
    rng = random.Random(f"{seed}/{split}")
    while True:
        family = rng.choices(list(FAMILIES), list(FAMILIES.values()))[0]
        question, gold, solution = {"things": _things, "numbers": _numbers, "walk": _walk}[family](rng, split)
        if question not in taken:
            taken.add(question)
            yield ListProblem(f"{split}-{family}-{len(taken):06d}", question, gold, solution)


def _things(rng: random.Random, split: str) -> tuple[str, str, str]:
    category = rng.choice(list(WORDS))
    kinds = {word: other for other in WORDS for word in words_of(other, split)}
    inside, outside = words_of(category, split), [word for word, kind in kinds.items() if kind != category]
    return _boxes(rng, f"How many {category} are there?", inside, outside, category, kinds)


def _numbers(rng: random.Random, split: str) -> tuple[str, str, str]:
    kinds = {str(number): ("even", "odd")[number % 2] for number in range(10, 100)}
    kind = rng.choice(["even", "odd"])
    inside, outside = ([item for item in kinds if (kinds[item] == kind) == wanted] for wanted in (True, False))
    return _boxes(rng, f"How many {kind} numbers are there?", inside, outside, kind, kinds)


def _boxes(
    rng: random.Random, ask: str, inside: Sequence[str], outside: Sequence[str], kind: str, kinds: Mapping[str, str]
) -> tuple[str, str, str]:
    """Three boxes with things that count (`inside`) and others; `kinds` says what each thing is."""
    question, lines, counts = "", "", []
    for box in BOXES:
        size, count = rng.choice(SIZES), rng.randint(0, MOST)
        items = rng.sample(inside, count) + rng.sample(outside, size - count)
        rng.shuffle(items)
        number = iter(range(1, count + 1))
        judged = [f"{item}: {kinds[item]}, {next(number) if kinds[item] == kind else 'no'}" for item in items]
        question += f"Box {box}: {', '.join(items)}. "
        lines += f"Box {box}: {'; '.join(judged)}. So {count}.\n"
        counts.append(count)
    first, total = counts[0] + counts[1], sum(counts)
    text = f"Three boxes.\n{lines}{counts[0]} + {counts[1]} = {first}, {first} + {counts[2]} = {total}.\n"
    return question + ask, str(total), _thought(text, str(total))


def _walk(rng: random.Random, split: str) -> tuple[str, str, str]:
    start = at = rng.randint(0, 9)
    steps, lines = [], []
    for _ in range(rng.choice(WALKS)):
        to = rng.choice([number for number in range(10) if number != at])
        name = f"{'up' if to > at else 'down'} {abs(to - at)}"
        steps.append(name)
        lines.append(f"{at} {name}: {to}")
        at = to
    question = f"Start at {start}. Go {', '.join(steps)}. Where are you?"
    return question, str(at), _thought(f"{'; '.join(lines)}.\n", str(at))


def _thought(text: str, answer: str) -> str:
    return f"{THINK_OPEN}\n{text}{answered(answer)}"


def rewrite_parallel(problem: Problem, sequential_text: str, *, attempt: int = 0) -> str:
    """The same words with each box in a worker, or a walk and its checks; any other text unchanged."""
    boxes = list(re.finditer(r"^Box ([A-Z]): .+\. So \d+\.\n", sequential_text, re.MULTILINE))
    in_a_row = all(box.end() == following.start() for box, following in pairwise(boxes))
    if [box[1] for box in boxes] == list(BOXES) and in_a_row:
        block = spawned([box[0] for box in boxes])
        return f"{sequential_text[: boxes[0].start()]}{block}\n{sequential_text[boxes[-1].end() :]}"
    step = r"\d (?:up|down) \d: \d"
    walk = re.search(rf"^({step}(?:; {step})+)\.\n", sequential_text, re.MULTILINE)
    steps = walk[1].split("; ") if walk else []
    if not walk or boxes or len(steps) < len(BOXES):
        return sequential_text
    cuts = [len(steps) * i // len(BOXES) for i in range(len(BOXES) + 1)]
    checks = [f"{'; '.join(steps[begin:end])}.\n" for begin, end in pairwise(cuts)]
    return f"{sequential_text[: walk.end()]}{spawned(checks)}\n{sequential_text[walk.end() :]}"


class Lists(Task):
    """The task of `make real`."""

    rewrite = staticmethod(rewrite_parallel)


def make_lists(config: ListsConfig, folder: Path) -> None:
    """Write every split; the same configuration gives the same bytes."""
    taken: set[str] = set()
    (folder / "problems").mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        rows = []
        for problem in islice(problem_stream(config.seed, split, taken), getattr(config, split)):
            solved = {"completion": problem.solution, "solution": problem.solution} if split == "base" else {}
            rows.append({"id": problem.id, "question": problem.question, "gold": problem.gold, **solved})
        write_jsonl_atomic(folder / "base.jsonl" if split == "base" else folder / "problems" / f"{split}.jsonl", rows)
