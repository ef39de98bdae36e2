"""Problems in plain English for a pretrained model: judge a list of things one by one and count.

    things    How many of these are animals: tiger, spoon, oak, … ?
    numbers   How many of these numbers are larger than 50: 12, 83, … ?
    chain     Start with 4. Then add 3, double it, triple it, … and keep only the last digit each time. Which digit is it?

A sequential solution splits the list into three parts and adds up their counts; a chain is followed step by step, and does not split.

    <think>
    Three parts: tiger to oak, spoon to violin, horse to bread.
    Part 1: tiger to oak
    tiger: yes, 1
    rose: no, 1
    …
    Part 1 has 1.
    Part 2: …
    Together 1 + 0 + 2 = 3.
    </think><answer>\\boxed{3}</answer>

`rewrite_parallel` gives every part to a worker and leaves the other words as they are. A fifth of the words and all problems of the test
split are in no other split.

    <folder>/problems/{train,validation,test}.jsonl      id, question, gold
    <folder>/base.jsonl                                  the same, and a sequential solution: once to learn from, once to rewrite
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from dccot.config import at_least
from dccot.data.problems import Problem
from dccot.files import write_jsonl_atomic
from dccot.rollout.protocol import ANSWER_CLOSE, ANSWER_OPEN, SPAWN_CLOSE, SPAWN_OPEN, THINK_CLOSE, THINK_OPEN, worker_close, worker_open

WORKERS = 3
WORDS = {
    "animals": "tiger horse wolf rabbit eagle shark frog camel monkey snake dolphin sheep goat bear zebra giraffe elephant mouse owl "
    "beaver donkey penguin lizard whale fox",
    "foods": "bread cheese butter soup pasta pizza salad sausage pancake sandwich omelette yogurt cake cookie porridge muffin noodles rice "
    "steak pudding jam honey waffle bacon curry",
    "vehicles": "car bus truck bicycle tram train ferry helicopter tractor scooter airplane ambulance taxi canoe submarine motorcycle van "
    "yacht sled rocket wagon limousine jeep raft lorry",
    "instruments": "violin piano guitar trumpet flute drum cello harp clarinet trombone banjo saxophone accordion oboe tuba ukulele "
    "harmonica bassoon mandolin xylophone tambourine viola lute piccolo bagpipe",
    "clothes": "shirt jacket trousers skirt sock glove scarf coat hat sweater dress boot belt blouse vest shoe sandal shorts cap jeans "
    "pajamas cardigan mitten tie apron",
    "plants": "oak rose tulip fern cactus maple daisy pine ivy bamboo lily orchid willow birch moss sunflower clover lavender palm "
    "daffodil violet elm cedar poppy thistle",
    "furniture": "chair table sofa bed desk wardrobe bookshelf stool bench cupboard drawer armchair dresser couch cradle nightstand "
    "recliner cabinet mattress footstool sideboard hammock crib throne ottoman",
    "countries": "France Japan Brazil Egypt Canada Norway India Mexico Kenya Italy Spain Peru Greece Poland Chile Sweden Cuba Nepal "
    "Finland Germany Portugal Vietnam Ireland Argentina Morocco",
}
HELD_OUT = 5  # every fifth word of a category is for the test split only
FAMILIES = {"things": 0.6, "numbers": 0.25, "chain": 0.15}
SIZES, CHAIN_SIZES = range(9, 16), range(5, 9)
SPLITS = ("base", "train", "validation", "test")


@dataclass
class ListsConfig:
    seed: int = 0
    base: int = 800  # problems with solutions, for the sequential model to learn from
    train: int = 1500
    validation: int = 40
    test: int = 100

    def check(self) -> None:
        for split in SPLITS:
            at_least(1, getattr(self, split), split)


@dataclass(frozen=True)
class ListProblem(Problem):
    """A problem with its sequential solution. Its id is `split-family-number`."""

    solution: str


def words_of(category: str, split: str) -> list[str]:
    return [word for number, word in enumerate(WORDS[category].split()) if (number % HELD_OUT == 0) == (split == "test")]


def problem_stream(seed: int, split: str, taken: set[str]) -> Iterator[ListProblem]:
    """Endless problems of one split; `taken` are questions that no split may ask again."""
    rng = random.Random(f"{seed}/{split}")
    while True:
        family = rng.choices(list(FAMILIES), list(FAMILIES.values()))[0]
        question, gold, solution = {"things": _things, "numbers": _numbers, "chain": _chain}[family](rng, split)
        if question not in taken:
            taken.add(question)
            yield ListProblem(f"{split}-{family}-{len(taken):06d}", question, gold, solution)


def _things(rng: random.Random, split: str) -> tuple[str, str, str]:
    category, size = rng.choice(list(WORDS)), rng.choice(SIZES)
    inside = words_of(category, split)
    outside = [word for other in WORDS if other != category for word in words_of(other, split)]
    count = rng.randint(1, min(len(inside), size - 3))
    items = rng.sample(inside, count) + rng.sample(outside, size - count)
    rng.shuffle(items)
    question = f"How many of these are {category}: {', '.join(items)}?"
    return question, str(count), _judged([(item, item in inside) for item in items])


def _numbers(rng: random.Random, split: str) -> tuple[str, str, str]:
    limit, items = 10 * rng.randint(3, 7), rng.sample(range(10, 100), rng.choice(SIZES))
    question = f"How many of these numbers are larger than {limit}: {', '.join(map(str, items))}?"
    return question, str(sum(item > limit for item in items)), _judged([(str(item), item > limit) for item in items])


def _chain(rng: random.Random, split: str) -> tuple[str, str, str]:
    at, steps, lines = rng.randint(1, 9), [], []
    start = at
    for _ in range(rng.choice(CHAIN_SIZES)):
        by = rng.randint(2, 9)
        name, result = rng.choice([(f"add {by}", at + by), ("double it", 2 * at), ("triple it", 3 * at)])
        lines.append(f"{at}, {name}: {result % 10}\n")
        steps.append(name)
        at = result % 10
    question = f"Start with {start}. Then {', '.join(steps)}, and keep only the last digit each time. Which digit is it?"
    return question, str(at), _thought(f"Step by step.\n{''.join(lines)}", str(at))


def _judged(items: Sequence[tuple[str, bool]]) -> str:
    cuts = [round(len(items) * part / WORKERS) for part in range(WORKERS + 1)]
    parts = [items[begin:end] for begin, end in pairwise(cuts)]
    names = [f"{part[0][0]} to {part[-1][0]}" for part in parts]
    counts = [sum(is_one for _, is_one in part) for part in parts]
    text = f"Three parts: {', '.join(names)}.\n"
    for number, (name, part, count) in enumerate(zip(names, parts, counts), start=1):
        text += f"Part {number}: {name}\n"
        for place, (item, is_one) in enumerate(part, start=1):
            text += f"{item}: {'yes' if is_one else 'no'}, {sum(each for _, each in part[:place])}\n"
        text += f"Part {number} has {count}.\n"
    total = sum(counts)
    return _thought(f"{text}Together {' + '.join(map(str, counts))} = {total}.\n", str(total))


def _thought(text: str, answer: str) -> str:
    return f"{THINK_OPEN}\n{text}{THINK_CLOSE}{ANSWER_OPEN}\\boxed{{{answer}}}{ANSWER_CLOSE}"


def rewrite_parallel(problem: Problem, sequential_text: str, *, attempt: int = 0) -> str:
    """The same words with every part in a worker. Without exactly three parts in a row it is returned unchanged: acceptance rejects it."""
    parts = list(re.finditer(r"Part (\d): .+\n(?:.+: (?:yes|no), \d+\n)+Part \1 has \d+\.\n", sequential_text))
    workers = "".join(f"{worker_open(i)}{part[0]}{worker_close(i)}" for i, part in enumerate(parts, start=1))
    in_a_row = all(part.end() == following.start() for part, following in pairwise(parts))
    if [part[1] for part in parts] != [str(i) for i in range(1, WORKERS + 1)] or not in_a_row:
        return sequential_text
    return f"{sequential_text[: parts[0].start()]}{SPAWN_OPEN}{workers}{SPAWN_CLOSE}\n{sequential_text[parts[-1].end() :]}"


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
