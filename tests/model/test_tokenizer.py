"""Every tokenizer splits text as its tokenizer.json says, whatever class its folder declares."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from dccot.core.files import BadData
from dccot.model.tokenizer import lost_white_space, open_decoder, open_tokenizer, tokenizer_folder
from dccot.rollout.tags import PROBE, check_same_ids

TEXT = "Find $x^2$ when x = 12.\n\nLet's go"
CHAT_TEMPLATE = "{{ messages[0]['content'] }}"


def write(folder: Path, declared: str, core: Tokenizer | None = None) -> Path:
    """A byte-level BPE tokenizer, declared as another class: as R1-Distill-Llama-8B declares LlamaTokenizerFast."""
    if core is None:
        core = Tokenizer(models.BPE())
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special = ["<s>", "</s>", "<|user|>"]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
        core.train_from_iterator([PROBE, TEXT], trainer)
    folder.mkdir(exist_ok=True)
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": declared, "bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def ids_of_file(folder: Path, text: str) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids


def test_the_declared_class_breaks_the_tokenizer_in_transformers(tmp_path):
    """If this fails, transformers has repaired it."""
    broken = AutoTokenizer.from_pretrained(write(tmp_path, "LlamaTokenizerFast"))
    assert " " not in broken.decode(broken.encode(TEXT, add_special_tokens=False))
    assert lost_white_space(broken)


@pytest.mark.parametrize("declared", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "Qwen2Tokenizer"])
def test_ids_are_those_of_tokenizer_json_and_the_text_comes_back(tmp_path, declared):
    folder = write(tmp_path, declared)
    tokenizer = open_tokenizer(folder)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert ids == ids_of_file(folder, TEXT)
    assert tokenizer.decode(ids) == open_decoder(folder)(ids) == TEXT
    assert open_decoder(folder)([*ids, tokenizer.eos_token_id]) == tokenizer.decode([*ids, tokenizer.eos_token_id])


def test_special_tokens_and_chat_template_survive_the_repair(tmp_path):
    tokenizer = open_tokenizer(write(tmp_path, "LlamaTokenizerFast"))
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template) == ("<s>", "</s>", CHAT_TEMPLATE)


@pytest.mark.parametrize("declared, repaired", [("LlamaTokenizerFast", True), ("PreTrainedTokenizerFast", False)])
def test_a_program_that_opens_its_own_gets_the_same_ids(tmp_path, declared, repaired):
    folder = write(tmp_path, declared)
    with tokenizer_folder(folder) as path:
        assert (path != str(folder)) == repaired
        own = AutoTokenizer.from_pretrained(path)
    assert own.encode(TEXT, add_special_tokens=False) == ids_of_file(folder, TEXT)
    assert own.eos_token_id == open_tokenizer(folder).eos_token_id
    check_same_ids(open_tokenizer(folder), own, folder)
    assert repaired != Path(path).exists()


def test_truncation_and_padding_that_training_code_left_in_the_file_change_nothing(tmp_path):
    core = Tokenizer.from_file(str(write(tmp_path, "LlamaTokenizerFast") / "tokenizer.json"))
    expected = core.encode(TEXT, add_special_tokens=False).ids
    core.enable_truncation(8)
    core.enable_padding(length=300)
    for declared in ("PreTrainedTokenizerFast", "LlamaTokenizerFast"):
        assert open_tokenizer(write(tmp_path, declared, core)).encode(TEXT, add_special_tokens=False) == expected


def test_an_engine_with_other_ids_is_refused(tmp_path):
    folder = write(tmp_path, "LlamaTokenizerFast")
    with pytest.raises(ValueError, match=r"LlamaTokenizer.*splits text differently"):
        check_same_ids(open_tokenizer(folder), AutoTokenizer.from_pretrained(folder), folder)


@pytest.mark.parametrize("text", ["version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "[1]", ""])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, text):
    (write(tmp_path, "PreTrainedTokenizerFast") / "tokenizer.json").write_text(text)
    with pytest.raises(BadData, match=r"tokenizer\.json is damaged or a git-LFS pointer .*; fetch it again"):
        open_tokenizer(tmp_path)


def test_a_file_that_itself_loses_white_space_is_refused(tmp_path):
    core = Tokenizer.from_file(str(write(tmp_path, "PreTrainedTokenizerFast") / "tokenizer.json"))
    core.normalizer = normalizers.Replace(" ", "")
    with pytest.raises(ValueError, match="loses white space"):
        open_tokenizer(write(tmp_path, "PreTrainedTokenizerFast", core))


def test_a_file_without_a_token_for_newlines_is_refused(tmp_path):
    core = Tokenizer(models.BPE(vocab={"<unk>": 0, "a": 1, "b": 2, " ": 3}, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    with pytest.raises(ValueError, match=r"'a\\nb' comes back as 'a<unk>b'"):
        open_tokenizer(write(tmp_path, "PreTrainedTokenizerFast", core))


def test_a_closed_vocabulary_that_cannot_spell_the_probe_is_not_refused(tmp_path, tokenizer):
    tokenizer.save_pretrained(tmp_path)
    assert isinstance(open_tokenizer(tmp_path), PreTrainedTokenizerFast)
