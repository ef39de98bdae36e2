"""What `dccot serve` decides and says before it serves."""

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from dccot.lab.worlds import bigram as tiny
from dccot.model.folder import resolve_model
from dccot.rollout import servers
from dccot.rollout.engine import EngineConfig, as_flags, vllm_options
from dccot.serve.launch import OWN, VARIABLE, ServeConfig, examples_of, from_environment, main, overrides
from dccot.serve.plugin import banner
from tests.serve.conftest import BUDGET, CONTEXT, NAME
from tests.support import programs
from tests.support.hub import Hub, use_here
from tests.support.servers import ROOT, free_port, plugins

NOTHING = dict.fromkeys(OWN)


def test_a_run_is_asked_as_it_was_trained_whatever_its_system_message_holds(tmp_path, monkeypatch):
    system = "Be = 'brief'; {x}: \"yes\"\n# no"
    prompt = {"kind": "sequential", "open_think": False, "format": "chat", "system": system}
    rollout = {"workers": 2, "budget": 99, "temperature": 0.5}
    (tmp_path / "config.yaml").write_text(json.dumps({"prompt": prompt, "rollout": rollout}))  # JSON is YAML
    monkeypatch.setenv(VARIABLE, shlex.join(overrides(str(tmp_path), NOTHING | {"max_n": 3})))
    config = from_environment()
    assert (config.prompt.kind, config.prompt.open_think, config.prompt.chat_format, config.prompt.system) == (
        "sequential",
        False,
        "chat",
        system,
    )
    assert (config.rollout.workers, config.rollout.budget, config.rollout.temperature, config.max_n) == (2, 99, 0.5, 3)


def test_the_server_is_set_up_like_the_engine_of_solve():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dccot.rollout.vllm_engine import engine_arguments

    served = make_arg_parser(FlexibleArgumentParser()).parse_args(["model", *as_flags(vllm_options(on_gpu=False))])
    solving = engine_arguments("model", "model", EngineConfig(), distributed=False, sleeps=False)
    for name in vllm_options(on_gpu=False):
        assert getattr(served, name) == getattr(solving, name), name


def test_a_server_that_samples_for_training_has_the_settings_of_an_engine_in_process():
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from dccot.rollout.vllm_engine import engine_arguments

    config = EngineConfig("float32", context=512, max_sequences=7, kv_cache_gb=0.5, kv_cache_dtype="fp8", block_size=64)
    words = servers.command("model", config, host="127.0.0.1", port=1, on_gpu=False)
    served = make_arg_parser(FlexibleArgumentParser()).parse_args(words[words.index("--model") :])
    inside = engine_arguments("model", "model", config, distributed=False, sleeps=False)
    for name in ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "kv_cache_dtype", "block_size"):
        assert getattr(served, name) == getattr(inside, name) != getattr(type(inside), name), name


def test_a_server_on_another_machine_takes_the_settings_of_the_runs_file(tmp_path, monkeypatch):
    tiny.save(tmp_path / "model", "single")
    executed: list[tuple] = []
    monkeypatch.setattr(os, "execve", lambda *given: executed.append(given))
    monkeypatch.setenv("VLLM_API_KEY", "k")
    place = ["--host", "127.0.0.1", "--port", "1"]
    servers.main([str(tmp_path / "model"), "engine.context=512", "--config", "configs/rl/stage1.yaml", *place])
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "7")
    servers.main([str(tmp_path / "model"), *place])
    [(_, words, given), (_, _, chosen)] = executed
    for option in ("--dtype bfloat16", "--max-num-seqs 512", "--max-model-len 512"):
        assert option in " ".join(words)
    assert (given["VLLM_SERVER_DEV_MODE"], given["VLLM_API_KEY"]) == ("1", "k")
    assert [each["VLLM_ENGINE_READY_TIMEOUT_S"] for each in (given, chosen)] == ["1800", "7"]


def test_a_hub_id_is_downloaded_when_it_is_first_served_and_never_in_part(hub, server, client, monkeypatch, capsys):
    assert client.models.list().data[0].id == NAME  # the session's server was started with someone/tiny
    assert "model.safetensors" in hub.served
    served = len(hub.served)
    use_here(monkeypatch, hub.url, hub.home)
    assert resolve_model(f"someone/{NAME}").parent.parent.is_relative_to(hub.home)
    assert len(hub.served) == served
    with Hub({f"someone/{NAME}": hub.folders["models", f"someone/{NAME}"]}) as other:
        other.cut = "model.safetensors"
        use_here(monkeypatch, other.url, hub.home / "other")
        assert main([f"someone/{NAME}"]) == 2
    use_here(monkeypatch, "http://127.0.0.1:9", hub.home / "other")
    assert main([f"someone/{NAME}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert sum(f"someone/{NAME} is not in the cache and cannot be downloaded" in line for line in lines) == 2


def test_a_model_that_cannot_be_asked_is_refused_in_one_line(tmp_path, capsys):
    folder = tiny.save(tmp_path / "tiny")
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace(tiny.USER, "<|im_start|>"))
    assert main([str(folder)]) != 0
    _, line = capsys.readouterr().err.splitlines()
    assert tiny.USER in line
    assert "no chat template either" in line


def test_a_server_says_what_it_serves_where_and_to_whom(server):
    said = server.log.read_text()
    for wanted in (
        f"dccot serve: reading someone/{NAME}",
        f"dccot serves {NAME}",
        f"3 workers, at most {BUDGET} tokens on the longest path, context {CONTEXT:,}",
        f"{server.address}/v1",
        "asked for (Authorization: Bearer …)",
        "have 25 s to finish",
    ):
        assert wanted in said
    assert "Triton" not in said


def test_an_ipv6_address_is_printed_as_browsers_and_clients_take_it():
    engine = SimpleNamespace(vllm_config=SimpleNamespace(shutdown_timeout=25))
    chat: Any = SimpleNamespace(config=ServeConfig(), context=100, models=["m"], engine=engine)
    said = banner(chat, argparse.Namespace(ssl_certfile=None, host="::1", port=8000, uds=None, api_key=None))
    assert "http://[::1]:8000/v1 " in said and "http://[::1]:8000/\n" in said


def test_a_port_in_use_is_refused_in_one_line_at_once(model, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([str(model), "--port", str(port)]) == 2
    _, line = capsys.readouterr().err.splitlines()
    assert line == f"dccot: cannot listen on 127.0.0.1 port {port}: Address already in use; choose another --port"


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (["--buget", "3"], "unrecognized arguments: --buget 3; did you mean --budget?"),
        (["--max-model-len", "4096"], "max_model_len (4096) is greater than the derived max_model_len"),
    ],
)
def test_what_vllm_would_not_start_with_is_refused_in_one_line(model, tmp_path, options, wanted):
    command = [sys.executable, "-m", "dccot.cli", "serve", str(model), "--port", str(free_port()), *options]
    paths = os.pathsep.join(filter(None, [plugins(tmp_path / "plugins"), str(ROOT), os.environ.get("PYTHONPATH")]))
    given = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": paths}, "stderr": subprocess.STDOUT}
    done = programs.run(command, stdout=subprocess.PIPE, text=True, timeout=600, **given)
    assert done.returncode == 2, done.stdout
    reading, line = [line for line in done.stdout.splitlines() if not line.startswith("starting vLLM")]
    assert reading.startswith("dccot serve: reading")
    assert line.startswith("dccot: ")
    assert wanted in line


def test_the_page_offers_questions_of_the_training_set_or_of_the_model_card(tmp_path):
    asked = [{"question": "one"}, {"question": "one"}, {"question": "x" * 999}, {"problem": "two"}, {"other": "three"}]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    (tmp_path / "config.yaml").write_text(json.dumps({"data": {"train": str(tmp_path / "train.jsonl")}}))
    assert examples_of(str(tmp_path), tmp_path / "hf") == ["one", "two"]
    (tmp_path / "hf").mkdir()
    assert examples_of(str(tmp_path / "hf"), tmp_path / "hf") == []
    (tmp_path / "hf/README.md").write_text("---\nwidget:\n- text: three?\n---\n# a card\n")
    assert examples_of(str(tmp_path / "hf"), tmp_path / "hf") == ["three?"]
