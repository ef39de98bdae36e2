"""Asynchronous RL on two real servers: one is killed and started again while the model trains.

Every span of every response that was trained on has the log-probs of its own version's weights, also after the server
came back; and without staleness responses and weights are those of the synchronous run.
"""

import os
import signal
import subprocess
import threading
from types import SimpleNamespace

import httpx
import pytest

from dccot.core.config import load_config
from dccot.lab.worlds.exact_task import TEMPERATURE, make_task, write_problems
from dccot.rollout import servers as servers_module
from dccot.rollout.servers import Servers
from dccot.rollout.vllm_engine import VllmEngine
from dccot.train.config import RLConfig
from dccot.train.rl import train
from tests.support import programs
from tests.support.servers import eventually
from tests.support.spans import gaps, responses_in, trained_in

pytestmark = pytest.mark.slow

STEPS = 5


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    out = tmp_path_factory.mktemp("asynchronous")
    make_task(out)
    write_problems(out / "problems.jsonl", 100)
    return out


def settings(out, name: str, *more: str) -> RLConfig:
    slow = "optimizer.learning_rate=0.0005"  # so that remove_easy finds problems to the end
    own = [f"name={name}", f"steps={STEPS}", "profile.steps=[]", slow]
    return load_config(RLConfig, out / "rl.yaml", [*own, *more])


def forked(command, *, env, preexec_fn, **options):
    """The process of a server, without settings of memory that are read before main."""
    kept = {name: value for name, value in env.items() if not name.startswith("MALLOC_")}
    return programs.Popen(command, env=kept, **options)


@pytest.fixture(scope="module")
def servers(out):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers_module, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": forked}))
        patch.setenv("VLLM_API_KEY", "")  # Servers sets another one; undone in the end
        with Servers(out / "model", settings(out, "any").engine, 2, logs=out) as servers:
            yield servers


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=60, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def fleet(servers) -> list[str]:
    return ["rollout.mode=asynchronous", f"engine.url=[{','.join(servers.urls)}]"]


def test_every_route_but_health_wants_the_key(servers):
    for path in ("/pause", "/resume", "/update_weights", "/inference/v1/generate", "/collective_rpc"):
        assert httpx.post(servers.urls[0] + path, json={}, trust_env=False).status_code == 401
    assert httpx.get(servers.urls[0] + "/weight_info", trust_env=False).status_code == 401
    assert httpx.get(servers.urls[0] + "/health", trust_env=False).status_code == 200


def test_a_server_listens_on_no_other_address(servers):
    with pytest.raises(httpx.ConnectError):  # another one of this machine's
        httpx.get(servers.urls[0].replace("127.0.0.1", "127.0.0.2") + "/health", trust_env=False)


def test_without_staleness_responses_and_weights_are_those_of_the_synchronous_run(out, servers):
    engine = VllmEngine(out / "model", settings(out, "any").engine)
    train(settings(out, "synchronous", "steps=2"), engine)
    train(settings(out, "fresh", "steps=2", "rollout.max_staleness=0", *fleet(servers)))
    for step in range(2):
        ours, theirs = (trained_in(out / name, step) for name in ("fresh", "synchronous"))
        assert [(row["problem"], row["sample"], row["text"]) for row in ours] == [
            (row["problem"], row["sample"], row["text"]) for row in theirs
        ]
    whole = [out / name / "checkpoints/step_000002/hf/model.safetensors" for name in ("fresh", "synchronous")]
    assert whole[0].read_bytes() == whole[1].read_bytes()


@pytest.fixture(scope="module")
def run(out, servers):
    """The second server is killed after the first step; afterwards it has been started again."""
    killed = threading.Event()

    def disturb() -> None:
        assert eventually((out / "killed" / "rollouts" / "step_000000.jsonl.gz").exists)
        os.killpg(servers.pids[1], signal.SIGKILL)
        killed.set()

    thread = threading.Thread(target=disturb, daemon=True)
    thread.start()
    more = ("rollout.max_staleness=2", "filter=remove_easy", *fleet(servers))
    train(settings(out, "killed", *more))
    assert killed.wait(60)
    assert eventually(lambda: answers(servers.urls[1]))
    return out / "killed"


def test_every_span_has_the_log_probs_of_its_versions_weights_on_real_servers(run, out):
    assert max(gaps(run, out / "model", TEMPERATURE).values()) < 1e-4
    ages = {step - v for step, response in responses_in(run) for s in response.segments() for v in s.versions}
    assert {0, 1} <= ages <= {0, 1, 2}


def test_a_killed_server_loses_no_response(run):
    for step in range(STEPS):
        rows = trained_in(run, step)
        assert len(rows) == 32
        assert sorted({row["sample"] for row in rows}) == [0, 1, 2, 3]


def test_servers_get_the_current_weights_before_they_sample_whatever_state_they_are_in(run, out, servers):
    """One came back with the weights of its folder, the other was left paused in the middle of an update. The run
    continues for a step, on both.
    """
    key = {"Authorization": f"Bearer {os.environ['VLLM_API_KEY']}"}
    with httpx.Client(headers=key, timeout=60, trust_env=False) as client:
        for path in ("/pause?mode=keep", "/start_weight_update"):
            client.post(servers.urls[0] + path).raise_for_status()
        more = ("rollout.max_staleness=2", "filter=remove_easy", *fleet(servers))
        train(settings(out, "killed", f"steps={STEPS + 1}", *more))
        assert max(gaps(run, out / "model", TEMPERATURE).values()) < 1e-4
        labels = [client.get(f"{url}/weight_info").json()["weight_version"] for url in servers.urls]
        assert labels == [str(STEPS + 1)] * 2
