"""Several models on two live ranks: switching, waiting, models that cannot be loaded, and unloading."""

import json
import shutil
import threading
import time
import urllib.error
import urllib.request

import pytest

from . import retries
from .checkpoints import make_checkpoint
from .processes import wait
from .server import Server

pytestmark = [pytest.mark.timeout(180), retries.CLOCKS]
QUICK = "The quick brown"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """models.yaml with two models, one whose weights are missing, and one that fails while it is loaded."""
    home = tmp_path_factory.mktemp("models")
    make_checkpoint(home / "one", "llama", seed=1)
    make_checkpoint(home / "two", "qwen3", seed=2, head_dim=32)
    shutil.copytree(home / "one", home / "empty", ignore=shutil.ignore_patterns("*.safetensors"))
    (home / "file").write_text("no directory")
    (home / "models.yaml").write_text(
        "default_model: one\n"
        "models:\n"
        "- {name: two, local_path: two, notes: second, params: {max_num_seqs: 8}}\n"
        "- {name: one, local_path: one, params: {temperature: 0}}\n"
        "- {name: empty, local_path: empty}\n"
        f"- {{name: unstaged, local_path: one, options: {{stage: {home}/file}}}}\n"
        "idle_unload_secs: 0\n"
    )
    return home


@pytest.fixture(scope="module")
def server(directory):
    config = str(directory / "models.yaml")
    with Server("--np", "2", "--device", "cpu", "--mem", "64", "--dtype", "f32", "--models-config", config) as server:
        yield server


def ask(server, path, **body):
    """Status and body; GET without one."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def complete(server, model, **more):
    return ask(server, "/v1/completions", **{"model": model, "prompt": QUICK, "max_tokens": 5, "temperature": 0} | more)


def states(server):
    return {one["id"]: one["status"] for one in ask(server, "/v1/models")[1]["data"]}


def test_each_request_is_answered_by_its_model(server):
    assert states(server) == {"one": "loaded", "two": "unloaded", "empty": "unloaded", "unstaged": "unloaded"}
    answers = [complete(server, name) for name in ("one", "two", "one")]
    assert [status for status, _ in answers] == [200] * 3
    assert [answer["model"] for _, answer in answers] == ["one", "two", "one"]
    first, second, again = (answer["choices"][0]["text"] for _, answer in answers)
    assert first == again != second
    status = ask(server, "/v1/models/status")[1]
    assert status["loaded"] == "one" and ask(server, "/v1/models/two")[1]["notes"] == "second"


def test_a_model_is_selected(server):
    assert ask(server, "/v1/models/select", model_id="two") == (200, {"model": "two", "status": "loaded"})
    assert states(server)["two"] == "loaded" and ask(server, "/v1/models/two")[1]["max_model_len"] == 512
    assert ask(server, "/v1/completions", prompt=QUICK, max_tokens=1)[1]["model"] == "two"  # who names none gets it
    assert ask(server, "/v1/models/select", x=1)[0] == 400


@pytest.mark.parametrize(("name", "why"), [("empty", "model.safetensors"), ("unstaged", "file")])
def test_a_model_that_cannot_be_loaded_is_told_of(server, name, why):
    status, answer = complete(server, name)
    assert (status, answer["error"]["code"]) == (503, "model_load_failed")
    assert why in answer["error"]["message"]
    assert complete(server, "two")[0] == 200
    assert states(server)[name] == "failed"
    told = next(one for one in ask(server, "/v1/models/status")[1]["data"] if one["id"] == name)
    assert why in told["message"]


def test_unknown_names(server):
    status, answer = complete(server, "three")
    assert (status, answer["error"]["code"]) == (404, "model_not_found") and "one, two" in answer["error"]["message"]


def test_what_runs_is_finished_first(server):
    complete(server, "one")
    ended = {}

    def run(key, model, tokens):
        status, answer = complete(server, model, max_tokens=tokens, ignore_eos=True)
        ended[key] = (time.monotonic(), status, answer["usage"]["completion_tokens"], answer["model"])

    threads = [threading.Thread(target=run, args=("long", "one", 300))]
    threads[0].start()
    until = time.monotonic() + 20
    while ask(server, "/v1/models/status")[1]["data"][0]["running"] == 0 and time.monotonic() < until:
        time.sleep(0.01)
    threads += [threading.Thread(target=run, args=(f"{name}{i}", name, 3)) for i in range(3) for name in ("two", "one")]
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 7 and all(status == 200 for _, status, _, _ in ended.values())
    assert ended["long"][2:] == (300, "one") and ended["two0"][2:] == (3, "two")
    assert min(ended[f"two{i}"][0] for i in range(3)) > ended["long"][0]


def test_the_models_stay_in_one_job(server):
    health = ask(server, "/health")
    assert (health[0], health[1]["status"]) == (200, "ready") and len(server.ranks) == 2


@pytest.mark.long
def test_an_idle_model_is_unloaded_and_the_server_drains_without_one(directory):
    config = directory / "idle.yaml"
    config.write_text("models: [{name: one, local_path: one}]\nidle_unload_secs: 0.5\n")
    (directory / ".env").write_text("export PHALANX_DTYPE='f32'\nPHALANX_PORT=1 # not in force\n")
    with Server("--np", "2", "--device", "cpu", "--mem", "64", "--models-config", str(config)) as server:
        assert not wait(lambda: ask(server, "/health")[1]["status"] != "unloaded", 30), server.output
        assert states(server)["one"] == "unloaded"
        assert complete(server, "one")[0] == 200
        assert not wait(lambda: ask(server, "/health")[1]["status"] != "unloaded", 30), server.output
        assert "computing in f32" in server.output
        server.process.terminate()
        assert server.process.wait(20) == 0, server.output
