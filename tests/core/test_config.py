"""Configurations are typed, printable and refuse what they do not know, in one line that says what to change."""

import copy
import string
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dccot.core.config import (
    Address,
    ConfigError,
    Fraction,
    NonNegative,
    Positive,
    check,
    known,
    load_config,
    lookup,
    require,
    required,
    to_yaml,
    with_new_names,
)
from dccot.recipe import Recipe
from dccot.train import launch
from dccot.train.config import RLConfig, SFTConfig
from dccot.train.launch import Training

REGISTRY = {"half": lambda x: x / 2, "double": lambda x: 2 * x}


@dataclass
class Inner:
    width: Positive = 3
    rate: Fraction = 0.5
    label: str | None = None
    most: NonNegative | None = None

    def check(self) -> None:
        require(self.most is None or self.width <= self.most, f"width is {self.width}; inner.most is {self.most}")


@dataclass
class Outer:
    name: Literal["x", "parallel"] = "x"
    sizes: list[Positive] = field(default_factory=lambda: [1, 2])
    flag: bool = False
    inner: Inner = field(default_factory=Inner)
    items: list[Inner] = field(default_factory=list)
    text: str = ""
    url: Address | None = None
    function: Annotated[str, known(REGISTRY)] = "half"
    groups: dict[str, Inner] = field(default_factory=dict)
    folder: Annotated[str, required("name one")] = "f"


@dataclass
class Owner:
    outer: Outer = field(default_factory=lambda: Outer(text="its own", inner=Inner(width=5)))


@pytest.fixture
def write(tmp_path):
    def make(text: str, name: str = "c.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return make


def refused(overrides=(), path=None, kind=Outer) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(kind, path, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_group_given_in_part_keeps_what_its_owner_chose_for_the_rest():
    outer = load_config(Owner, None, ["outer.flag=true", "outer.inner.label=x"]).outer
    assert (outer.flag, outer.text, outer.inner) == (True, "its own", Inner(width=5, label="x"))
    sft = load_config(SFTConfig, None, ["model.path=x", "data.train=y", "optimizer.learning_rate=1"])
    assert (sft.optimizer.weight_decay, sft.optimizer.warmup_steps) == (0.0, 105)  # of the release


def test_file_then_overrides_then_defaults(write):
    path = write("inner: {width: 7}\nsizes: [5]\n")
    expected = Outer(sizes=[5], flag=True, inner=Inner(width=7, rate=1e-6))
    assert load_config(Outer, path, ["inner.rate=1e-6", "flag=true"]) == expected
    assert load_config(Outer, path, ["inner={rate: 1e-6}", "flag=true"]) == expected  # a group is merged, as in a file


def test_a_number_is_text_where_text_is_meant():
    assert load_config(Outer, None, ["text=2024", "inner.rate='0.25'"]) == Outer(text="2024", inner=Inner(rate=0.25))


def test_a_configuration_built_in_python_is_checked_as_one_that_was_read():
    check(Outer(inner=Inner(width=5)))
    with pytest.raises(ConfigError, match=r"^batch\.inner\.width is 0; it must be at least 1$"):
        check(Outer(inner=Inner(width=0)), "batch")
    with pytest.raises(ConfigError, match=r"^width is 3; inner\.most is 1$"):
        check(Inner(most=1))


def test_own_keys_win_over_bases_and_later_bases_over_earlier(write):
    write("inner: {width: 1, rate: 0.1, label: one}\nname: parallel\n", "one.yaml")
    write("base: one.yaml\ninner: {rate: 0.2}\n", "two.yaml")
    write("inner: {label: three}\nsizes: [9]\n", "three.yaml")
    path = write("base: [two.yaml, three.yaml]\ninner: {width: 4}\n")
    assert load_config(Outer, path) == Outer("parallel", [9], False, Inner(4, 0.2, "three"))


def test_the_printed_configuration_reads_back_the_same(write):
    config = load_config(Outer, write("inner: {label: 'größe'}"), ["sizes=[3, 4]"])
    assert load_config(Outer, write(to_yaml(config), "again.yaml")) == config


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("inner.widht=3", "unknown key inner.widht; did you mean 'width'?"),
        ("iner.width=3", "unknown key iner; did you mean 'inner'?"),
        ("zzz=3", "unknown key zzz; known: name, sizes, flag, inner, items, text, url"),
        ("items=[{width: 1}, {wdth: 2}]", "unknown key items[1].wdth; did you mean 'width'?"),
        ("groups={a: {wdth: 1}}", "unknown key groups.a.wdth; did you mean 'width'?"),
        ("inner.width=many", "inner.width is 'many'; it must be a whole number"),
        ("inner.width=2.5", "inner.width is 2.5; it must be a whole number"),
        ("inner.width=true", "inner.width is True; it must be a whole number"),
        ("inner.width=null", "inner.width is None; it must be a whole number"),
        ("inner.width=-4", "inner.width is -4; it must be at least 1"),
        ("inner.most=-1", "inner.most is -1; it must be at least 0"),
        ("inner.most=2", "width is 3; inner.most is 2"),
        ("inner.rate=1", "inner.rate is 1; it must be below 1"),
        ("inner.rate=.nan", "inner.rate is nan; it must be finite"),
        ("inner.rate=x", "inner.rate is 'x'; it must be a number"),
        ("flag=perhaps", "flag is 'perhaps'; it must be true or false"),
        ("text=[1]", "text is [1]; it must be text"),
        ("sizes=7", "sizes is 7; it must be a list"),
        ("sizes={a: 1}", "sizes is {'a': 1}; it must be a list"),
        ("sizes=[1, 0]", "sizes[1] is 0; it must be at least 1"),
        ("inner=7", "inner is 7; it is a group of settings: inner.width, inner.rate, inner.label, inner.most"),
        (
            "groups={a: 7}",
            "groups.a is 7; it is a group of settings: groups.a.width, groups.a.rate, groups.a.label, groups.a.most",
        ),
        ("groups=7", "groups is 7; it must be a mapping"),
        ("folder=''", "folder is not set; name one"),
        ("function=duoble", "function is 'duoble'; it must be one of half, double or your own, my_package.my_mod"),
        ("url=ftp://host", "url is 'ftp://host'; write a whole address, http://host:8000"),
        ("url=http://me:secret@host", "url holds a user or a password"),
        ("name=paralel", "name is 'paralel'; it must be one of x, parallel; did you mean 'parallel'?"),
        ("name", "'name' is not of the form key=value"),
        ("na\nme=1", "unknown key na me"),
        ("name={", "name: not valid YAML"),
        ("name=2024-99-99", "name: not valid YAML"),
        ("name=" + "[" * 5000, "name: nested too deeply"),
        ("name='${oc.env:HOME}'", "name is '${oc.env:HOME}'; ${…} is not filled in"),
    ],
)
def test_what_cannot_be_is_refused_with_a_line_that_names_it(override, said):
    assert refused([override]).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [1\nb: 2", "not valid YAML"),
        ("- 1\n- 2", "holds a list; a configuration is a mapping"),
        ("base: missing.yaml", "base 'missing.yaml' was not found next to it"),
        ("base: {a: 1}", "base is {'a': 1}; it must be a file name or a list of them"),
        ("base: c.yaml", "base files name each other in a circle"),
        ("name: x\nname: parallel", "key 'name' is given twice"),
        ("sizes: &a [1, *a]", "alias *a: write the value out"),
        ("name: !!python/object/apply:os.system ['true']", "not valid YAML"),
        ("name: \x00", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused_by_name(write, text, said):
    path = write(text)
    message = refused(path=path)
    assert message.startswith(str(path.parent))
    assert said in message


def test_a_file_that_is_not_utf8_or_not_there_is_refused(tmp_path):
    (tmp_path / "latin.yaml").write_bytes("name: größe".encode("latin-1"))
    assert "cannot be read" in refused(path=tmp_path / "latin.yaml")
    assert "no configuration file" in refused(path=tmp_path / "nowhere.yaml")


RUNNABLE = ["model.path=m", "data.train=d"]
OUT_OF_RANGE = {
    RLConfig: "batch.optimizer_steps=0 batch.prompts=0 batch.group_size=1 batch.token_budget=0 rollout.workers=0"
    " rollout.temperature=.inf objective.clip_low=1.0 objective.dual_clip=0.5"
    " objective.dual_clip=.inf objective.kl_coefficient=-1 objective.kl_coefficient=.inf objective.ratio_cap=0"
    " objective.rollout_ratio_cap=0 optimizer.learning_rate=0 optimizer.learning_rate=.inf optimizer.betas=[0.9]"
    " optimizer.weight_decay=-1 optimizer.weight_decay=.inf optimizer.warmup_steps=-1 optimizer.max_grad_norm=0"
    " reward.correct_only=2 reward.length_penalty=.nan reward.cutoff=-1 sharding.replicate=0 validation.samples=0"
    " validation.top_p=0 validation.every=-1 validation.problems=0 checkpoint.every=0 checkpoint.keep=0"
    " checkpoint.keep_hf_every=0 grading.workers=0 keep_rollouts=0 max_bad_steps=-1 timeout_seconds=0"
    " timeout_seconds=.inf steps=0 seed=-1",
    SFTConfig: "batch.examples=0 batch.token_budget=0 steps=-1 data.max_tokens=0 validation.every=-1"
    " rollout.workers=0 threads=0",
}


@pytest.mark.parametrize(
    "kind, override", [(kind, each) for kind, text in OUT_OF_RANGE.items() for each in text.split()]
)
def test_a_value_out_of_range_is_refused_by_its_key(kind, override):
    key, _, value = override.partition("=")
    assert refused([*RUNNABLE, override], kind=kind).startswith(f"{key} is {value.removeprefix('.')}; it must be ")


def test_responses_are_not_masked_where_no_rank_has_all_of_their_tokens():
    both = ["objective.rollout_correction.max_ratio=2", "sharding.context_parallel=2"]
    assert refused([*RUNNABLE, *both], kind=RLConfig).startswith("objective.rollout_correction does not go with")


RL_RULES = {
    "reward.cutoff=7500": "reward.cutoff is 7500, which is not below rollout.budget 7500",
    "batch.optimizer_steps=5": "batch.prompts is 96, which batch.optimizer_steps 5 does not divide",
    "batch.prompts=5762": "batch.prompts is 5762; 20 batches of 288 can never give as many",
    "rollout.parallel=false": "rollout.parallel is now called prompt.kind (parallel or sequential)",
    "rollout.temperature=0": "rollout.temperature is 0.0; training divides logits by it: it must be positive",
    "rollout.top_p=0.95": "rollout.top_p is 0.95; training takes log-probs of the whole distribution: it must be 1",
    "advantage.normalise=std": "advantage.normalise is now called advantage",
    "advantage=var": "advantage is 'var'; it must be one of std, mean or your own",
    "filter=hard": "filter is 'hard'; it must be one of include_easy, remove_easy, none",
    "objective.kind=ppo": "objective.kind is 'ppo'; it must be one of grpo, dapo, cispo",
    "objective.kind=no_such_module:loss": "objective.kind is 'no_such_module:loss', which cannot be imported",
    "objective={kind: grpo, dual_clip: 3}": "objective.dual_clip does not go with objective.kind=grpo",
    "optimizer.betas=[0.9, 1.0]": "optimizer.betas[1] is 1.0; it must be below 1",
    "optimizer.decay_from=5": "optimizer.decay_from is 5 and optimizer.decay_to None; set both, or neither",
    "optimizer.decay_to=5": "optimizer.decay_from is None and optimizer.decay_to 5; set both, or neither",
    "optimizer={decay_from: 5, decay_to: 5}": "optimizer.decay_to is 5; it must be above optimizer.decay_from, 5",
    "optimizer={decay_from: -1, decay_to: 4}": "optimizer.decay_from is -1",
    "reward.kind=correct": "reward.kind is 'correct'; it must be one of correctness_format, high_length_penalty",
    "sharding.compute_dtype=float31": "sharding.compute_dtype is 'float31'",
    "sharding={whole: true, replicate: 2}": "sharding.replicate is 2",
    "profile.steps=[3, -1]": "profile.steps[1] is -1; it must be at least 0",
    "checkpoint.resume=maybe": "checkpoint.resume is 'maybe'",
    "engine.dtype=int3": "engine.dtype is 'int3'",
    "replay=''": "replay is not set; name a file",
    "data.preset=deepscalr": "data.preset is 'deepscalr'; it must be one of",
    "name=''": "name is ''",
    "model.path=''": "model.path is not set",
    "data.train=''": "data.train is not set",
}
SFT_RENAMED = {  # what SFT spelled differently from RL
    "batch=8": "batch is 8; it is a group of settings: batch.examples, batch.token_budget",
    "token_budget=1": "token_budget is now called batch.token_budget",
    "validate_every=1": "validate_every is now called validation.every",
    "workers=3": "workers is now called rollout.workers",
}


@pytest.mark.parametrize(
    "kind, override", [(RLConfig, each) for each in RL_RULES] + [(SFTConfig, k) for k in SFT_RENAMED]
)
def test_a_training_run_that_cannot_be_is_refused(kind, override):
    assert refused([*RUNNABLE, override], kind=kind).startswith((RL_RULES | SFT_RENAMED)[override])


def test_replay_needs_no_problems():
    assert load_config(RLConfig, None, ["model.path=m", "replay=runs/x/rollouts/step_000010.jsonl"]).data.train == ""


@pytest.mark.parametrize(("kind", "config"), [(SFTConfig, "configs/sft.yaml"), (RLConfig, "configs/rl/stage4.yaml")])
def test_print_config_shows_the_resolved_whole(capsys, write, kind, config):
    assert Training(kind, "", "", "")([config, *RUNNABLE, "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert load_config(kind, write(printed)) == load_config(kind, config, RUNNABLE)


def test_a_refused_configuration_costs_one_line_and_exit_code_two(capsys):
    assert launch.rl(["configs/rl/stage1.yaml", *RUNNABLE, "rollout.budgt=3"]) == 2
    assert capsys.readouterr().err == "dccot: unknown key rollout.budgt; did you mean 'budget'?\n"


# ---- nothing but ConfigError, whatever the input ----

VALID = {
    RLConfig: "name: a\nsteps: 3\nrollout: {budget: 90}\noptimizer: {betas: [0.9, 0.95]}\nreplay: null\n",
    SFTConfig: "name: b\nbatch: {examples: 2}\ndata: {train: x, max_tokens: 5}\noptimizer: {learning_rate: 1.0e-6}\n",
    Recipe: "name: c\nstages:\n  - {name: sft, run: sft, config: sft.yaml, set: {steps: 3}}\n  - {name: rl, run: rl}\n",
}
WHOLE = {kind: yaml.safe_load(to_yaml(kind())) for kind in VALID}
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates() | st.binary(max_size=3)
)
names = st.text(max_size=4) | st.integers()
trees = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
odd_overrides = st.text(max_size=12) | st.builds("rollout.{}={}".format, st.text(max_size=4), st.text(max_size=4))


def only_config_error(kind, path, overrides=()) -> None:
    try:
        load_config(kind, path, overrides)
    except ConfigError as error:
        assert "\n" not in str(error)


@given(kind=st.sampled_from(list(VALID)), data=st.data())
@settings(max_examples=100, deadline=None)
def test_mutated_text_raises_nothing_but_config_error(tmp_path_factory, kind, data):
    text = list(VALID[kind])
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text)))
        text[at : at + data.draw(st.integers(0, 4))] = data.draw(
            st.text(string.printable + "\x00é&*!{}[]:", max_size=3)
        )
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_text("".join(text))
    only_config_error(kind, path)


@given(kind=st.sampled_from(list(VALID)), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_value_at_any_key_raises_nothing_but_config_error(tmp_path_factory, kind, data):
    place = tree = copy.deepcopy(WHOLE[kind])
    key = data.draw(st.sampled_from(sorted(place)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(trees)
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8")
    only_config_error(kind, path, [] if kind is Recipe else RUNNABLE)


@given(kind=st.sampled_from(list(VALID)), overrides=st.lists(odd_overrides))
@settings(max_examples=100, deadline=None)
def test_any_override_raises_nothing_but_config_error(kind, overrides):
    only_config_error(kind, None, overrides)


def test_a_registered_name_gives_its_entry():
    assert lookup(REGISTRY, "double", "reward.kind")(4) == 8


def test_a_function_of_the_users_own_is_found_beside_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "mine_on_disk.py").write_text("def triple(x):\n    return 3 * x\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    assert lookup(REGISTRY, "mine_on_disk:triple", "reward.kind")(4) == 12


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "duoble",
            "is 'duoble'; it must be one of half, double or your own, my_package.my_module:my_function; did you",
        ),
        (
            "no_such_module:f",
            "reward.kind is 'no_such_module:f', which cannot be imported (No module named 'no_such_mod",
        ),
        ("math:no_such_function", "has no attribute 'no_such_function'"),
        ("math:", "cannot be imported"),
        (":f", "cannot be imported"),
        ("math:pi", "reward.kind is 'math:pi', a float; it must be a function or a class"),
    ],
)
def test_a_name_that_stands_for_nothing_is_refused_and_never_falls_through(name, said):
    with pytest.raises(ConfigError) as caught:
        lookup(REGISTRY, name, "reward.kind")
    assert said in str(caught.value)


def test_a_saved_configuration_is_read_under_todays_names():
    old = {"batch": 8, "token_budget": 300, "validate_every": 5, "workers": 2, "advantage": {"normalise": "std"}}
    new = {"batch": {"examples": 8, "token_budget": 300}, "validation": {"every": 5}, "rollout": {"workers": 2}}
    assert with_new_names(old) == new | {"advantage": "std"}
    assert with_new_names({"batch": {"prompts": 3}}) == {"batch": {"prompts": 3}}  # RL's has always been a group
    assert with_new_names({"workers": 2}, today={"workers": 3}) == {"workers": 2}  # a name that is still in use
