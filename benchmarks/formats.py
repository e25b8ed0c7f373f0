"""The built-in model in every weight format: the perplexity of its held-out answers and that of its own weights.

    python benchmarks/formats.py [--formats q8_0 gptq] [--documents 60] [--device cuda] [--json FILE] [--table]

Each format comes by --isq, and as a checkpoint that `phalanx convert` has written, or others write
(formats_written.py). Of the types that gguf-py quantises, the third column has the plain model with the weights that
gguf-py makes of them. Of the K types, the fourth has it with those that their own blocks mean, where zeros make whole
super-blocks of the inputs: elsewhere they give way to other types. --table prints a Markdown table of the lines in
FILE.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from phalanx.benchmarks import formats_written
from phalanx.benchmarks.builtin_model.heldout import documents
from phalanx.comm import mesh, threads
from phalanx.kernels.quantized.linear import dequantize
from phalanx.kernels.quantized.super_blocks import q2_k, q3_k, q4_k, q5_k, q6_k
from phalanx.launcher import builtin_model
from phalanx.launcher.commands.convert import CALIBRATED, IN_FILES, ConvertOptions, read_windows
from phalanx.rank.convert import __main__ as program
from phalanx.rank.convert.calibrate import Shared
from phalanx.rank.model.load import load
from phalanx.rank.options import IN_SITU
from safetensors.torch import load_file, save_file
from torch import Tensor

MODEL = Path(builtin_model.__file__).parent
FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
# Options of `convert` other than --to, by the names of formats.
OPTIONS: dict[str, dict[str, Any]] = {
    "gptq": {}, "gptq-8": {"bits": 8}, "gptq-asymmetric": {"symmetric": False}, "awq": {"symmetric": False},
    "marlin": {}, "fp8": {},
}  # fmt: skip
FLAGS = {"bits": "--bits", "symmetric": "--no-sym"}
CONVERTED = (*OPTIONS, *(one for one in IN_FILES if one not in ("f32", "f16", "bf16")))
FORMATS = ("plain", *CONVERTED, *formats_written.COMPRESSED, "mxfp4")
PADDED = {"q2k": q2_k, "q3k": q3_k, "q4k": q4_k, "q5k": q5_k, "q6k": q6_k}
BY_GGUF_PY = "q4_0", "q4_1", "q5_0", "q5_1", "q8_0"


def perplexity(path: Path, count: int, device: str, dtype: str, isq: str = "none") -> float:
    """Perplexity of the answers in so many held-out documents."""
    alone = threads.run(lambda comm: mesh.build(comm, 1, 1), 1)[0]
    model = load(path, alone, device, dtype, isq=isq)
    caches, lost, tokens = Shared(model), 0.0, 0
    with torch.inference_mode():
        for ids, learn in documents(count):
            logits = model.logits(model([caches.batch([ids])]))[:-1, : model.vocab_size].float().cpu()
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
            answers = torch.tensor(learn[1:])
            lost, tokens = lost + float(losses[answers].sum()), tokens + int(answers.sum())
    return math.exp(lost / tokens)


def convert(name: str, folder: Path, device: str) -> tuple[Path, str]:
    """The checkpoint in this format, and the command that makes it."""
    to = name.partition("-")[0]
    target = folder / (f"{name}.gguf" if to in IN_FILES else name)
    windows: tuple[list[Any], list[Any]] = ([], [])
    if to in CALIBRATED:
        windows = read_windows(ConvertOptions(samples=32, seqlen=256), MODEL)
    if to not in IN_FILES:
        target.mkdir()
    chosen = {"bits": 4, "symmetric": True} | OPTIONS.get(name, {})
    program.convert(
        program.Question(
            str(MODEL), str(target), to, chosen["bits"], 64, chosen["symmetric"], False, device, "f32", *windows
        )
    )
    words = [FLAGS[key] + (f" {value}" if key == "bits" else "") for key, value in OPTIONS.get(name, {}).items()]
    group = ["--group 64 --samples 32 --seqlen 256"] if to in CALIBRATED else []
    no_sym = [one for one in words if to != "awq" or one != "--no-sym"]
    return target, " ".join(["phalanx convert launcher/builtin_model DST --to", to, *no_sym, *group])


def written(name: str, folder: Path, device: str) -> tuple[Path, str]:
    """A checkpoint that only others write, and what made it."""
    if name in formats_written.COMPRESSED:
        return formats_written.compressed(name, MODEL, folder / name), f"compressed-tensors, {name}"
    plain, _ = convert("f32", folder, device)
    return formats_written.mxfp4(plain, folder / "mxfp4.gguf"), "gguf.quants.quantize"


def by_gguf_py(name: str, folder: Path) -> Path:
    """The checkpoint with the matrices that gguf-py makes of its blocks."""
    kind = gguf.GGMLQuantizationType[name.upper()]

    def through(x: Tensor) -> Tensor:
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind))

    return changed(through, folder / f"{name}-gguf-py")


def padded(name: str, folder: Path) -> Path:
    """The checkpoint with the matrices that a K type's blocks mean: zeros behind the inputs, and cut off again."""
    codec = PADDED[name]

    def through(x: Tensor) -> Tensor:
        inputs = x.shape[1]
        wide = torch.nn.functional.pad(x, (0, -inputs % codec.GROUP))
        return dequantize(codec.pack(*codec.encode(wide)))[:, :inputs]

    return changed(through, folder / f"{name}-padded")


def changed(through: Callable[[Tensor], Tensor], target: Path) -> Path:
    """The checkpoint with other matrices, the head's in a table of its own."""
    target.mkdir()
    tensors = {key: x.float() for key, x in load_file(MODEL / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for key, x in tensors.items():
        if x.dim() == 2 and "embed" not in key:
            tensors[key] = through(x).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    for file in FILES:
        shutil.copy(MODEL / file, target)
    config = json.loads((target / "config.json").read_text()) | {"tie_word_embeddings": False, "torch_dtype": "float32"}
    (target / "config.json").write_text(json.dumps(config))
    return target


def measure(name: str, count: int, device: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Lines of the raw results."""

    def line(how: str, command: str, ask: Callable[[], float]) -> dict[str, Any]:
        found = {"format": name, "how": how, "command": command, "device": device, "dtype": dtype}
        return found | {"documents": count, "perplexity": ask()}

    if name == "plain":
        yield line("plain", "phalanx serve", lambda: perplexity(MODEL, count, device, dtype))
        return
    if name not in CONVERTED:
        with tempfile.TemporaryDirectory() as made:
            path, command = written(name, Path(made), device)
            yield line("written", command, lambda: perplexity(path, count, device, dtype))
        return
    if name in IN_SITU:
        command = f"phalanx serve --isq {name}"
        yield line("isq", command, lambda: perplexity(MODEL, count, device, dtype, isq=name))
    with tempfile.TemporaryDirectory() as made:
        path, command = convert(name, Path(made), device)
        yield line("convert", command, lambda: perplexity(path, count, device, dtype))
        if name in BY_GGUF_PY:
            same = by_gguf_py(name, Path(made))
            yield line("gguf-py", "gguf.quants.quantize", lambda: perplexity(same, count, device, dtype))
        if name in PADDED:
            whole = padded(name, Path(made))
            yield line("padded", "benchmarks/formats.py", lambda: perplexity(whole, count, device, dtype))


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: a row for each format, perplexities and by how much they are above the plain model's."""
    found = {(one["format"], one["how"]): one for one in lines}
    plain = found["plain", "plain"]["perplexity"]
    rows = ["| format | `--isq` | a checkpoint | gguf-py's own | padded | command |", "|---|---|---|---|---|---|"]
    for name in dict.fromkeys(one["format"] for one in lines):
        cells = []
        for how in ("isq", "convert", "gguf-py", "padded"):
            one = found.get((name, how)) or (found.get((name, "written")) if how == "convert" else None)
            cells.append(f"{one['perplexity']:.4f} ({one['perplexity'] / plain - 1:+.2%})" if one else "")
        command = next((one for how in ("convert", "written", "plain") if (one := found.get((name, how)))), None)
        if name == "plain":
            cells[0] = f"{plain:.4f}"
        rows.append(f"| {name} | {' | '.join(cells)} | `{command['command'] if command else ''}` |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--table", action="store_true", help="print FILE's lines, and measure nothing")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.json.read_text().splitlines()]))
        return
    for name in args.formats:
        for found in measure(name, args.documents, args.device, args.dtype):
            print(json.dumps(found), flush=True)
            if args.json:
                with args.json.open("a") as out:
                    out.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
