"""The cost of HTTP, text and streams: a server under benchmarks/serve.py, then offline.py's part c on the same devices.

    python benchmarks/served.py --config llama3-8b --tp 1 [--clients 256] [--requests 1536] [--out FILE]
    python benchmarks/served.py --config qwen2.5-vl-7b --write FOLDER        the model's files alone, for any server

The server has random weights of the config's shape and a byte-level tokenizer of its vocabulary, made for the run. Each
client streams one request after the other over HTTP, prompts U[64, 1024] and answers U[64, 512] tokens long, as part
c's 512 requests are. Prints a JSON line for each of both, and their output tokens/s as a ratio; ends with code 1 below
--least.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.benchmarks.shapes import CONFIGS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).resolve().parent
PHALANX = [sys.executable, "-P", "-m", "phalanx.launcher.cli"]
IMAGE_TOKENS = {
    "bos_token_id": "<|endoftext|>", "eos_token_id": "<|im_end|>", "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>", "vision_token_id": "<|vision_pad|>", "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}  # fmt: skip
# One message, as Qwen2.5-VL's
TEMPLATE = """{% for message in messages %}<|151644|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}
{%- endfor %}{% endif %}<|im_end|>
{% endfor %}<|151644|>assistant
"""
PREPROCESSOR = dict(
    image_processor_type="Qwen2VLImageProcessor", processor_class="Qwen2_5_VLProcessor", min_pixels=3136,
    max_pixels=12845056, patch_size=14, temporal_patch_size=2, merge_size=2,
)  # fmt: skip
LONGEST = 8192  # tokens of a sequence
STARTS = 300.0  # seconds that a server may take to be ready


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=sorted(CONFIGS), default="llama3-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1536)
    parser.add_argument("--prompts", default="64-1024", metavar="LOW-HIGH", help="tokens of the served prompts")
    parser.add_argument("--answers", default="64-512", metavar="LOW-HIGH", help="tokens of the served answers")
    parser.add_argument("--reps", type=int, default=2, help="of part c, from 2 on: two")
    parser.add_argument("--least", type=float, default=0.95, help="the ratio that is wanted")
    parser.add_argument("--args", default="", help="more flags for the server and for offline.py, such as --device=cpu")
    parser.add_argument("--n-mixed", type=int, default=512, help="requests of part c")
    parser.add_argument("--out", default="", help="append the lines to this file")
    parser.add_argument("--write", default="", metavar="FOLDER", help="write the model's files there, and end")
    asked = parser.parse_args()
    if asked.write:
        os.makedirs(asked.write, exist_ok=True)
        write_model(asked.config, Path(asked.write))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_model(asked.config, Path(folder))
        lines = [served(asked, folder), offline(asked)]
    ratio = lines[0]["output_tokens_per_s"] / lines[1]["output_tokens_per_s"]
    lines.append(dict(what="served / mixed", config=asked.config, tp=asked.tp, ratio=round(ratio, 3)))
    text = "".join(json.dumps(line) + "\n" for line in lines)
    print(text, end="")
    if asked.out:
        with open(asked.out, "a") as file:
            file.write(text)
    return int(ratio < asked.least)


def write_model(name: str, folder: Path) -> None:
    """config.json, and a tokenizer that has a token for each id: bytes, then words of lower-case letters by length.

    With a tower also what a server needs for images, as Qwen2.5-VL has it.
    """
    config = CONFIGS[name]
    special = {config[key]: token for key, token in IMAGE_TOKENS.items()} if "vision_config" in config else {}
    plain = min(special, default=config["vocab_size"])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab, merges = {letter: i for i, letter in enumerate(alphabet)}, []
    letters = ["Ġ", *string.ascii_lowercase]  # Ġ: a space
    for first in (queue := list(letters)):
        for second in letters:
            if len(vocab) == plain:
                break
            vocab[first + second] = len(vocab)
            merges.append((first, second))
            queue.append(first + second)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if special:  # the ids behind them have tokens too
        tokenizer.add_special_tokens([special.get(i, f"<|{i}|>") for i in range(plain, config["vocab_size"])])
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config))


def served(asked: argparse.Namespace, folder: str) -> dict[str, Any]:
    results = os.path.join(folder, "results.jsonl")
    longest = str(min(LONGEST, CONFIGS[asked.config]["max_position_embeddings"]))
    flags = ["--load-format", "dummy", "--max-model-len", longest, "--disable-prefix-cache", "--speculate", "none"]
    flags += ["--np", str(asked.tp)]
    with server(["serve", folder, *flags, "--max-num-seqs", "1024", *asked.args.split()]) as port:
        command = [sys.executable, str(HERE / "serve.py"), "--port", str(port), "--token-ids", "--ignore-eos"]
        command += ["--num-prompts", str(asked.requests), "--concurrency", str(asked.clients), "--json", results]
        command += ["--warmup", str(min(64, asked.clients)), "--input-lens", between(asked.prompts)]
        subprocess.run([*command, "--output-lens", between(asked.answers)], check=True, stdout=sys.stderr)
    found = json.loads(Path(results).read_text().splitlines()[-1])
    if found["failed"]:
        raise SystemExit(f"served.py: {found['failed']} of {asked.requests} requests failed: {found['failures']}")
    names = ("prompt_tokens", "output_tokens", "wall_s", "output_tokens_per_s", "client_cpu", "ttft_s", "tpot_s")
    about = dict(what="served", config=asked.config, tp=asked.tp, clients=asked.clients, requests=asked.requests)
    return about | {name: found[name] for name in names}


@contextlib.contextmanager
def server(arguments: list[str]) -> Iterator[int]:
    """The port of one that answers; its own words go to stderr."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*PHALANX, *arguments, "--p", str(port)]
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        until = time.monotonic() + STARTS
        while not healthy(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"served.py: the server is not ready: {' '.join(command)}")
            time.sleep(0.2)
        yield port
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (OSError, urllib.error.HTTPError):
        return False


def between(text: str) -> str:
    """Lengths for serve.py, which draws from them: all from LOW to HIGH."""
    low, high = map(int, text.split("-"))
    return ",".join(map(str, range(low, high + 1)))


def offline(asked: argparse.Namespace) -> dict[str, Any]:
    """Part c's line; of several the one with the median of output tokens/s, or the slower of the two in the middle."""
    command = [sys.executable, str(HERE / "offline.py"), "--config", asked.config, "--tp", str(asked.tp)]
    command += ["--parts", "c", "--reps", str(asked.reps), "--n-mixed", str(asked.n_mixed), *asked.args.split()]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    lines = sorted((line for line in lines if line["what"] == "mixed"), key=lambda line: line["output_tokens_per_s"])
    return lines[(len(lines) - 1) // 2]


if __name__ == "__main__":
    raise SystemExit(main())
