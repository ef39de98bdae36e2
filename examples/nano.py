"""Divide-and-Conquer CoT in one file: the director and its workers, the forest, the objectives, SFT and RL.

    python examples/nano.py     two minutes on a CPU core: a tiny model learns to divide counting among three workers

For reading: it needs torch and transformers, the model is an ordinary Transformers decoder, generation is plain. What
is left out is what makes it fast, large, or safe to interrupt; `tests/train/test_nano.py` holds it to the real thing,
with the same calls, forests, losses and gradients. In order of appearance:

    director    Algorithm 1 as a coroutine: asks for text, three workers write side by side, it reads them and continues
    Forest      responses laid out depth-first, so that one integer per token is the whole attention mask
    dapo, cispo the objectives; kl holds the policy near its start
    sft, RL     the two phases of training

The task: count the ones in three lists. A solution writes running sums; here for lists of two, with bars between
segments:

    alone       1 1 ; 0 1 ; 1 0 =  1 2 2 3 4 4 A 4
    parallel    1 1 ; 0 1 ; 1 0 =  <spawn> | <1> 1 2 </1> | <2> 0 1 </2> | <3> 1 1 </3> | </spawn> 2 3 4 A 4

SFT shows both, with too little practice to be good at either. RL adds accuracy and finds out that spawning pays.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

# --------------------------------------------------------------------------------------------------- vocabulary, task

WORKERS, LISTS, ITEMS = 3, 3, 5
WORDS = [*map(str, range(LISTS * ITEMS + 1)), *";=A", "<eos>", "<spawn>", "</spawn>"]
WORDS += [f"<{slash}{i}>" for i in range(1, WORKERS + 1) for slash in ("", "/")]
ID = {word: number for number, word in enumerate(WORDS)}
EOS, ANSWER, SPAWN, JOIN = ID["<eos>"], ID["A"], ID["<spawn>"], ID["</spawn>"]
OPEN = [ID[f"<{i}>"] for i in range(1, WORKERS + 1)]
CLOSE = [ID[f"</{i}>"] for i in range(1, WORKERS + 1)]


@dataclass(frozen=True)
class Problem:
    lists: tuple[tuple[int, ...], ...]

    @classmethod
    def draw(cls, rng: random.Random) -> Problem:
        return cls(tuple(tuple(rng.randint(0, 1) for _ in range(ITEMS)) for _ in range(LISTS)))

    @property
    def prompt(self) -> list[int]:
        return [token for digits in self.lists for token in (*digits, ID[";"])][:-1] + [ID["="]]

    @property
    def gold(self) -> int:
        return sum(map(sum, self.lists))


def running(digits: Sequence[int]) -> list[int]:
    return [sum(digits[: i + 1]) for i in range(len(digits))]


def demonstration(problem: Problem, parallel: bool) -> Response:
    """What SFT shows. (The real set: a base model's own solutions, rewritten in parallel by a stronger model.)"""
    ending = [ANSWER, problem.gold, EOS]
    if not parallel:
        digits = [digit for digits in problem.lists for digit in digits]
        return Response(problem.prompt, [Segment([], [*running(digits), *ending])])
    sums = [running(digits) for digits in problem.lists]
    fork = [Segment([OPEN[i]], [*sums[i], CLOSE[i]]) for i in range(WORKERS)]
    last = Segment([JOIN], [*running([each[-1] for each in sums]), *ending])
    return Response(problem.prompt, [Segment([], [SPAWN]), last], [fork])


# ---------------------------------------------------------------------------------------------- responses, the director


@dataclass
class Segment:
    """One call to the model: the tokens put before it, and the tokens that it sampled, which are never changed."""

    inserted: list[int]
    sampled: list[int]

    @property
    def tokens(self) -> list[int]:
        return self.inserted + self.sampled

    def __len__(self) -> int:
        return len(self.inserted) + len(self.sampled)


@dataclass
class Response:
    """The director's segments, and the workers that it spawned after each but perhaps the last: a tree."""

    prompt: list[int]
    trunk: list[Segment] = field(default_factory=list)
    forks: list[list[Segment]] = field(default_factory=list)

    def parts(self) -> list[tuple[Segment, list[Segment]]]:
        return list(zip(self.trunk, [*self.forks, []]))

    @property
    def longest_path(self) -> int:
        """What latency is measured by: all of the director, and of every fork the longest worker."""
        return sum(len(segment) + max(map(len, fork), default=0) for segment, fork in self.parts())

    @property
    def answer(self) -> int | None:
        """The digit that the response ends with."""
        ending = self.trunk[-1].sampled[-3:]
        return ending[1] if len(ending) == 3 and ending[0] == ANSWER and ending[2] == EOS else None

    @property
    def well_formed(self) -> bool:
        closed = all(worker.sampled[-1] == CLOSE[i] for fork in self.forks for i, worker in enumerate(fork))
        return bool(self.forks) and closed and self.answer is not None

    def __str__(self) -> str:
        say = lambda segment: " ".join(WORDS[token] for token in segment.tokens)
        return " | ".join(say(each) for segment, fork in self.parts() for each in (segment, *fork))


@dataclass
class Call:
    """Text that the model is asked for: it ends with `stop` or the end-of-sequence token, or is cut at max_tokens."""

    prompt: list[int]
    stop: int
    max_tokens: int


Director = Generator[list[Call], list[list[int]], None]


def director(response: Response, budget: int) -> Director:
    """Algorithm 1: yields the calls that may run side by side, is sent what they wrote, and fills in the response.

    The longest path never exceeds the budget, and a worker that closes its tag is always read: inserted tags are
    charged, and what the director needs after its workers (the tag and one token) is set aside before they start.
    """
    read, inserted, left = response.prompt, list[int](), budget
    while True:
        [written] = yield [Call(read + inserted, SPAWN, left - len(inserted))]
        response.trunk.append(Segment(inserted, written))
        read, left = read + inserted + written, left - len(inserted) - len(written)
        room = left - len([JOIN]) - 1 - 1  # for each worker's text, after its opening tag
        if written[-1] != SPAWN or room < 1:
            return  # answered, or out of budget
        texts = yield [Call([*read, OPEN[i]], CLOSE[i], room) for i in range(WORKERS)]
        fork = [Segment([OPEN[i]], text) for i, text in enumerate(texts)]
        response.forks.append(fork)
        if any(worker.sampled[-1] not in (CLOSE[i], EOS) for i, worker in enumerate(fork)):
            return  # a worker used up the budget
        read, left = read + [token for worker in fork for token in worker.tokens], left - max(map(len, fork))
        inserted = [JOIN]


def send(running: Director, texts: list[list[int]]) -> list[Call]:
    """The director's next calls; none when its response is complete."""
    with suppress(StopIteration):
        return running.send(texts)
    return []


Sampler = Callable[[list[Call]], list[list[int]]]


def roll_out(prompts: Sequence[list[int]], budget: int, sample: Sampler) -> list[Response]:
    """All responses at once. Those that wait for calls run them as one batch; the real engine does not wait for the
    slowest of the batch: each response moves on as soon as its own calls are finished.
    """
    responses = [Response(prompt) for prompt in prompts]
    running = [director(response, budget) for response in responses]
    waiting = [(each, next(each)) for each in running]
    while waiting:
        texts = iter(sample([call for _, calls in waiting for call in calls]))
        moved = [(each, send(each, [next(texts) for _ in calls])) for each, calls in waiting]
        waiting = [(each, calls) for each, calls in moved if calls]
    return responses


@torch.no_grad()
def generate(model: PreTrainedModel, calls: list[Call], temperature: float = 1.0) -> list[list[int]]:
    """Plain sampling of a batch, padded on the left, with a KV cache."""
    widest = max(len(call.prompt) for call in calls)
    tokens = torch.tensor([[EOS] * (widest - len(call.prompt)) + call.prompt for call in calls])
    mask = torch.tensor([[0] * (widest - len(call.prompt)) + [1] * len(call.prompt) for call in calls])
    position = (mask.cumsum(1) - 1).clamp(min=0)
    texts: list[list[int]] = [[] for _ in calls]
    writing, cache = set(range(len(calls))), None
    while writing:
        output = model(tokens, attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True)
        drawn = torch.multinomial((output.logits[:, -1] / temperature).softmax(-1), 1)
        for i in list(writing):
            texts[i].append(token := int(drawn[i]))
            if token in (calls[i].stop, EOS) or len(texts[i]) == calls[i].max_tokens:
                writing.remove(i)
        tokens, cache, position = drawn, output.past_key_values, position[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(drawn)], 1)
    return texts


# ----------------------------------------------------------------------------------------------------------- the forest


@dataclass
class Forest:
    """Responses as one row of N tokens, depth-first: a token is seen by a contiguous run of tokens after it.

        prompt S1 | W2 as written | W3 as written | W1 W2' W3' S2       query q sees key k  ⇔  k ≤ q < visible_until[k]

    Worker 1 as written and worker 1 as the director reads it have the same tokens, positions and context, so they are
    one. W2' and W3' are what the director reads of the others; they carry no loss.
    """

    tokens: Tensor  # [N]
    visible_until: Tensor  # [N]
    sampled: Tensor  # bool [N]: the policy wrote it, it carries loss
    response: Tensor  # [N]: index of its response
    # of every sampled token, [M], for RL
    advantage: Tensor | None = None
    old: Tensor | None = None  # log-prob under the weights that sampled it
    reference: Tensor | None = None  # log-prob under the weights that training started from

    @classmethod
    def of(cls, groups: Sequence[Sequence[Response]]) -> Forest:
        """The responses of a group answer one prompt and share it."""
        tokens, until, sampled, owner = list[int](), list[int](), list[bool](), list[int]()

        def lay(ids: list[int], index: int, own: int = 0) -> range:
            """Append tokens, of which the last `own` carry loss; until when they are visible is known later."""
            tokens.extend(ids)
            until.extend([0] * len(ids))
            sampled.extend([False] * (len(ids) - own) + [True] * own)
            owner.extend([index] * len(ids))
            return range(len(tokens) - len(ids), len(tokens))

        def close(places: Sequence[int]) -> None:
            for place in places:
                until[place] = len(tokens)

        index = 0
        for group in groups:
            prompt = lay(group[0].prompt, index)
            for response in group:
                trunk: list[int] = []
                for number, (segment, fork) in enumerate(response.parts(), start=1):
                    trunk += lay(segment.tokens, index, len(segment.sampled))
                    for worker in fork[1:]:
                        close(lay(worker.tokens, index, len(worker.sampled)))
                    for worker in fork[:1]:
                        trunk += lay(worker.tokens, index, len(worker.sampled))
                    if number < len(response.trunk):  # the director goes on
                        for worker in fork[1:]:
                            trunk += lay(worker.tokens, index)
                close(trunk)
                index += 1
            close(prompt)
        return cls(*(torch.tensor(each) for each in (tokens, until, sampled, owner)))

    @property
    def mask(self) -> Tensor:
        """bool [N, N]. The real kernels never build it: they visit only the tiles that hold visible pairs."""
        at = torch.arange(len(self.tokens))
        return (at[None] <= at[:, None]) & (at[:, None] < self.visible_until[None])

    @property
    def position(self) -> Tensor:
        """[N]: how many tokens it sees before itself, the position that inference used."""
        return self.mask.sum(1) - 1

    @property
    def parent(self) -> Tensor:
        """[N]: the nearest token that it sees, whose row of the model predicts it."""
        return (self.mask.tril(-1) * torch.arange(len(self.tokens))).amax(1)

    def logprobs(self, model: PreTrainedModel, temperature: float = 1.0) -> Tensor:
        """[M]: the log-prob of every sampled token."""
        mask, position = self.mask[None, None], self.position[None]
        logits = model(self.tokens[None], attention_mask=mask, position_ids=position).logits[0]
        logits = logits[self.parent[self.sampled]] / temperature
        return logits.log_softmax(-1).gather(1, self.tokens[self.sampled][:, None])[:, 0]


# ------------------------------------------------------------------------------------------------------- the objectives


def dapo(logprob: Tensor, old: Tensor, advantage: Tensor, low: float = 0.2, high: float = 0.28) -> Tensor:
    """[M]: −min(r·A, clip(r, 1 − low, 1 + high)·A) with r = π/π_old. A token outside the clip has no gradient."""
    ratio = (logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def cispo(logprob: Tensor, old: Tensor, advantage: Tensor, cap: float = 5.0) -> Tensor:
    """[M]: −sg[min(r, cap)]·A·log π. Every token keeps its gradient, with a bounded weight."""
    ratio = (logprob.detach() - old).exp().clamp(max=cap)
    return -ratio * advantage * logprob


def kl(logprob: Tensor, reference: Tensor) -> Tensor:
    """[M]: an estimate of KL(π ‖ π_reference) that is never negative."""
    return (reference - logprob).exp() - (reference - logprob) - 1


def reward(response: Response, problem: Problem, budget: int, penalty: float = 0.5, cutoff: int = 12) -> float:
    """0 if wrong; 1 if correct, 0.5 without workers or with stray tags; less for a longest path above the cutoff."""
    if response.answer != problem.gold:
        return 0.0
    long = penalty * max(0, response.longest_path - cutoff) / (budget - cutoff)
    return max(0.0, (1.0 if response.well_formed else 0.5) - long)


def advantages(rewards: Sequence[float]) -> Tensor:
    """Of the responses to one prompt: how much better each is than the others."""
    values = torch.tensor(rewards)
    return (values - values.mean()) / (values.std() + 1e-6)


# ------------------------------------------------------------------------------------------------------------- training


def mean_loss(forests: Sequence[Forest], loss: Callable[[Forest], Tensor]) -> float:
    """The mean of a loss [M] over all sampled tokens, however they are packed, with its gradients."""
    count = sum(int(forest.sampled.sum()) for forest in forests)
    total = 0.0
    for forest in forests:
        part = loss(forest).sum() / count
        part.backward()
        total += float(part.detach())
    return total


def update(optimizer: torch.optim.Optimizer, forests: Sequence[Forest], loss: Callable[[Forest], Tensor]) -> float:
    value = mean_loss(forests, loss)
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return value


def sft(model: PreTrainedModel, steps: int, rng: random.Random, batch: int = 32, rate: float = 2e-3) -> None:
    """Learn the protocol from demonstrations: no loss on what inference inserts, nor on what is only read."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, step / 20, 2 * (1 - step / (steps + 1)))
        shown = [demonstration(Problem.draw(rng), parallel=number % 4 > 0) for number in range(batch)]
        forests = [Forest.of([[response] for response in shown[at : at + 8]]) for at in range(0, batch, 8)]
        loss = update(optimizer, forests, lambda forest: -forest.logprobs(model))
        if step % 50 == 0:
            print(f"SFT step {step:3}  loss {loss:.3f}", flush=True)


@dataclass
class RL:
    """What the policy maximises, and on how much text a step learns."""

    steps: int = 40
    prompts: int = 24
    group_size: int = 8  # responses per prompt, whose rewards are compared
    budget: int = 30  # of the longest path
    rate: float = 2e-4
    objective: Callable[[Tensor, Tensor, Tensor], Tensor] = dapo
    kl_coefficient: float = 0.001

    def train(self, model: PreTrainedModel, rng: random.Random) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.rate, weight_decay=0.01)
        reference = copy.deepcopy(model)
        for step in range(1, self.steps + 1):
            said = self.step(model, reference, optimizer, [Problem.draw(rng) for _ in range(self.prompts)])
            if step % 5 == 0:
                print(f"RL step {step:3}  {said}", flush=True)

    def step(
        self, model: PreTrainedModel, reference: PreTrainedModel, optimizer: torch.optim.Optimizer, drawn: list[Problem]
    ) -> str:
        """Problems → responses → rewards → groups that carry a signal → advantages → forests → two updates."""
        problems = [problem for problem in drawn for _ in range(self.group_size)]
        prompts = [problem.prompt for problem in problems]
        responses = roll_out(prompts, self.budget, lambda calls: generate(model, calls))
        rewards = [reward(response, problem, self.budget) for response, problem in zip(responses, problems)]
        groups = [range(at, at + self.group_size) for at in range(0, len(problems), self.group_size)]
        kept = [group for group in groups if 0 < sum(rewards[i] > 0 for i in group) < len(group)]  # Remove-Easy

        forests = []
        for pair in (kept[at : at + 2] for at in range(0, len(kept), 2)):
            forest = Forest.of([[responses[i] for i in group] for group in pair])
            worth = torch.cat([advantages([rewards[i] for i in group]) for group in pair])
            forest.advantage = worth[forest.response[forest.sampled]]
            with torch.no_grad():
                forest.old, forest.reference = forest.logprobs(model), forest.logprobs(reference)
            forests.append(forest)

        middle = (len(forests) + 1) // 2
        for mini_batch in filter(None, (forests[:middle], forests[middle:])):
            update(optimizer, mini_batch, lambda forest: self.loss(forest, model))
        return f"reward {sum(rewards) / len(rewards):.3f}  {summary(responses, problems)}"

    def loss(self, forest: Forest, model: PreTrainedModel) -> Tensor:
        logprob = forest.logprobs(model)
        loss = self.objective(logprob, forest.old, forest.advantage)
        return loss + self.kl_coefficient * kl(logprob, forest.reference)


def summary(responses: Sequence[Response], problems: Sequence[Problem]) -> str:
    mean = lambda values: sum(values) / len(responses)
    correct = mean(response.answer == problem.gold for response, problem in zip(responses, problems))
    spawned, path = mean(bool(each.forks) for each in responses), mean(each.longest_path for each in responses)
    return f"correct {correct:4.0%}  with workers {spawned:4.0%}  longest path {path:.1f}"


def tiny_model(seed: int = 0) -> PreTrainedModel:
    """An ordinary Transformers decoder, 0.2 million parameters, from scratch."""
    torch.manual_seed(seed)
    size = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    return Qwen2ForCausalLM(Qwen2Config(vocab_size=len(WORDS), max_position_embeddings=256, **size, **heads))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sft-steps", type=int, default=250)
    parser.add_argument("--rl-steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # the fastest for a model this small
    model, rng = tiny_model(options.seed), random.Random(options.seed)
    problems = [Problem.draw(random.Random(f"test {number}")) for number in range(200)]

    def evaluate(name: str) -> None:
        responses = roll_out([each.prompt for each in problems], 30, lambda calls: generate(model, calls))
        print(f"{name:11}  {summary(responses, problems)}\n             {responses[0]}", flush=True)

    sft(model, options.sft_steps, rng)
    evaluate("after SFT")
    RL(options.rl_steps).train(model, rng)
    evaluate("after RL")


if __name__ == "__main__":
    main()
