"""A model that cannot do what is asked is refused in the first seconds, before any weight is loaded, in one line."""

import json
import shutil

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dccot.core.config import ConfigError, load_config
from dccot.data.prompts import CHAT_TOKENS
from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.rollout.engine import EngineConfig
from dccot.train.config import RLConfig, check_kv_cache, open_model
from dccot.train.rl import main as rl_main
from dccot.train.sft import main as sft_main

CHECKSUMS = {"model.safetensors": "a"}


@pytest.fixture
def without_weights(checkpoint, tmp_path):
    """The small model's folder with no weights in it: whatever is refused is refused without them."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def config(model, *more: str) -> RLConfig:
    small = ["prompt.max_prompt_tokens=100", "rollout.budget=400", "reward.cutoff=100"]
    return load_config(RLConfig, None, [f"model.path={model}", "data.train=d", *small, *more])


def refused(model, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        open_model(config(model, *more))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_model_that_fits_passes(without_weights):
    folder, _, tokenizer = open_model(config(without_weights))
    assert folder == without_weights
    assert tokenizer.decode(tokenizer.encode("<worker_1>")) == "<worker_1>"


def test_a_budget_over_the_models_context(without_weights):
    said = "prompt.max_prompt_tokens + rollout.budget is 513; the model's context is 512: lower one of them"
    assert refused(without_weights, "rollout.budget=413") == said
    assert refused(without_weights, "engine.context=499").endswith(
        "context is 499: lower one of them or raise engine.context"
    )


def test_a_tokenizer_that_is_larger_than_the_embedding(without_weights):
    raw = json.loads((without_weights / "config.json").read_text())
    (without_weights / "config.json").write_text(json.dumps(raw | {"vocab_size": 100}))
    said = f"has {len(make_tokenizer())} tokens, the model embeds 100; use the tokenizer that belongs to the model"
    assert said in refused(without_weights)


def words_only(*special: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows words and no `<` of its own."""
    words = {word: i for i, word in enumerate(["<unk>", "</s>", "two", *special])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>", additional_special_tokens=list(special)
    )


def test_a_tokenizer_that_cannot_spell_the_tags(without_weights):
    words_only(*CHAT_TOKENS).save_pretrained(without_weights)
    assert "does not give '<think>' back after encoding it" in refused(without_weights)


def test_a_tokenizer_without_the_prompts_chat_tokens(without_weights):
    words_only().save_pretrained(without_weights)
    assert "does not have <｜begin▁of▁sentence｜>" in refused(without_weights)


def test_a_folder_without_a_tokenizer(without_weights):
    for path in without_weights.glob("*token*"):
        path.unlink()
    assert str(without_weights) in refused(without_weights)


def test_a_model_that_the_decoder_cannot_compute(without_weights):
    raw = json.loads((without_weights / "config.json").read_text())
    (without_weights / "config.json").write_text(json.dumps(raw | {"model_type": "gpt2"}))
    assert "gpt2" in refused(without_weights)


def arguments(main, write_rows, *more: str) -> list[str]:
    small = ["rollout.budget=400", "reward.cutoff=100"] if main is rl_main else []
    return [str(write_rows("c.yaml", [])), "prompt.max_prompt_tokens=50", *small, *more]


@pytest.mark.parametrize("main", [sft_main, rl_main])
def test_on_the_command_line_it_costs_one_line_and_exit_code_two(main, without_weights, capsys, tmp_path, write_rows):
    words_only().save_pretrained(without_weights)
    data = write_rows("rows.jsonl", [{"id": "a", "question": "q", "gold": "1", "completion": "c"}])
    assert (
        main(arguments(main, write_rows, f"model.path={without_weights}", f"data.train={data}", f"output={tmp_path}"))
        == 2
    )
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"dccot: model {without_weights}: tokenizer")


@pytest.mark.parametrize("main", [sft_main, rl_main])
def test_a_missing_data_file_is_named(main, checkpoint, capsys, tmp_path, write_rows):
    assert (
        main(arguments(main, write_rows, f"model.path={checkpoint}", "data.train=nowhere.jsonl", f"output={tmp_path}"))
        == 2
    )
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_an_fp8_kv_cache_needs_a_measurement_on_this_model_or_ones_word(tmp_path):
    def said(**gap) -> str:
        file = tmp_path / "gap.json"
        file.write_text(json.dumps({"mean_abs_logprob": 0.02, "kv_cache_dtype": "fp8", "model": CHECKSUMS} | gap))
        return word(str(file))

    def word(gap: str | None, dtype: str = "fp8") -> str:
        try:
            check_kv_cache(EngineConfig(kv_cache_dtype=dtype, kv_cache_gap=gap), lambda: CHECKSUMS)
        except ConfigError as error:
            return str(error)
        return ""

    assert said() == word("accepted") == word(None, "auto") == ""
    assert "its gap to the trainer unknown: run `python -m dccot.lab.bench.gap" in word(None)
    assert "cannot be read (FileNotFoundError" in word(str(tmp_path / "nowhere.json"))
    assert "was measured with 'auto'" in said(kv_cache_dtype="auto")
    assert "was measured on another model" in said(model={"model.safetensors": "b"})
    assert "says mean |Δ log p| 0.0510; at most 0.05 is allowed" in said(mean_abs_logprob=0.051)
    assert "cannot be read (TypeError" in said(mean_abs_logprob=None)
