"""Images in chats, on a live server of two ranks: the answers are those of transformers, and a second question about an
image costs no tower."""

import json
import os
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import phalanx
import pytest
import torch

from .rank.model import harness
from .rank.model.shapes import IMAGE, ONE_STAGE
from .rank.model.test_architectures import of_short
from .rank.model.vision.seeing import SEEING, add_text, data_url, picture, write_seeing
from .rank.model.vision.test_towers import of_images
from .server import Server

pytestmark = pytest.mark.timeout(240)
OPTIONS = "--np", "2", "--device", "cpu", "--mem", "64", "--max-num-batched-tokens", "64"


SHORT = [("qwen3_vl", "--tp")]
CUTS = [(name, cut) for name in SEEING for cut in ("--tp", "--pp") if cut == "--tp" or name not in ONE_STAGE]
SERVED = of_short(CUTS, SHORT)


@pytest.fixture(scope="module", params=SERVED, ids=" ".join)
def served(request, tmp_path_factory):
    """A server, and its model's directory."""
    name, cut = request.param
    path = add_text(write_seeing(tmp_path_factory.mktemp("model"), name))
    with Server(str(path), *OPTIONS, cut, "2") as server:
        yield server, path


def ask(server, content, path="/v1/chat/completions", **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0} | fields
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def parts(*said):
    """Texts and images as OpenAI has them."""
    return [
        {"type": "text", "text": one} if isinstance(one, str)
        else {"type": "image_url", "image_url": {"url": data_url(one)}}
        for one in said
    ]  # fmt: skip


def generated(path, prompt, images, count):
    """Greedy tokens of transformers behind a prompt."""
    ids = torch.tensor([prompt])
    given = of_images(path, ids, images)
    with torch.no_grad():
        found = harness.reference(path).generate(
            ids, **given, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[0, len(prompt) :].tolist()


def test_greedy_texts(served):
    """Several images, whose tokens are computed in chunks."""
    server, path = served
    images = [picture(100, 75), picture(200, 300, seed=1)]
    fields = dict(max_tokens=100, ignore_eos=True, return_token_ids=True)
    answer = ask(server, parts("What is this: ", images[0], " and this?", images[1]), **fields)
    prompt, tokens = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(prompt) and prompt.count(IMAGE) > 15
    assert tokens == generated(path, prompt, images, 100)


def test_equal_images_are_cached(served):
    """They are equal by what they show: the same prompt about another image of the same size is computed."""
    server, path = served
    fields = dict(max_tokens=8, ignore_eos=True, return_token_ids=True)
    found = []
    for seed in (2, 2, 3):
        image = picture(150, 150, seed)
        answer = ask(server, parts(image, "Which colours?"), **fields)
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == generated(path, answer["prompt_token_ids"], [image], 8)
        found.append(answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0))
    assert found[1] > found[0] and found[2] < found[1]
    time.sleep(0.6)  # figures come with a step, twice a second
    ask(server, "And now?", max_tokens=2)
    names = "vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total", "phalanx_tower_seconds_total"
    asked, there, seconds = map(server.metric, names)
    assert asked >= 3 and 1 <= there <= asked - 2
    assert (seconds > 0) == ("--tp" in server.process.args)  # with --pp rank 0 has the last layers


def test_streams_choices_and_later_turns(served):
    server, _ = served
    asked, fields = parts(picture(90, 120, seed=9), "Which colours?"), dict(max_tokens=12, ignore_eos=True)
    first = ask(server, asked, **fields)
    (said,) = (one["message"]["content"] for one in first["choices"])
    both = ask(server, asked, **fields, n=2)
    assert [one["message"]["content"] for one in both["choices"]] == [said] * 2
    body = {"messages": [{"role": "user", "content": asked}], "temperature": 0, "stream": True} | fields
    url = server.url + "/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        events = [json.loads(line[6:]) for line in answer if line.startswith(b"data: {")]
    choices = [one for event in events for one in event["choices"]]
    assert "".join(one["delta"].get("content") or "" for one in choices) == said
    ends = [reason for one in choices if (reason := one["finish_reason"])]
    assert ends == ["length"]
    turns = [
        {"role": "user", "content": asked}, {"role": "assistant", "content": said},
        {"role": "user", "content": "And where?"},
    ]  # fmt: skip
    usage = ask(server, "", messages=turns, **fields)["usage"]
    assert usage["prompt_tokens"] > first["usage"]["prompt_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.long
@pytest.mark.parametrize("layout", [("--np", "4", "--tp", "2", "--pp", "2"), ("--np", "2", "--dp", "2")], ids=" ".join)
def test_stages_of_two_ranks_and_replicas(tmp_path, layout):
    """Requests that come together have the towers of a stage's ranks, or of replicas, and further ones their
    features."""
    path = add_text(write_seeing(tmp_path, "qwen3_vl"))
    fields = dict(max_tokens=60, ignore_eos=True, return_token_ids=True)
    shown = [[picture(100, 75, seed), picture(90, 120, seed + 10)] for seed in range(4)] * 2
    with Server(str(path), *layout, *OPTIONS[2:]) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda images: ask(server, parts(*images, "Which?"), **fields), shown))
        assert server.metric("vllm:mm_cache_queries_total") == 2 * len(shown)
    for images, answer in zip(shown, answers, strict=True):
        tokens = answer["choices"][0]["token_ids"]
        assert tokens == generated(path, answer["prompt_token_ids"], images, 60)


@pytest.fixture(scope="module")
def clients_server(tmp_path_factory):
    path = add_text(write_seeing(tmp_path_factory.mktemp("model"), "qwen2_5_vl"))
    with Server(str(path), *OPTIONS, "--tp", "2") as server:
        picture(100, 75).save(path / "a.png")
        yield server, path / "a.png"


@pytest.mark.long
def test_clients(clients_server):
    """Each of them shows the image as its own documents do, and gets the same answer."""
    server, _ = clients_server
    anthropic, openai = pytest.importorskip("anthropic"), pytest.importorskip("openai")
    langchain, url = pytest.importorskip("langchain_openai"), data_url(picture(100, 75))
    shown, question = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}, "What is it?"
    content = [shown, {"type": "text", "text": question}]
    want = ask(server, content, max_tokens=8)
    base, of = f"{server.url}/v1", dict(api_key="none", max_retries=0)
    client = openai.OpenAI(base_url=base, **of)
    messages = [{"role": "user", "content": content}]
    found = client.chat.completions.create(model="m", messages=messages, max_tokens=8, temperature=0)
    assert found.usage.prompt_tokens == want["usage"]["prompt_tokens"]
    said = [found.choices[0].message.content]
    parts = [{"type": "input_image", "image_url": url, "detail": "auto"}, {"type": "input_text", "text": question}]
    asked = [{"role": "user", "content": parts}]
    said.append(client.responses.create(model="m", input=asked, max_output_tokens=8, temperature=0).output_text)
    source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
    messages = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": question}]}]
    other = anthropic.Anthropic(base_url=server.url, **of)
    answer = other.messages.create(model="m", messages=messages, max_tokens=8, extra_body={"temperature": 0})
    said.append(answer.content[0].text)
    with pytest.raises(anthropic.BadRequestError, match="no image"):
        wrong = [{"type": "image", "source": source | {"data": "aGVsbG8="}}]
        other.messages.create(model="m", messages=[{"role": "user", "content": wrong}], max_tokens=8)
    chain = langchain.ChatOpenAI(base_url=base, model="m", max_tokens=8, temperature=0, **of)
    said.append(chain.invoke([("user", content)]).content)
    assert said == [want["choices"][0]["message"]["content"]] * 4


@pytest.mark.long
def test_llama_index(clients_server):
    """In its own interpreter, as in test_clients.py."""
    server, file = clients_server
    if not (python := os.environ.get("LLAMA_INDEX_PYTHON", "")):
        pytest.skip("LLAMA_INDEX_PYTHON does not name a Python that has llama-index-llms-openai-like")
    script = Path(__file__).with_name("llama_index_client.py")
    ran = subprocess.run([python, script, server.url + "/v1", "m", file], capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    want = ask(server, parts(picture(100, 75), "What is it?"), max_tokens=8)
    assert json.loads(ran.stdout) == want["choices"][0]["message"]["content"]


@pytest.mark.long
def test_the_library(tmp_path):
    """An image of Pillow's, and a file; and both."""
    path = add_text(write_seeing(tmp_path / "model", SEEING[0]))
    image = picture(100, 75)
    image.save(tmp_path / "a.png")
    with phalanx.LLM(str(path), np=1, device="cpu", mem=64) as llm:
        found = []
        for one in (image, tmp_path / "a.png", str(tmp_path / "a.png")):
            content = [{"type": "image", "image": one}, {"type": "text", "text": "What is it?"}]
            params = phalanx.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            (answer,) = llm.chat([{"role": "user", "content": content}], params)
            found.append(answer)
        content = [{"type": "image", "image": image}, {"type": "image", "image": str(tmp_path / "a.png")}]
        (two,) = llm.chat([{"role": "user", "content": [*content, {"type": "text", "text": "Which?"}]}], params)
    assert len({one.outputs[0].text for one in found}) == 1
    count = found[0].prompt_token_ids.count(IMAGE)
    assert two.prompt_token_ids.count(IMAGE) == 2 * count > 0
