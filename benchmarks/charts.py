"""Draws docs/charts/*.svg from benchmarks/results/*.jsonl: Phalanx, its peers, and what an H200 can do.

    python benchmarks/charts.py

peers.svg: the time that a peer takes, divided by Phalanx's; medians, as `compare.py --table` prints them.
limit.svg: the share of a GPU's limit that a step reaches. The limit of a decode step is the time to read the weights
and the cache once, or to multiply, where that is longer; of prompts the time to multiply. Nothing between GPUs counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.benchmarks import compare
from phalanx.benchmarks.ops_table import BANDWIDTH, FLOPS
from phalanx.benchmarks.shapes import LLAMAS

RESULTS = Path(__file__).resolve().parent / "results"
CHARTS = RESULTS.parents[1] / "docs/charts"
COMMAND = "python benchmarks/charts.py"
# Files of compare.py's lines, and what they are about.
H200 = {
    "h200-llama3-8b-2026-11-23.jsonl": "Llama-3.1-8B, bf16, one H200",
    "h200-x2-llama3-8b-2026-11-22.jsonl": "Llama-3.1-8B, bf16, two H200",
    "h200-x4-llama3-70b-2026-11-26.jsonl": "Llama-3.1-70B, bf16, four H200",
}
# In place of a file's own lines of the mixed load: the newest that both engines have from one machine, and their day.
MIXED = {"h200-llama3-8b-2026-11-23.jsonl": ("h200-vllm-2026-11-26.jsonl", "2026-11-26")}
CPU, CPU_TITLE = "cpu-llama-cpp-f32-*.jsonl", "Llama of 99M, f32, two CPU cores"  # the newest run of these
SIZE = 2  # bytes of an element of bf16
CONTEXT = 128 + (32 + 256) // 2  # tokens of a sequence in the steps between the 32nd and the 256th new token
WIDTH, LEFT, SPAN, ROW = 800, 150, 380, 22  # pixels; SPAN is of the axis
TEXT, GREY, BAR, LINE = "#1f2328", "#59636e", "#3b6fb6", "#d1d9e0"


class Bar(NamedTuple):
    label: str
    value: float
    words: str  # at its end


class Group(NamedTuple):
    title: str
    bars: list[Bar]


def read(name: str) -> list[compare.Line]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def on_cpus() -> dict[str, str]:
    """The file of CPUs, and what it is about."""
    return {max(path.name for path in RESULTS.glob(CPU)): CPU_TITLE}


def beside_peers() -> list[Group]:
    """A bar is the peer's time divided by ours, of decode steps and of the mixed load."""
    groups = []
    for name, title in (H200 | on_cpus()).items():
        lines = [line for line in read(name) if line["config"] in LLAMAS]
        newer, day = MIXED.get(name, ("", ""))
        if newer:
            mixed = [line for line in read(newer) if line["config"] in LLAMAS and line["what"] == "mixed"]
            lines = [line for line in lines if line["what"] != "mixed"] + mixed
        peer = next(line for line in lines if line["engine"] != "phalanx")
        engine = peer["engine"].replace("vllm", "vLLM")
        if engine == "llama.cpp":
            engine += " (llama-cpp-python)"
        bars = []
        for (_, _, what, batch, _), ours, theirs in _medians(lines):
            if what in ("decode", "mixed"):
                unit = "ms" if what == "decode" else "s"
                ratio = theirs / ours
                words = f"{ratio:.2f}: {_three(ours)} instead of {_three(theirs)} {unit}"
                if what == "mixed" and newer:
                    words += f" ({day})"
                bars.append(Bar(f"decode {batch}" if what == "decode" else "mixed, 512", ratio, words))
        groups.append(Group(f"{title}, compared with {engine} {peer['version']}; {peer['date']}", bars))
    return groups


def beside_the_limit() -> list[Group]:
    groups = []
    for name, title in H200.items():
        lines, bars = read(name), []
        for (config, gpus, what, batch, prompt), ours, _ in _medians(lines):
            if what in ("decode", "prefill"):
                seconds = ours / 1000 if what == "decode" else ours
                least = limit(LLAMAS[config], what, batch, prompt) / gpus
                words = f"{least / seconds:.0%}: {_three(1000 * least)} of {_three(1000 * seconds)} ms"
                label = f"decode {batch}" if what == "decode" else f"prefill {batch} x {prompt}"
                bars.append(Bar(label, least / seconds, words))
        groups.append(Group(f"{title}; {lines[0]['date']}", bars))
    return groups


def _three(value: float) -> str:
    """With three significant figures."""
    return f"{value:#.3g}".rstrip(".")


def _medians(lines: list[compare.Line]) -> Iterator[tuple[compare.Key, float, float]]:
    """Cells that both were measured at: the key, our time and the peer's."""
    for key, sides in compare.times(lines).items():
        if len(sides) == 2:
            yield key, statistics.median(sides["phalanx"]), statistics.median(sides["peer"])


def limit(shape: dict[str, Any], what: str, batch: int, prompt: int) -> float:
    """The least seconds on one GPU."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    inner = layers * (2 * hidden * hidden + 2 * hidden * keys + 3 * hidden * shape["intermediate_size"])
    head = hidden * shape["vocab_size"]
    if what == "decode":
        moved = SIZE * (inner + head + batch * CONTEXT * layers * 2 * keys)
        multiply = 2 * batch * (inner + head + CONTEXT * layers * 2 * hidden)
        return max(moved / BANDWIDTH, multiply / FLOPS)
    scores = layers * hidden * prompt * (prompt + 1)  # of each token with itself and those before; and the values
    return 2 * batch * (prompt * inner + head + scores) / FLOPS


def draw(title: str, groups: list[Group], top: float, ticks: dict[float, str], note: str) -> str:
    """A chart of horizontal bars from 0 to `top`."""
    lines, y = [], 64
    for group in groups:
        lines.append(_text(16, y + 14, group.title, weight="600"))
        y += ROW + 4
        for bar in group.bars:
            width = SPAN * bar.value / top
            lines.append(_text(LEFT - 8, y + 13, bar.label, anchor="end"))
            lines.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{ROW - 6}" fill="{BAR}"/>')
            lines.append(_text(LEFT + width + 8, y + 13, bar.words))
            y += ROW
        y += 12
    for at, words in ticks.items():
        x = LEFT + SPAN * at / top
        lines.insert(0, f'<line x1="{x:.1f}" x2="{x:.1f}" y1="62" y2="{y}" stroke="{GREY if at == 1 else LINE}"/>')
        lines.append(_text(x, y + 16, words, colour=GREY, anchor="middle"))
    height = y + 48
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        _text(16, 28, title, size=16, weight="600"),
        _text(16, 48, note, colour=GREY),
    ]
    return (
        "\n".join([*head, *lines, _text(16, height - 10, f"drawn by {COMMAND}", colour=GREY, size=11), "</svg>"]) + "\n"
    )


def _text(
    x: float, y: float, words: str, colour: str = TEXT, anchor: str = "start", size: int = 0, weight: str = ""
) -> str:
    more = f' font-size="{size}"' if size else ""
    more += f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def charts() -> dict[str, str]:
    """SVG by file name."""
    peers = beside_peers()
    top = max(1.6, *(1.05 * bar.value for group in peers for bar in group.bars))
    marks = (n / 2 for n in range(int(2 * top) + 1))
    return {
        "peers.svg": draw(
            "How many times as fast as other engines",
            peers,
            top,
            {at: f"{at:g}" for at in marks},
            "The other engine's time divided by Phalanx's, so 1 is equal: decode steps by batch, 512 mixed requests",
        ),
        "limit.svg": draw(
            "Share of the hardware's limit",
            beside_the_limit(),
            1.0,
            {0.0: "0 %", 0.5: "50 %", 1.0: "100 %"},
            f"An H200 reads {BANDWIDTH / 1e12:.2f} TB/s and multiplies at {FLOPS / 1e12:.0f} TFLOP/s; "
            "decode by batch, prefill by prompts x tokens",
        ),
    }


if __name__ == "__main__":
    CHARTS.mkdir(exist_ok=True)
    for name, svg in charts().items():
        (CHARTS / name).write_text(svg, encoding="utf-8")
        print(CHARTS / name)
