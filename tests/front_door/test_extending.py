"""docs/extending.md, done: one of each thing is added from a package outside the repository, and used."""

import asyncio
import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from dccot.core.config import ConfigError, check, load_config, lookup
from dccot.core.files import write_jsonl_atomic
from dccot.data import sft_set
from dccot.data.judge import GradingConfig, Verdict, open_judge
from dccot.data.prompts import PromptConfig
from dccot.data.task import task_of
from dccot.eval import results as evaluation
from dccot.eval.evaluate import evaluate
from dccot.kernels import tree_attention as attention
from dccot.lab.bench import __main__ as bench
from dccot.lab.worlds.exact_task import make_model
from dccot.model import config as model_config
from dccot.model.tokenizer import open_tokenizer
from dccot.model.transformer import Transformer
from dccot.model.weights import load_weights
from dccot.pipeline import run_recipe
from dccot.rollout.director import RolloutConfig
from dccot.rollout.generate import Request, generate
from dccot.rollout.response import Finish, Rollout, Segment
from dccot.serve.launch import OWN, overrides
from dccot.stages import load_recipe, sampling
from dccot.train import sft
from dccot.train.config import RLConfig
from dccot.train.objectives import ObjectiveConfig, objective_loss
from dccot.train.rewards import FILTERS, RewardConfig, advantages_of, reward_of
from tests.support.rounds import final_of, flat

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()

MODULE = "\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
KERNEL = """
import torch


def scores(q, k, visible_until, scale):
    at = torch.arange(len(q))
    seen = (at[None] <= at[:, None]) & (at[:, None] < visible_until[None])
    return torch.einsum("qhd,khd->hqk", q, k).mul(scale).masked_fill(~seen, -torch.inf)


def forward(q, k, v, layout, scale):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    found = scores(q, k, layout, scale)
    return torch.einsum("hqk,khd->qhd", found.softmax(-1), v), found.logsumexp(-1)


def backward(grad, q, k, v, out, lse, layout, scale):
    heads = k.shape[1]
    k, v = (x.repeat_interleave(q.shape[1] // heads, 1) for x in (k, v))
    weights = scores(q, k, layout, scale).sub(lse[..., None]).exp()
    change = torch.einsum("qhd,khd->hqk", grad, v)
    change = weights * (change - (weights * change).sum(-1, keepdim=True)) * scale
    grads = torch.einsum("hqk,qhd->khd", change, q), torch.einsum("hqk,qhd->khd", weights, grad)
    return torch.einsum("hqk,khd->qhd", change, k), *(x.unflatten(1, (heads, -1)).sum(2) for x in grads)
"""
ENGINE = '''
from dccot.rollout.director import Completion, Stop
from tests.support.rounds import final_of, flat


class Parrot:
    """Says the same to every call."""

    context, replica, replicas, sampled_tokens = 1000, 0, 1, 0

    def __init__(self, tokenizer, text):
        self.tokenizer, self.ids, self.pending = tokenizer, tokenizer.encode(text, add_special_tokens=False), {}

    @property
    def running(self):
        return len(self.pending)

    def add(self, key, call, *, seed, temperature, top_p=1.0, priority=0):
        self.pending[key] = call

    def step(self):
        ids = [*self.ids, self.tokenizer.eos_token_id]
        done = [(key, Completion(ids, [-0.5] * len(ids), Stop.EOS)) for key in self.pending]
        self.pending = {}
        return done

    def written(self):
        return {key: [] for key in self.pending}

    def forget_prefixes(self): ...

    def abort(self, keys):
        for key in keys:
            del self.pending[key]
'''


@pytest.fixture(scope="module", autouse=True)
def my_package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("outside")
    for name, text in {"__init__": "", "my_module": MODULE, "my_kernel": KERNEL, "my_engine": ENGINE}.items():
        (folder / "my_package").mkdir(exist_ok=True)
        (folder / "my_package" / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        forget()
        yield
        forget()


def forget() -> None:
    for name in [name for name in sys.modules if name.startswith("my_package")]:
        del sys.modules[name]


def mine(name: str) -> str:
    return f"my_package.my_module:{name}"


def rollout(tokens: int) -> Rollout:
    response = flat([1], [], Segment([], [7] * tokens, [-0.1] * tokens), Finish.ANSWERED)
    return Rollout("p", 0, "q", "3", "text", response, verdict="correct")


# ---- by a name in the configuration ----


def test_an_rl_run_takes_all_of_them_by_name_and_refuses_names_that_cannot_be_imported():
    own = [f"objective.kind={mine('my_loss')}", f"reward.kind={mine('my_reward')}", f"filter={mine('my_filter')}",
           f"advantage={mine('my_advantage')}", f"grading.kind={mine('MyJudge')}"]  # fmt: skip
    config = load_config(RLConfig, "configs/rl/stage1.yaml", ["model.path=x", "data.train=y", *own])
    assert (config.objective.kind, config.filter) == (mine("my_loss"), mine("my_filter"))
    for setting in own:
        with pytest.raises(ConfigError, match="cannot be imported"):
            load_config(RLConfig, "configs/rl/stage1.yaml", ["model.path=x", "data.train=y", f"{setting}_missing"])


def test_an_objective():
    config = ObjectiveConfig(kind=mine("my_loss"), ratio_cap=2.0, kl_coefficient=0.0)
    logprob, advantage = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 0.5])
    found = objective_loss(config, logprob, logprob, advantage, logprob, None)
    assert found.tolist() == [2.0, 2.0]


RECIPE = """
output: {folder}
task: my_package.my_module:Spelling
model: {folder}/model
train: {folder}/words.txt
benchmarks: ["{folder}/words.txt"]
stages:
  sequential: {{run: sequential, set: {{prompt.kind: sequential, rollout.budget: 50}}}}
  rewrite: {{run: rewrite, set: {{source: "{{run}}/sequential/solutions.jsonl", output: "{folder}/sft.jsonl"}}}}
  sft: {{run: sft, set: {{data.train: "{folder}/sft.jsonl"}}}}
  rl: {{run: rl, set: {{validation.every: 0}}}}
  eval: {{run: eval, set: {{model: sft, budget: 50, n: 2}}}}
"""


def test_a_task_is_one_file_and_one_line_of_configuration(tmp_path):
    words = {"tree": "eert", "leaf": "fael"}
    (tmp_path / "words.txt").write_text("".join(f"{word} {gold}\n" for word, gold in words.items()))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    make_model(tmp_path / "model")
    recipe, plans = load_recipe(tmp_path / "recipe.yaml")
    configs = {plan.name: plan.load() for plan in plans}
    assert {config.task for config in configs.values()} == {mine("Spelling")}
    engine = importlib.import_module("my_package.my_engine").Parrot(
        open_tokenizer(tmp_path / "model"), "x</think><answer>eert</answer>"
    )
    (recipe.folder / "sequential").mkdir(parents=True)
    assert (
        sft_set.solve_sequentially(configs["sequential"], engine).kept == 1
    )  # by its judge, on problems that it read itself
    asyncio.run(sft_set.rewrite(configs["rewrite"]))
    [example] = sft.load_examples(tmp_path / "sft.jsonl", configs["sft"], engine.tokenizer)  # by its rewriting
    said = engine.tokenizer.decode(example.response.prompt)
    assert "The word is tree." in said and "Spell it backwards" in said and r"\boxed" not in said
    task = task_of(configs["rl"])
    assert reward_of(rollout(30), configs["rl"].reward, 300, task.reward) == 0.25
    found = evaluate(
        tmp_path / "model",
        configs["eval"].resolved(),
        sampling(configs["eval"], "parallel"),
        tmp_path / "e",
        engine=engine,
    )
    assert found.results["words"].estimate("accuracy").value == 0.5
    (tmp_path / "model" / "config.yaml").write_text(f"task: {mine('Spelling')}\n")
    assert any(
        "Spell it backwards" in line for line in overrides(str(tmp_path / "model"), dict.fromkeys(OWN))
    )  # of `dccot serve`


def test_a_reward():
    assert reward_of(rollout(30), RewardConfig(kind=mine("my_reward")), budget=300) == 0.1


def test_an_advantage():
    assert advantages_of([1.0, None, 0.25], mine("my_advantage")) == [0.75, 0.0, 0.0]


def test_a_filter():
    chosen = lookup(FILTERS, mine("my_filter"), "filter")
    assert [chosen([rollout(1)] * count) for count in (2, 3)] == [False, True]


def test_a_judge():
    with open_judge(GradingConfig(kind=mine("MyJudge"))) as judge:
        assert judge.grade([("it is 3", "3"), ("it is 4", "3")]) == [Verdict.CORRECT, Verdict.WRONG]


def test_a_prompt_format():
    prompt = PromptConfig(kind=mine("MY_FORMAT"), open_think=False)
    check(prompt, "prompt")
    assert (prompt.text("1+1?"), prompt.parallel) == ("Q: 1+1? A:", False)


# ---- by an entry in a registry ----


def test_a_benchmark(tmp_path, monkeypatch):
    monkeypatch.setitem(evaluation.BENCHMARKS, "mine", evaluation.Benchmark("mine", "Mine", 3))
    write_jsonl_atomic(tmp_path / "mine.jsonl", [{"id": "a", "question": "1+1?", "gold": "2"}])
    found = evaluation.named_benchmark("mine", tmp_path)
    assert (found.title, found.samples, found.file) == ("Mine", 3, tmp_path / "mine.jsonl")


def test_a_measurement_of_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(bench.BENCHMARKS, "mine", "my_package.my_module")
    assert bench.main(["mine", "--here"]) == 0
    assert "speed of mine" in capsys.readouterr().out and (tmp_path / "runs/bench/mine.json").is_file()


def test_a_stage_of_a_recipe(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output: {tmp_path}\nstages: {{first: {{run: {mine('my_stage')}, set: {{text: hello}}}}}}")
    run_recipe(recipe)
    assert (tmp_path / "pipeline" / "first" / "said.txt").read_text() == "hello"
    with pytest.raises(ConfigError, match="unknown key txt; did you mean 'text'"):
        run_recipe(recipe, ["first.txt=x", "name=another"])


def test_a_kernel(monkeypatch):
    kernel = importlib.import_module("my_package.my_kernel")
    monkeypatch.setitem(attention.BACKENDS, "mine", lambda mask: (kernel, mask.visible_until))
    mask = attention.TreeMask(torch.tensor([6, 3, 3, 6, 6, 6]))
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(6, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    found, expected = [], []
    for backend, results in (("mine", found), ("dense", expected)):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention.tree_attention(*inputs, mask, backend=backend)
        results += [out, *torch.autograd.grad(out, inputs, grad)]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_model_family(tmp_path, monkeypatch):
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = MistralForCausalLM(
        MistralConfig(**sizes, **heads, head_dim=32, sliding_window=None, initializer_range=0.2)
    ).eval()
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type is 'mistral'; the decoder computes"):
        model_config.read_config(tmp_path)
    monkeypatch.setitem(model_config.FAMILIES, "mistral", model_config.Family(max_position=131_072))
    ours = Transformer(model_config.read_config(tmp_path))
    load_weights(ours, tmp_path)
    tokens = torch.arange(60)
    with torch.no_grad():
        expected = theirs(input_ids=tokens[None]).logits[0]
        torch.testing.assert_close(ours(tokens, tokens, attention.TreeMask.causal([60])), expected, rtol=0, atol=1e-5)
    assert expected.std() > 0.5


# ---- by an object ----


def test_an_engine():
    from dccot.lab.worlds.arithmetic import make_tokenizer

    engine = importlib.import_module("my_package.my_engine").Parrot(make_tokenizer(), "a: 3\n")
    requests = [Request(f"p{i}", 0, [1, 2, 3], False) for i in range(2)]
    found = list(generate(engine, requests, RolloutConfig(budget=50), seed=(0,)))
    assert {request.problem for request, _ in found} == {"p0", "p1"}
    assert all(engine.tokenizer.decode(final_of(response).sampled[:-1]) == "a: 3\n" for _, response in found)


# ---- the page ----


def test_every_registry_that_the_page_names_is_where_it_says():
    named_there = re.findall(r"`([A-Z_]{5,})` in `([\w/]+)\.py`", PAGE)
    assert len(named_there) >= 8
    for registry, file in named_there:
        assert hasattr(importlib.import_module("dccot." + file.removeprefix("dccot/").replace("/", ".")), registry), (
            f"{file}.py: {registry}"
        )


@pytest.mark.parametrize(
    "thing",
    ["task", "model family", "objective", "reward", "filter", "advantage", "judge", "engine", "benchmark", "kernel"],
)
def test_the_page_explains_each(thing):
    assert re.search(rf"\*\*An? {thing}\.\*\*", PAGE)
