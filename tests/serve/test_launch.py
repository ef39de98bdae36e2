"""What `dccot serve` decides before vLLM starts."""

import json
import shlex

from dccot.lab.worlds import bigram as tiny
from dccot.model.folder import resolve_model
from dccot.rollout.engine import EngineConfig, as_flags, vllm_options
from dccot.serve.launch import OWN, VARIABLE, from_environment, main, overrides
from tests.serve.conftest import NAME
from tests.support.hub import Hub, use_here

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
    [line] = capsys.readouterr().err.splitlines()
    assert tiny.USER in line
    assert "no chat template either" in line
