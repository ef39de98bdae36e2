"""A small decoder in any precision, random parallel responses, and checkpoints to train from."""

import json
import random
from pathlib import Path

import pytest
import torch

from dccot.core.runtime import Runtime
from dccot.lab.worlds.arithmetic import make_tokenizer
from dccot.model.config import parse_config
from dccot.model.transformer import Transformer
from dccot.model.weights import create_checkpoint
from dccot.rollout.response import Response, Segment
from dccot.rollout.thread import Thread
from tests.support import programs
from tests.support.rounds import Round, flat

ARCHITECTURE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 32, "initializer_range": 0.3},
    **{
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    },
}


@pytest.fixture(scope="session")
def small_model():
    """`small_model(dtype)`: a random decoder over 40 tokens, large weights so that every mistake shows."""

    def build(dtype: torch.dtype = torch.float64, **changes) -> Transformer:
        model = Transformer(parse_config({**ARCHITECTURE, "vocab_size": 40, **changes}))
        model.init_weights(seed=1)
        return model.to(dtype)

    return build


@pytest.fixture(scope="session")
def random_responses():
    """`random_responses(prompts, samples, seed)`: groups of parallel responses over tokens 2..39 that share their
    group's prompt, and with `levels` above 1 some workers that spawned workers.
    """

    def segment(rng: random.Random, inserted: int, longest: int) -> Segment:
        sampled = rng.randint(0, longest)
        ids = [rng.randrange(2, 40) for _ in range(inserted + sampled)]
        return Segment(ids[:inserted], ids[inserted:], [-rng.random() for _ in range(sampled)])

    def response(rng: random.Random, prompt: list[int], longest: int) -> Response:
        rounds = [
            Round(segment(rng, 2 * bool(number), longest), [segment(rng, 3, longest) for _ in range(rng.randint(1, 4))])
            for number in range(rng.randint(0, 2))
        ]
        final = None if rounds and rng.random() < 0.2 else segment(rng, 2 * bool(rounds), longest)
        return flat(list(prompt), rounds, final)

    def deepen(rng: random.Random, thread: Thread[Segment], longest: int, levels: int) -> None:
        for worker in [worker for fork in thread.forks for worker in fork] if levels > 1 else ():
            if rng.random() < 0.4:
                worker.forks.append([Thread([segment(rng, 3, longest)]) for _ in range(rng.randint(1, 8))])
                worker.trunk += [segment(rng, 2, longest)] if rng.random() < 0.8 else []  # or it was cut before
                deepen(rng, worker, longest, levels - 1)

    def make(prompts: int, samples: int, seed: int = 0, longest: int = 12, levels: int = 1) -> list[Response]:
        rng = random.Random(seed)
        asked = [[rng.randrange(2, 40) for _ in range(rng.randint(1, 9))] for _ in range(prompts)]
        made = [response(rng, prompt, longest) for prompt in asked for _ in range(samples)]
        for each in made:
            deepen(rng, each, longest, levels)
        return made

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A small random model that speaks the arithmetic world's tokenizer, as a Hugging Face folder."""
    tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("model") / "small"
    raw = {
        **ARCHITECTURE,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
    }
    create_checkpoint(raw, folder, tokenizer=tokenizer, seed=0)
    return folder


@pytest.fixture(scope="module")
def runtime():
    runtime = Runtime.start()
    yield runtime
    runtime.stop()


@pytest.fixture(scope="session")
def torchrun():
    """`torchrun(ranks, program or module, *arguments)` runs it on one thread per rank and returns what it printed;
    fails loudly.
    """

    def run(ranks: int, program: str | Path, *arguments: str, code: int = 0) -> str:
        done = programs.finish(programs.torchrun(ranks, program, *arguments), code=code)
        return done.stdout + done.stderr

    return run


@pytest.fixture
def write_rows(tmp_path):
    """`write_rows(name, rows)` writes a JSONL file and returns its path."""

    def write(name: str, rows: list[dict]) -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write
