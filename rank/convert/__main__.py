"""`python -m phalanx.rank.convert QUESTION`: what `phalanx convert` runs where torch is. QUESTION is a JSON file.

What it refuses ends it with one line and the code.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # as in rank/__main__.py

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from tqdm import tqdm  # type: ignore[import-untyped]

from ...comm import mesh, threads
from ...errors import MEMORY, MODEL, USAGE, FatalError, lacks_memory
from .. import untrusted_files
from ..model.base import Model
from ..model.choices import choose_dtype
from ..model.config import Config, read_config
from ..model.experts.fused import StackedLinear
from ..model.load import load
from ..safetensors_header import INDEX, Index, read_index, weight_files
from . import calibrate, gguf_experts, gptq, layouts, to_fp8, to_gguf
from .writer import Writer

KEPT = ".json", ".jinja", ".model", ".txt", ".md"  # endings of files that stay as they are


class Question(msgspec.Struct, frozen=True):
    """The conversion that was asked for."""

    source: str  # a directory with config.json and safetensors
    target: str  # a directory that is empty; a file that is to be made where `to` is a type of GGUF files
    to: str  # of LAYOUTS or to_gguf.TARGETS, or fp8
    bits: int
    group: int  # 0: the whole row
    symmetric: bool
    ordered: bool  # desc_act
    device: str
    dtype: str  # that is computed in
    windows: list[list[int]]  # token ids of the calibration text, equally many in each; none where none is needed
    held_out: list[list[int]]  # more of it, by which the loss is measured
    tokenizer: dict[str, Any] = {}  # the metadata of a GGUF file


def convert(question: Question) -> None:
    """Raises FatalError with a message for the user."""
    source, target = Path(question.source), Path(question.target)
    config = read_config(source)
    if config.quantization and not (question.to in to_gguf.TARGETS and gguf_experts.takes(config)):
        raise FatalError(_quantised_already(source, config), MODEL)
    device = ("cuda" if torch.cuda.is_available() else "cpu") if question.device == "auto" else question.device
    if device == "cuda" and not torch.cuda.is_available():
        raise FatalError(
            f"--device cuda: PyTorch {torch.__version__} sees no GPU; --device cpu computes without", USAGE
        )
    if question.to in to_gguf.TARGETS:
        file = Path(question.target)
        to_gguf.write(source, file, question.to, question.tokenizer, device, _counter(unit_scale=True))
        for one in to_gguf.differences(source, file):
            _say(f"the file cannot say all of config.json: {one}")
    elif question.to == "fp8":
        writer = Writer(target)
        settings = to_fp8.write(source, config, writer, device, _counter(unit="tensor"))
        writer.finish()
        _copy_files(source, target, settings)
    else:
        _round(question, config, device)


def _quantised_already(source: Path, config: Config) -> str:
    """Why a checkpoint is not converted. Other engines repack GPTQ and AWQ for Marlin's kernel."""
    name = (config.quantization or {}).get("quant_method")
    if name in ("gptq", "awq", "marlin"):
        return (
            f"{source} is quantised already ({name}), and Phalanx reads such checkpoints as they are, so nothing has "
            f"to be converted for its kernels: phalanx serve {shlex.quote(str(source))}"
        )
    return f"{source} is quantised already, by its config.json: convert the model that it was made of"


def _round(question: Question, config: Config, device: str) -> None:
    source, target = Path(question.source), Path(question.target)
    scheme = gptq.Scheme(question.bits, question.group, question.symmetric, question.ordered)
    layout = layouts.LAYOUTS[question.to]
    model = _load(config, question, device)
    index = read_index(source)
    names = {type(model).rename(name): name for name in index.files}
    before = calibrate.perplexity(model, question.held_out)
    writer = Writer(target)
    replaced, plain = set(), []
    try:
        for layer in _progress(model, question, scheme, (layout.outputs, layout.inputs)):
            plain += layer.skipped
            for path, matrix, _ in layer.linears:
                name = names[f"{path}.weight"]
                replaced.add(name)
                for field, tensor in layout.tensors(matrix, scheme).items():
                    writer.add(f"{name.removesuffix('weight')}{field}", tensor)
    except ValueError as error:
        raise FatalError(f"{error}: choose another calibration text (--calibration), or more of it", USAGE) from None
    if not replaced:
        raise FatalError(f"{source}: no linear has sizes that fit groups of {question.group} inputs", MODEL)
    _say(f"perplexity of text that it was not fitted to: {before:.3f} before, "
         f"{calibrate.perplexity(model, question.held_out):.3f} after")  # fmt: skip
    _copy_tensors(source, index, replaced, writer)
    writer.finish()
    own = [names[f"{path}.weight"].removesuffix(".weight") for path in plain]
    left = layout.left_out(own, type(model).MERGED) if plain else {}
    _copy_files(source, target, layout.settings(scheme) | left)


def _load(config: Config, question: Question, device: str) -> Model:
    alone = threads.run(lambda comm: mesh.build(comm, 1, 1), 1)[0]
    dtype = choose_dtype(question.dtype, config, torch.device(device))  # named: by auto, CPUs leave weights packed
    model = load(question.source, alone, device, dtype, progress=_bar("reading"))
    for module in model.modules():
        if isinstance(module, StackedLinear) and any("{}" not in source.path for source in module.sources):
            raise FatalError(
                f"{question.source} ({config.model_type}) has all experts of a layer in one tensor, which --to "
                f"{question.to} cannot store: --isq quantises such models while they are loaded",
                MODEL,
            )
    for one in model.parameters():
        if one.is_mkldnn:
            raise FatalError(
                "a C++ compiler is needed on CPUs, where weights are packed without one: pip install 'phalanx[cpu]'",
                USAGE,
            )
    return model


def _progress(
    model: Model, question: Question, scheme: gptq.Scheme, units: tuple[int, int]
) -> Iterator[calibrate.LayerResult]:
    """The rounded layers, with a bar and a line for each that tells what its linears lose."""
    rounded = calibrate.round_model(model, question.windows, scheme, units)
    with tqdm(rounded, "rounding", len(model.model.layers), unit="layer", disable=not sys.stderr.isatty()) as bar:
        for layer in bar:
            lost = ", ".join(f"{name} {error:.4f}" for name, error in _errors(layer).items())
            left = dict.fromkeys(path.rpartition(".")[2] for path in layer.skipped)
            plain = f"; plain: {', '.join(left)}" if left else ""
            bar.write(f"layer {layer.number}: error of the outputs: {lost}{plain}{_unseen(layer)}", sys.stderr)
            yield layer


def _errors(layer: calibrate.LayerResult) -> dict[str, float]:
    """Errors by the linears' names; the mean for experts."""
    found: dict[str, list[float]] = {}
    for one in layer.linears:
        what = "experts' " if ".experts." in one.path else ""
        found.setdefault(what + one.path.rpartition(".")[2], []).append(one.error)
    return {name: sum(errors) / len(errors) for name, errors in found.items()}


def _unseen(layer: calibrate.LayerResult) -> str:
    if not layer.unseen:
        return ""
    return (
        f"; {layer.unseen} of {layer.experts} experts got fewer than {calibrate.FEWEST} tokens and are rounded to the "
        "nearest codes: more --samples reach them"
    )


def _counter(**options: Any) -> Any:
    """Makes a bar of so many steps of encoding."""
    return lambda total: tqdm(desc="encoding", total=total, disable=not sys.stderr.isatty(), **options)


def _bar(what: str) -> Any:
    bar = tqdm(desc=what, unit="B", unit_scale=True, disable=not sys.stderr.isatty())

    def progress(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done >= total:
            bar.close()

    return progress


def _copy_tensors(source: Path, index: Index, replaced: set[str], writer: Writer) -> None:
    """Tensors that were not rounded, as they are."""
    for file in dict.fromkeys(index.files.values()):
        with safe_open(source / file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                if name not in replaced:
                    writer.add(name, opened.get_tensor(name))


def _copy_files(source: Path, target: Path, settings: dict[str, Any]) -> None:
    """config.json names the weights' format; tokenizer, template and what else there is stay as they are."""
    config = untrusted_files.read_json(source, "config.json")
    config["quantization_config"] = settings
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    weights = set(weight_files(source).values())
    for file in source.iterdir():
        kept = file.suffix in KEPT and file.name not in weights and file.name not in ("config.json", INDEX)
        if kept and file.is_file():
            (target / file.name).write_bytes(untrusted_files.read_bytes(source, file.name))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(file: str) -> int:
    question = msgspec.json.decode(Path(file).read_bytes(), type=Question)
    try:
        convert(question)
    except FatalError as stop:
        _say(str(stop))
        return stop.code
    except (RuntimeError, MemoryError) as error:
        if not lacks_memory(error):
            raise
        spared = ", a host's by --dtype bf16 and fewer --samples" if question.to in layouts.LAYOUTS else ""
        _say(f"not enough memory ({str(error).splitlines()[0] if str(error) else error!r}): a GPU's is spared by "
             f"--device cpu{spared}")  # fmt: skip
        return MEMORY
    return 0


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    sys.exit(main(sys.argv[1]))
