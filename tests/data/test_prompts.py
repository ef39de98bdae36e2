"""Prompts are the paper's, letter by letter, and are never tokenised into something else."""

import re
import sys
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dccot.core.config import check
from dccot.data.problems import Problem
from dccot.data.prompts import PROMPTS, PromptConfig, PromptFormat, UnusablePrompt
from dccot.data.task import Task

CHAT = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]

# The listings of the paper's appendices, with `{{}}` and `{question}` formatted as Python's str.format does.
STEPS = "Let's think step by step and output the final answer within \\boxed{}."
PAPER = {
    "parallel": "<｜begin▁of▁sentence｜><｜User｜>What is 2+2? You can spawn multiple workers to solve this problem in "
    "parallel. The workers' thoughts are enclosed within <spawn_workers></spawn_workers> tags, and each worker's"
    " thought is enclosed within <worker_i></worker_i> tags, where i is the worker number, i.e."
    " <spawn_workers><worker_1>worker 1's thought</worker_1><worker_2>worker 2's thought</worker_2>..."
    f"</spawn_workers>. {STEPS}<｜Assistant｜>",
    "sequential": f"<｜begin▁of▁sentence｜><｜User｜>What is 2+2? {STEPS}<｜Assistant｜><think>\n",
    "raw_sequential": f"What is 2+2? {STEPS}<think>\n",
}


def tokenizer_with(special: list[str], add_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE; with `add_bos` it puts BOS before every text it is given, as DeepSeek's tokenizer does."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    known = {"special_tokens": [*special, "<eos>"], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    core.train_from_iterator(PAPER.values(), trainers.BpeTrainer(vocab_size=400, show_progress=False, **known))
    if add_bos:
        known = [(special[0], core.token_to_id(special[0]))]
        core.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=known)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", bos_token=special[0] if special else None)


def test_open_think_adds_exactly_the_opened_tag():
    assert PromptConfig("parallel", open_think=True).text("What is 2+2?") == PAPER["parallel"] + "<think>\n"
    assert PromptConfig("parallel", open_think=True).whole_text("hm</think>") == "<think>\nhm</think>"
    assert PromptConfig("parallel", open_think=False).whole_text("<think>\nhm</think>") == "<think>\nhm</think>"


def test_questions_with_braces_stay_as_they_are():
    assert "{x} {{y}} \\{z\\}" in PromptConfig().text("{x} {{y}} \\{z\\}")


@pytest.mark.parametrize("kind", PAPER)
@pytest.mark.parametrize("add_bos", [False, True])
def test_the_prompt_is_the_papers_to_the_letter_and_its_ids_spell_it_with_at_most_one_bos(kind, add_bos):
    tokenizer = tokenizer_with(CHAT, add_bos)
    config = PromptConfig(kind, open_think=kind != "parallel")
    assert config.text("What is 2+2?") == PAPER[kind]
    ids = config.ids(tokenizer, "What is 2+2?")
    bos = tokenizer.convert_tokens_to_ids(CHAT[0])
    assert ids.count(bos) == (1 if kind != "raw_sequential" or add_bos else 0)
    assert tokenizer.decode(ids).removeprefix(CHAT[0]) == PAPER[kind].removeprefix(CHAT[0])


def test_a_parallel_prompt_says_how_many_workers_may_be_chosen_and_how_deep():
    papers, sequential = PromptConfig().text("Q"), PromptConfig("sequential").text("Q")
    assert PromptConfig().allowing(3, 1).text("Q") == papers
    rules = (
        " Before you spawn workers, list their tasks within <task_i></task_i> tags, i.e. <task_1>task 1</task_1>"
        "<task_2>task 2</task_2>...: one worker starts for each task, from 1 to 8 at a time."
        " A worker can spawn workers of its own in the same way, up to 2 levels deep."
    )
    before, after = papers.split(f" {STEPS}")
    assert PromptConfig().allowing([1, 8], 2).text("Q") == f"{before}{rules} {STEPS}{after}"
    assert PromptConfig("sequential").allowing([1, 8], 2).text("Q") == sequential


def test_length_filter_counts_tokens_and_names_the_problem():
    tokenizer = tokenizer_with(CHAT)
    short, long = Problem("7", "2+2?", "4"), Problem("417", "2+2?" * 500, "4")
    limit = len(PromptConfig().ids(tokenizer, short.question))
    config = PromptConfig(max_prompt_tokens=limit)
    too_long = len(PromptConfig(max_prompt_tokens=10**6).ids(tokenizer, long.question))
    said = []
    kept = Task(config).prompts([short, long], tokenizer, report=said.append)
    assert [(p.id, len(ids)) for p, ids in kept] == [("7", limit)]
    fault = f"prompt has {too_long:,} tokens; prompt.max_prompt_tokens is {limit} (problem id 417)"
    assert said[0] == f"{fault}; problem left out"
    assert said[1].startswith("1 of 2 problems left out")
    with pytest.raises(UnusablePrompt, match="problem id 417"):
        Task(config).prompts([short, long], tokenizer, strict=True)
    with pytest.raises(UnusablePrompt, match="no problem is left"):
        Task(config).prompts([long], tokenizer, report=said.append)


MY_FORMAT = PromptFormat("Q: ", "\nA: ", parallel=True)


def test_a_format_of_the_users_own_is_asked_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "my_formats", SimpleNamespace(MINE=MY_FORMAT, upper=str.upper))
    config = PromptConfig("my_formats:MINE", open_think=False)
    check(config, "prompt")
    assert config.text("2+2?") == "Q: 2+2?\nA: " and config.parallel
    with pytest.raises(ValueError, match="'my_formats:upper', a method_descriptor; it must be a PromptFormat"):
        check(PromptConfig("my_formats:upper"), "prompt")


def test_only_the_parallel_kind_lets_the_model_spawn():
    assert [kind for kind in PROMPTS if PromptConfig(kind).parallel] == ["parallel"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# what the user says, without chat tokens
SAID = PAPER["parallel"].removeprefix(CHAT[0] + CHAT[1]).removesuffix(CHAT[2])


def chatml(template: str = CHATML) -> PreTrainedTokenizerFast:
    tokenizer = tokenizer_with(["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize("open_think, end", [(True, "<think>\n"), (False, "")])
@pytest.mark.parametrize("opens", ["", "<think>", "<think>\n", "<think>\n\n", "<think>\n\n</think>\n\n"])
def test_chat_prompt_is_the_templates_with_think_opened_once_or_not_at_all(opens, open_think, end):
    tokenizer = chatml(CHATML.replace("assistant\n", f"assistant\n{{{{ {opens!r} }}}}"))
    ids = PromptConfig(open_think=open_think).ids(tokenizer, "What is 2+2?")
    assert tokenizer.decode(ids) == f"<|im_start|>user\n{SAID}<|im_end|>\n<|im_start|>assistant\n{end}"


def test_system_message_comes_first_and_sequential_asks_without_workers():
    text = PromptConfig("sequential", open_think=False, system="Be brief.").text("2+2?", chatml())
    turns = ["system\nBe brief.<|im_end|>\n", f"user\n2+2? {STEPS}<|im_end|>\n", "assistant\n"]
    assert text == "".join(f"<|im_start|>{turn}" for turn in turns)


def test_auto_takes_deepseeks_tokens_before_a_template_and_chat_the_template():
    tokenizer = tokenizer_with(CHAT)
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    assert PromptConfig().ids(tokenizer, "2+2?") == PromptConfig(chat_format="deepseek").ids(tokenizer, "2+2?")
    assert tokenizer.decode(PromptConfig().ids(tokenizer, "What is 2+2?")) == PAPER["parallel"] + "<think>\n"
    assert tokenizer.decode(PromptConfig(chat_format="chat").ids(tokenizer, "What is 2+2?")) == f"{SAID}!<think>\n"


@pytest.mark.parametrize(
    "known, format, words",
    [
        ([], "chat", "a chat template"),
        ([], "auto", "no chat template either"),
        (CHAT[:1], "deepseek", "does not have <｜User｜>, <｜Assistant｜> as single tokens;"),
    ],
)
def test_a_tokenizer_without_what_the_format_needs_is_refused_unless_the_prompt_is_raw(known, format, words):
    tokenizer = tokenizer_with(known)
    with pytest.raises(ValueError, match=words):
        PromptConfig(chat_format=format).ids(tokenizer, "2+2?")
    raw = PromptConfig("raw_sequential", chat_format=format).ids(tokenizer, "What is 2+2?")
    assert tokenizer.decode(raw) == PAPER["raw_sequential"]


@pytest.mark.parametrize("token", [*CHAT, "<|im_start|>", "<|im_end|>", "<eos>"])
def test_question_cannot_smuggle_control_tokens_into_the_prompt(token):
    for tokenizer in (tokenizer_with([*CHAT, "<|im_start|>", "<|im_end|>"]), chatml()):
        with pytest.raises(UnusablePrompt, match=re.escape(f"holds the chat token {token!r}")):
            PromptConfig().ids(tokenizer, f"2+2?{token}system")


def test_a_template_that_changes_the_question_or_refuses_it_is_not_used():
    with pytest.raises(UnusablePrompt, match="changes the question"):
        PromptConfig().ids(chatml("{{ messages[0]['content'] | upper }}"), "two?")
    with pytest.raises(ValueError, match=r"refuses the prompt: no system here; see prompt\.system"):
        PromptConfig(system="Be brief.").ids(chatml("{{ raise_exception('no system here') }}"), "two?")


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"kind": "paralel"}, "prompt.kind is 'paralel'; it must be one of parallel, sequential, raw_sequential"),
        ({"chat_format": "chatml"}, "prompt.chat_format"),
        ({"chat_format": "deepseek", "system": "Hi"}, "prompt.system"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        check(PromptConfig(**settings), "prompt")
