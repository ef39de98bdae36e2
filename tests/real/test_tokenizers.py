"""The tokenizers of the R1 models: same ids everywhere, and a tag is found however its first and last characters merge
with others.

The oracle knows characters only: it joins the texts of tokens and looks for the tag. Stopping is vLLM's own
detokenizer, as the engine uses it; the rest is the director, the response and the format check.
"""

import random
import string
from collections import Counter

import pytest
import torch
from tokenizers import Tokenizer
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from dccot.model.config import parse_config
from dccot.model.tokenizer import open_tokenizer, tokenizer_folder
from dccot.model.transformer import Transformer
from dccot.model.weights import full_parameters, write_folder
from dccot.rollout.director import Completion, Director, RolloutConfig, Stop
from dccot.rollout.engine import EngineConfig
from dccot.rollout.response import Response
from dccot.rollout.tags import SPAWN_OPEN, TagIds, flaw_of, overshoots, worker_close
from dccot.rollout.vllm_engine import VllmEngine
from tests.support.real_packages import tokenizer_files
from tests.support.tag_soup import oracle, soup

NAMES = {
    "deepseek-r1-distill-qwen-7b": "qwen2",
    "deepseek-r1-distill-llama-8b": "llama",
    "deepseek-r1-0528-qwen3-8b": "qwen3",
}
STOPS = [SPAWN_OPEN, worker_close(1), worker_close(2), worker_close(3)]


def texts(count: int, seed: int = 0) -> list[str]:
    """Tag soups and random characters, some of them not ASCII."""
    rng = random.Random(seed)
    alphabet = string.printable + "éß∑≤数学\u00a0\u2003🙂"
    return [
        soup(rng, 3) if rng.random() < 0.5 else "".join(rng.choices(alphabet, k=rng.randrange(60)))
        for _ in range(count)
    ]


@pytest.fixture(scope="module", params=NAMES)
def published(request, tmp_path_factory):
    """A folder with a tiny random model and the published tokenizer, and that tokenizer as `tokenizers` reads it."""
    files = tokenizer_files(request.param, tmp_path_factory.mktemp("published"))
    reference = Tokenizer.from_file(str(files / "tokenizer.json"))
    kind, vocabulary = NAMES[request.param], 128 * -(-reference.get_vocab_size() // 128)
    shape = {"model_type": kind, "architectures": [f"{kind.title()}ForCausalLM"], "vocab_size": vocabulary}
    shape |= {"hidden_size": 64, "head_dim": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"tie_word_embeddings": True, "max_position_embeddings": 512}
    model = Transformer(parse_config(shape))
    model.init_weights(0)
    folder = tmp_path_factory.mktemp("model") / request.param
    write_folder(model, full_parameters(model), folder, source=files, dtype=torch.float32)
    return folder, reference


@pytest.fixture(scope="module")
def tokenizer(published):
    return open_tokenizer(published[0])


def split_differently(tokenizer, reference: Tokenizer, asked: list[str]) -> list[str]:
    expected = {text: reference.encode(text, add_special_tokens=False).ids for text in asked}
    return [text for text in asked if tokenizer.encode(text, add_special_tokens=False) != expected[text]]


def test_the_trainer_gives_the_ids_of_tokenizer_json(published, tokenizer, measured):
    folder, reference = published
    assert not split_differently(tokenizer, reference, texts(3000))
    measured[f"{folder.name}: trainer"] = f"same ids as tokenizer.json in 3,000 texts ({type(tokenizer).__name__})"


def test_the_engine_gives_the_same_ids(published, measured):
    folder, reference = published
    engine = VllmEngine(folder, EngineConfig(dtype="float32", context=256, kv_cache_gb=0.125))
    wrong = split_differently(engine.tokenizer, reference, texts(1000, seed=1))
    engine.shutdown()
    assert not wrong
    measured[f"{folder.name}: engine"] = "same ids as tokenizer.json in 1,000 texts"


def pieces(tokenizer) -> dict[str, int]:
    """Text → id of every token that stands for a whole text by itself."""
    found = {}
    for token in range(len(tokenizer)):
        text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\N{REPLACEMENT CHARACTER}" not in text and token != tokenizer.eos_token_id:
            found.setdefault(text, token)
    return found


def spellings(tag: str, vocabulary: dict[str, int], encode) -> list[tuple[list[int], str, str]]:
    """Every way in which a token runs into the tag or out of it: ids, the text before the tag, the text after it."""
    found = []
    for text, token in vocabulary.items():
        for length in range(1, len(tag)):
            if text.endswith(tag[:length]) and len(text) > length:  # the tag begins inside this token
                found.append(([token, *encode(tag[length:])], text[:-length], ""))
            if text.startswith(tag[-length:]) and len(text) > length:  # and ends inside this one
                found.append(([*encode(tag[:-length]), token], "", text[length:]))
    return [*found, (encode(tag), "", "")]


def stopped_at(tokenizer, ids: list[int], stop: str) -> int | None:
    """How many tokens vLLM takes until it stops."""
    params = SamplingParams(stop=[stop], include_stop_str_in_output=True, skip_special_tokens=False)
    request = EngineCoreRequest("", [0], None, params, None, 0.0, None, None, None)
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    return next((number for number, token in enumerate(ids, start=1) if detokenizer.update([token], False)), None)


def test_every_way_a_tag_can_merge_stops_and_is_read_as_the_characters_say(published, tokenizer, measured):
    with tokenizer_folder(published[0]) as path:
        engines = open_tokenizer(path)
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
    decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    vocabulary, tags, kinds = pieces(tokenizer), TagIds.of(tokenizer), Counter()
    ways = 0
    for stop in STOPS:
        for ids, before, after in spellings(stop, vocabulary, encode):
            written = encode("I split.") + ids
            joined = decode(written)
            if stop not in joined or SPAWN_OPEN in before + after:
                continue
            ways += 1
            end = stopped_at(engines, [*written, *encode(" and more")], stop)
            assert end == len(written), (stop, before, after)
            response, scripted = respond(tags, stop, written, encode)
            whole = "<think>\n" + response.text(tokenizer)
            assert response.as_read == scripted
            assert whole == "<think>\n" + decode(scripted[:-1])
            first, *workers, last = (len(segment) for segment in response.segments())
            assert response.longest_path == first + max(workers) + last
            assert (flaw_of(whole) is None) == (oracle(whole, 3) is not None), whole
            assert not after.strip() or flaw_of(whole) is not None, whole
            found = overshoots(whole)
            assert bool(found) == bool(after), whole
            kinds.update(found)
    said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    found = f"{ways:,} ways to merge four tags agree with the characters"
    measured[f"{published[0].name}: tags"] = f"{found}; overshoots: {said}"
    assert ways > 100


def respond(tags: TagIds, stop: str, written: list[int], encode) -> tuple[Response, list[int]]:
    """A response in which one tag is written this way and the rest plainly, and its ids as the director reads them."""
    says = {each: written if each == stop else encode(f"so.{each}") for each in STOPS}
    final = [*encode("So it is 4.</think><answer>4</answer>"), tags.eos]
    director = Director([1, 2, 3], RolloutConfig(budget=2000), tags, context=10_000)
    calls = director.start()
    while calls:
        stop = {True: Stop.CLOSE, False: Stop.SPAWN}
        ended = [
            (says[call.stops[0]], stop[call.path[1] > 0]) if call.path[0] == 0 else (final, Stop.EOS) for call in calls
        ]
        calls = [
            new
            for call, (ids, why) in zip(calls, ended)
            for new in director.finished(call, Completion(ids, [0.0] * len(ids), why))
        ]
    read = list(says[SPAWN_OPEN])
    for opening, closing in zip(tags.worker_open, STOPS[1:]):
        read += [*opening, *says[closing]]
    return director.response, [*read, *tags.spawn_close, *final]


def test_a_tokenizer_that_loses_newlines_is_refused(tmp_path, measured):
    with pytest.raises(ValueError, match="loses white space"):
        open_tokenizer(tokenizer_files("jiutian-139moe-chat", tmp_path))
    measured["jiutian-139moe-chat"] = "refused: newlines are lost"
