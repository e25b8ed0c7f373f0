"""The requests of a benchmark: prompts of wanted lengths, and when they are sent. All of it follows from the seed."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass
from typing import Any

import msgspec

from .client import Client, Failure

WORDS = (
    "able above across act add after again age air all also always animal answer apple arm art ask autumn away baby "
    "back ball bank base bear begin below best between bird blue board boat body book both bottom box bread bridge "
    "bright bring brother build burn busy call care carry castle cat chair change child city clean clear clock cloud "
    "coast cold colour come cook copper corner count country cross dance dark daughter day deep desert dinner doctor "
    "door draw dream drive dry early earth east easy egg empty end evening every eye face fall family far farm "
    "father field fire fish flat floor flower fly follow food forest free friend fruit full garden gate gentle give "
    "glass gold good grass great green ground group hair half hand happy harbour hard head hear heart heavy help hill "
    "history hold home horse hot house hundred ice idea island job join kind king kitchen know lake lamp land large "
    "last late laugh lead leaf learn left letter light line little long look love low machine main make map market "
    "meet metal middle milk minute moon morning mother mountain move music name narrow near new night north number "
    "ocean offer old open orange order other paint paper park part pass path peace people picture place plain plant"
).split()
PROBE = 32  # words of the shorter calibration prompt
FALLBACK = (256, 1000)  # token ids that nearly every vocabulary has as plain pieces


@dataclass(kw_only=True)
class Load:
    """The workload, and its concurrency. Lengths are in tokens; each request draws its own from the lists."""

    input_lens: list[int]
    output_lens: list[int]
    seed: int | str
    concurrency: int  # requests at once; 0: no limit
    endpoint: str = "chat"
    request_rate: float = 0  # mean arrivals a second; 0: all at once
    max_retries: int = 2
    keep_text: bool = False
    token_ids: bool = False
    history_turns: int = 0
    history_tokens: int = 64
    history_reasoning_tokens: int = 0
    image: int = 0  # pixels of a side of the image in each prompt; 0: none
    ignore_eos: bool = False
    thinking: bool | None = None
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_last_n: int | None = None


@dataclass
class Job:
    """One request: when it is due, in seconds after the start, and its body."""

    index: int
    due: float
    body: bytes
    wanted_input: int
    wanted_output: int


@dataclass
class Scale:
    """Converts lengths in words to lengths in tokens of this server, or which token ids prompts are made of."""

    per_word: float = 1.0
    overhead: float = 0.0
    ids: list[int] | None = None
    note: str = ""

    def words(self, tokens: int, overhead: bool = True) -> int:
        return max(1, round((tokens - overhead * self.overhead) / self.per_word))


def path(load: Load) -> str:
    return "/v1/chat/completions" if load.endpoint == "chat" else "/v1/completions"


def _text(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _request(load: Load, model: str, prompt: str | list[int]) -> dict[str, Any]:
    if load.endpoint == "chat":
        return {"model": model, "messages": [{"role": "user", "content": prompt}]}
    return {"model": model, "prompt": prompt}


async def calibrate(load: Load, client: Client, model: str) -> Scale:
    """Two prompts of one output token each: the server's usage.prompt_tokens give tokens per word and overhead."""
    rng = random.Random(f"{load.seed} calibration")
    short = PROBE
    long = short + max(PROBE, min(512, max(load.input_lens) // 2))

    async def probe(words: int, **more: Any) -> dict[str, Any]:
        body = {**_request(load, model, _text(rng, words)), "max_tokens": 1, "temperature": 0, **more}
        return msgspec.json.decode(await client.call("POST", path(load), msgspec.json.encode(body)))

    try:
        if load.token_ids:
            got = await probe(long, return_token_ids=True)
            ids = got.get("prompt_token_ids") or got["choices"][0].get("prompt_token_ids")
            pool = sorted(set(ids[1:])) if ids else list(range(*FALLBACK))
            source = "the server's own for a text" if ids else "the server told none of its own"
            return Scale(ids=pool, note=f"exact lengths, of {len(pool)} token ids ({source})")
        first = (await probe(short))["usage"]["prompt_tokens"]
        second = (await probe(long))["usage"]["prompt_tokens"]
    except (msgspec.DecodeError, KeyError, TypeError, IndexError) as error:
        raise Failure(f"the answer to the calibration prompt has no usable {error}") from None
    per_word = (second - first) / (long - short)
    if per_word <= 0:
        raise Failure(f"calibration: {short} words were {first} prompt tokens and {long} words {second}")
    overhead = max(0.0, first - short * per_word)
    return Scale(per_word, overhead, None, f"words of {per_word:.2f} tokens, {overhead:.0f} around them")


def _sampling(load: Load) -> dict[str, Any]:
    names = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "repeat_last_n",
    )
    fields = {name: getattr(load, name) for name in names if getattr(load, name) is not None}
    if load.ignore_eos:
        fields["ignore_eos"] = True
    if load.thinking is not None:
        fields |= {"thinking": load.thinking, "chat_template_kwargs": {"enable_thinking": load.thinking}}
    return fields


def _history(load: Load, rng: random.Random, scale: Scale) -> list[dict[str, Any]]:
    words = scale.words(load.history_tokens, overhead=False)
    messages: list[dict[str, Any]] = []
    for _ in range(load.history_turns):
        messages.append({"role": "user", "content": _text(rng, words)})
        messages.append({"role": "assistant", "content": _text(rng, words)})
        if load.history_reasoning_tokens:
            thoughts = scale.words(load.history_reasoning_tokens, overhead=False)
            messages[-1]["reasoning_content"] = _text(rng, thoughts)
    return messages


def _picture(rng: random.Random, side: int) -> str:
    """A JPEG of random colours that blend, as a data URL."""
    from PIL import Image  # the extra `images`

    coarse = max(1, side // 8)
    colours = Image.frombytes("RGB", (coarse, coarse), rng.randbytes(3 * coarse * coarse))
    colours.resize((side, side), Image.Resampling.BICUBIC).save(file := io.BytesIO(), "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def jobs(load: Load, model: str, scale: Scale, count: int, what: str = "run") -> list[Job]:
    """`count` requests; `what` keeps the warm-up's prompts apart from the measured ones."""
    rng = random.Random(f"{load.seed} {what}")
    clock = random.Random(f"{load.seed} {what} arrivals")  # its own, so that arrivals do not depend on lengths
    fixed = {**_sampling(load), "stream": True, "stream_options": {"include_usage": True}}
    made, due = [], 0.0
    for index in range(count):
        wanted, output = rng.choice(load.input_lens), rng.choice(load.output_lens)
        if scale.ids is not None:
            request = _request(load, model, rng.choices(scale.ids, k=wanted))
        else:
            request = _request(load, model, _text(rng, scale.words(wanted)))
        if load.image:
            shown = {"type": "image_url", "image_url": {"url": _picture(rng, load.image)}}
            (said,) = request["messages"]
            said["content"] = [shown, {"type": "text", "text": said["content"]}]
        if load.history_turns:
            request["messages"] = _history(load, rng, scale) + request["messages"]
        body = msgspec.json.encode({**request, **fixed, "max_tokens": output})
        made.append(Job(index, due, body, wanted, output))
        if load.request_rate:
            due += clock.expovariate(load.request_rate)
    return made
