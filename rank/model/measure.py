"""Memory that ranks would hold of a model, as its own code builds it on the meta device: no weights, no GPU, no memory.

`python -m phalanx.rank.model.measure QUESTION` prints the answer as JSON, for programs that import no torch, such as
`phalanx fit`, whose `measured.py` has the types of both. What serving refuses ends it with one line and the code.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # imports make no garbage, and thousands of modules are built, which it would go through in vain

import contextlib
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import torch
from torch import nn

from ...comm.base import HostComm
from ...comm.mesh import GroupRank, Mesh
from ...errors import FatalError
from ...kernels.cpp import compiler
from ...kernels.gemm.linear import PACK_FROM
from ...kernels.quantized import cuda_layouts, e4m3
from ..checkpoint_files import read_index
from ..gguf import checkpoint
from ..vision import CPU_PIXELS
from . import architectures
from .base import Model, SeeingArgs, Tower
from .cache_spec import block_bytes, cache_dtype, row_bytes
from .choices import DTYPES, choose_dtype, choose_format, choose_plain, names_of
from .config import Config, check_degrees, read_config, tensor_degrees
from .drafts import most_verified
from .drafts.eagle3 import layers_read
from .drafts.find import CHOOSE, Wanted, check_tensor_size, kind_of
from .drafts.part import choose_table
from .experts.fused import FusedExperts, StackedLinear
from .formats import ChooseFormat, dense
from .formats._in_situ import InSituPart
from .formats._stacks import StackOfParts
from .layer_offload import may_move
from .layers.embedding import VocabParallelEmbedding
from .layers.linear import Linear, QKVParallel, RowParallel
from .layers.mla import LatentAttention
from .layers.moe import Router
from .load import ChooseClasses, Classes
from .shard import Shard
from .stored_formats import fp8
from .stored_formats._part import BIAS, StoredPart
from .weights.slicing import ShardedModule

IMAGE = 1024, 1024  # height and width of the image by which plans are told
POSITIONS = 1  # of the rotary tables, which are computed
BLOCK = 16  # tokens of a block by default; entries of windows are not in proportion to them


def measure(question: dict[str, Any]) -> dict[str, Any]:
    """question: model (a directory), device (cpu or cuda), dtype, isq, kv_cache_dtype, tp and pp that were asked for
    (0: none), mmproj, most (ranks of the largest tensor group that is wanted), context (tokens of the longest),
    speculate, draft_model, draft_tensor_parallel_size, num_speculative_tokens. Raises FatalError as loading does."""
    checkpoint.pair(question["model"], question["mmproj"])
    config = read_config(question["model"])
    check_degrees(config, question["tp"] or 1, question["pp"] or 1)
    device = torch.device(question["device"])
    chosen = choose_dtype(question["dtype"], config, device)
    formats = formats_of(config, question, question["isq"])
    kind = kind_of(Wanted(question["speculate"], question["draft_model"]), device)
    verified = 1 if not kind and question["speculate"] in ("auto", "none") else most_verified(
        kind, question["num_speculative_tokens"]
    )  # fmt: skip
    kept = Kept(cache_dtype(question["kv_cache_dtype"], DTYPES[chosen]), verified, device)
    asked = question["tp"] or 1

    def built(tp: int) -> tuple[Model, dict[str, Any] | None]:
        model = build(config, GroupRank(0, tp), GroupRank(0, 1), *formats, images=not kind)
        return model, draft_of(kind, config, tp, question, kept) if kind else None

    models = {asked: built(asked)}  # it may refuse
    for tp in tensor_degrees(config.num_heads, config.num_kv_heads):
        with contextlib.suppress(FatalError):  # where that does not leave the format's groups whole
            models[tp] = models.get(tp) or built(tp)
    ranks = dict(sorted(models.items()))
    in_checkpoint = (ranks[1][1] or {}).get("stored", 0) if kind == "mtp" else 0
    plain = build(config, GroupRank(0, 1), GroupRank(0, 1))
    cuts = list(stages(config, 0 if plain.vision is None else plain.vision.levels))
    return {
        "model_type": config.model_type,
        "hidden": config.hidden_size,
        "vocab": config.vocab_size,
        "max_positions": config.max_positions,
        "usual_dtype": choose_dtype("auto", config, device),
        "parameters": sum(one.numel() for one in plain.parameters()),
        "checkpoint_bytes": stored_bytes(ranks[1][0], DTYPES[config.dtype]) + in_checkpoint,
        "chosen": max(map(visited, plain.modules()), default=0),
        "degrees": list(ranks),
        "stages": cuts,
        "images": None if kind or plain.vision is None else images(plain.vision, question["context"], device),
        "verified": verified,
        "ranks": {
            tp: rank_of(model, config, GroupRank(0, tp), len(cuts), DTYPES[chosen], kept, formats) | {"draft": draft}
            for tp, (model, draft) in ranks.items()
            if tp <= question["most"] or tp == question["tp"]
        },
    }


class Kept(NamedTuple):
    """Facts by which caches take memory."""

    dtype: torch.dtype  # of keys and values
    verified: int  # tokens of a sequence that a step verifies
    device: torch.device


def formats_of(config: Config, question: dict[str, Any], isq: str) -> tuple[ChooseFormat, ChooseFormat]:
    """Formats of linears, and of the embedding."""
    device, compiled = torch.device(question["device"]), any(compiler.compilers())
    plain = choose_plain(question["dtype"], config, device, compiled, {})
    format_of = choose_format(config, isq, plain=plain)
    return format_of, format_of if compiled and device.type == "cpu" else dense


def draft_of(kind: str, target: Config, tp: int, question: dict[str, Any], kept: Kept) -> dict[str, Any]:
    """A draft model on a rank of the last stage: its layers, what it has in addition, and the target's embedding where
    that is another stage's."""
    check_tensor_size(kind, question["draft_tensor_parallel_size"], tp)
    tp = question["draft_tensor_parallel_size"] or tp
    config = target if kind == "mtp" else read_config(question["draft_model"])
    isq = question["isq"] if kind == "mtp" or not config.quantization else "none"
    dtype, tensor = DTYPES[choose_dtype(question["dtype"], config, kept.device)], GroupRank(0, tp)
    check_degrees(config, tp, 1)

    def made(config: Config, choose: ChooseClasses, formats: tuple[ChooseFormat, ChooseFormat]) -> Model:
        own = choose(config, names_held(config, architectures.find(config.model_type).Model))
        return build(config, tensor, GroupRank(0, 1), *formats, own, names_held(config, own.model))

    model, table = made(config, CHOOSE[kind], formats_of(config, question, isq)), list[dict[str, Any]]()
    if kind != "draft" and model.model.embed_tokens is None:
        own = made(target, choose_table, formats_of(target, question, question["isq"]))
        table = weights(own, DTYPES[choose_dtype(question["dtype"], target, kept.device)], kept.device)
    return {
        "layers": [*layers_of(model, dtype, kept)],
        "ends": weights(model, dtype, kept.device, model.model.layers),
        "table": table,
        "rope": model.rope.nbytes // POSITIONS,
        "hidden": config.hidden_size,
        "read": target.hidden_size * (1 + (len(layers_read(config, target.num_layers)) if kind == "eagle3" else 0)),
        "stored": stored_bytes(model, DTYPES[config.dtype]),
    }


def names_held(config: Config, model: type[Model]) -> frozenset[str]:
    """The names of the tensors in a checkpoint's files; empty where config.json is there alone."""
    try:
        return names_of(config, model, read_index(config.path))
    except FatalError:
        return frozenset()


def images(tower: Tower, context: int, device: torch.device) -> dict[str, Any]:
    """An image of IMAGE and the largest one of a prompt of so many tokens, as the tower takes them."""
    rules, (pixel, pair) = tower.rules, tower.multiplications()
    most = CPU_PIXELS if device.type == "cpu" else 0
    inner = max(sum(output.width for output in one.outputs) for one in tower.modules() if isinstance(one, Linear))

    def taken(height: int, width: int) -> dict[str, Any]:
        height, width = rules.size(height, width, most)
        pixels = height * width
        return {
            "height": height,
            "width": width,
            "tokens": len(rules.tokens(*rules.grid(height, width))) * rules.runs(height, width),
            "linears": pixel * pixels,
            "scores": pair * pixels**2,
            "stream": pixels // rules.patch**2 * (4 * tower.hidden + inner),
        }

    largest = rules.largest(context)
    return {"usual": taken(*IMAGE), "largest": taken(*(IMAGE if 0 < most < math.prod(largest) else largest))}


def stages(config: Config, levels: int) -> Iterator[list[int]]:
    """How many layers each pipeline stage has, for each number of stages that there may be. levels: layers that the
    tower's features enter, all of the first stage."""
    args = architectures.find(config.model_type).Args.from_config(config)
    for count in range(1, config.num_layers + 1):
        with contextlib.suppress(FatalError):
            made = [len(args.stage_layers(i, count)) for i in range(count)]
            if made[0] >= levels:
                yield made


def stored_bytes(model: Model, dtype: torch.dtype) -> int:
    """Bytes of a checkpoint of this dtype. Scales of codes have that too, if it is of 16 bits, and 16 bits else."""
    held = {}
    for module in model.sharded_modules():
        quantised = isinstance(module, StoredPart)
        for name, parameter in module.named_parameters(recurse=False):
            widest = torch.float16 if quantised and name != BIAS.name else dtype
            width = min(module.dtype_of(name, dtype), widest, key=_width_of_floats).itemsize
            held[id(parameter)] = parameter.numel() * width
    return sum(held.values())


def _width_of_floats(dtype: torch.dtype) -> tuple[bool, int]:
    return dtype.is_floating_point, dtype.itemsize


def build(
    config: Config, tensor: GroupRank, pipe: GroupRank, format_of: ChooseFormat = dense, table_of: ChooseFormat = dense,
    classes: Classes | None = None, names: frozenset[str] | None = None, images: bool = True,
) -> Model:  # fmt: skip
    """A rank's Model as `load` builds it, without memory. format_of: of linears, table_of: of the embedding. classes:
    of a draft model, which takes no images. names: of the checkpoint's tensors; None: those of a GGUF file. images:
    with the tower, if the model has one; models with one that drafts next to them take none."""
    module = architectures.find(config.model_type)
    alone = cast(HostComm, GroupRank(0, 1))
    mesh = Mesh(alone, 0, cast(HostComm, tensor), cast(HostComm, pipe), cast(HostComm, pipe))
    own = classes or Classes(module.Args, module.Model)
    args = own.args.from_config(config)
    if isinstance(args, SeeingArgs) and (classes is not None or not images):
        args = dataclasses.replace(args, rules=None)
    return own.model(
        args, mesh, POSITIONS, names_of(config, own.model) if names is None else names, format_of, table_of
    )


def rank_of(
    whole: Model,
    config: Config,
    tensor: GroupRank,
    most: int,
    dtype: torch.dtype,
    kept: Kept,
    formats: tuple[ChooseFormat, ChooseFormat],
) -> dict[str, Any]:
    """Memory of each rank of a tensor group, as what does not divide is padded: each layer, and what a stage has in
    addition by its place. whole: that rank's model without stages. most: stages that it may have."""
    kinds: list[dict[str, Any]] = []
    layers = []
    for held in layers_of(whole, dtype, kept):
        if held not in kinds:
            kinds.append(held)
        layers.append(kinds.index(held))
    ends = {"whole": whole}
    if most > 1:  # so that little is built
        places = {"first": 0, "last": most - 1} | ({"middle": 1} if most > 2 else {})
        sees = whole.vision is not None
        ends |= {
            place: build(config, tensor, GroupRank(at, most), *formats, images=sees) for place, at in places.items()
        }
    return {
        "kinds": kinds,
        "layers": layers,
        "ends": {place: weights(model, dtype, kept.device, model.model.layers) for place, model in ends.items()},
        "rope": whole.rope.nbytes // POSITIONS,  # bytes of one position
    }


def layers_of(model: Model, dtype: torch.dtype, kept: Kept) -> Iterator[dict[str, Any]]:
    """Each layer of a model in one stage."""
    for layer, spec in zip(model.model.layers.values(), model.cache_specs(), strict=True):
        yield {
            "weights": weights(layer, dtype, kept.device),
            "kv": -(-block_bytes(spec, BLOCK, kept.dtype) // BLOCK),  # of one token
            "window": spec.window,
            "state": row_bytes(spec, kept.verified),  # of one sequence
            "inner": widest(layer),
            "scores": scores(layer),
        }


def weights(
    module: nn.Module, dtype: torch.dtype, device: torch.device, without: nn.Module | None = None
) -> list[dict[str, Any]]:
    """Each linear and each other layer of the module: its name, elements and bytes, whether it is a matrix that tokens
    are multiplied with, whether it may be in host memory and be copied from there, the bytes of a row that may be read
    there, whether Hopper multiplies it in 8 bits, and whether its bytes are another's, as a tied head's are; of
    experts' those of one expert, and how many there are. without: a part that is left out."""
    inside = set() if without is None else set(without.modules())
    found: list[dict[str, Any]] = []
    counted = set[nn.Module]()  # parts; a tied head may have the embedding's
    for name, one in module.named_modules():
        if one in inside or not isinstance(one, Linear | ShardedModule):
            continue
        inside.update(one.modules())  # the parts of a linear are the linear's
        held = [part for part in one.modules() if isinstance(part, ShardedModule)]
        parameters = list(one.parameters())
        elements = sum(map(torch.numel, parameters))
        if isinstance(one, Linear) and any(isinstance(part, StoredPart) for part in held):
            elements = one.num_weights  # parameters are packs of codes
        if isinstance(one, StackedLinear) and one.stored is not None:
            elements = one.num_weights
        if isinstance(one, VocabParallelEmbedding):
            elements = one.vocab.width * one.inputs.width
        shared = all(part.shared or part in counted for part in held)
        counted.update(held)
        copies = one.experts.width if isinstance(one, StackedLinear) else 1
        size = sum(part.kept_bytes(dtype, device) for part in held)
        found.append(
            {
                "name": name,
                "elements": elements // copies,
                "bytes": size // copies,
                "matrix": isinstance(one, Linear | StackedLinear | Router),
                "moves": may_move(one),
                "row": size // one.vocab.width if isinstance(one, VocabParallelEmbedding) and not one.tied else 0,
                "fp8": in_8_bits(one, module, device),
                "shared": shared and not any(_is_packed(parameter, dtype, device) for parameter in parameters),
            }
            | (_of_experts(one, dtype, device) if isinstance(one, StackedLinear) else {})
        )
    return found


def in_8_bits(one: nn.Module, layer: nn.Module, device: torch.device) -> bool:
    """Whether Hopper's tensor cores multiply it so, for large M (kernels/quantized/e4m3_wgmma.py and
    kernels/moe/moe.py): all of a linear, and all experts of the layer."""
    held: list[tuple[object, Shard]] = []
    if isinstance(one, StackedLinear):
        held = [(stack.stored, stack.inputs) for stack in layer.modules() if isinstance(stack, StackedLinear)]
    elif isinstance(one, Linear):
        held = [(part, one.inputs) for part in one.parts]
    return device.type == "cuda" and bool(held) and all(_shares_scales(*both) for both in held)


def _shares_scales(form: object, inputs: Shard) -> bool:
    """Whether it is e4m3 of which 128 inputs or more share a scale."""
    if isinstance(form, fp8.Part | fp8.ExpertStack):
        return cuda_layouts.takes_wide(inputs.width, form.scheme.unit(inputs))
    part = form.part if isinstance(form, StackOfParts) else form
    is_e4m3 = isinstance(part, InSituPart) and part.codec is e4m3
    return is_e4m3 and cuda_layouts.takes_wide(inputs.width, e4m3.unit_of(inputs.width))


def _of_experts(one: StackedLinear, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    copies = one.experts.width
    host, slot = one.host_bytes(dtype, device) // copies, one.slot_bytes(dtype, device)
    return {"expert": True, "copies": copies, "host": host, "slot": slot}


def _is_packed(weight: nn.Parameter, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `pack` (kernels/gemm/linear.py) keeps it in a form of its own, on a machine such as this one."""
    large = dtype == torch.float32 and weight.numel() >= PACK_FROM
    return large and device.type == "cpu" and torch.backends.mkldnn.is_available() and not any(compiler.compilers())


@runtime_checkable
class Mixer(Protocol):
    """A module that makes more of a token than its linears do."""

    @property
    def inner(self) -> int:
        """Elements of a token between its linears, on this rank."""


def widest(layer: nn.Module) -> int:
    """Elements of a token between two linears of a sublayer: what the one makes and what the row-parallel one takes; of
    experts those of all that it visits."""
    linears = [one for one in layer.modules() if isinstance(one, Linear)]
    pairs = ((a, b) for a, b in itertools.pairwise(linears) if isinstance(b, RowParallel))
    plain = (sum(output.width for output in a.outputs) + b.inputs.width for a, b in pairs)
    experts = (3 * one.down_proj.inputs.width * one.top_k for one in layer.modules() if isinstance(one, FusedExperts))
    others = (one.inner for one in layer.modules() if isinstance(one, Mixer))
    return max((*plain, *experts, *others), default=0)


def visited(module: nn.Module) -> int:
    """Experts that a token visits in this layer; 0 of what has none."""
    return module.top_k if isinstance(module, FusedExperts) else 0


def scores(layer: nn.Module) -> int:
    """Multiply-adds of a token's queries on this rank with one token of the context, and of its weights with values."""
    heads = (2 * one.heads.queries * one.heads.dim for one in layer.modules() if isinstance(one, QKVParallel))
    return sum(heads) + sum(one.scores for one in layer.modules() if isinstance(one, LatentAttention))


def main(question: str) -> int:
    try:
        print(json.dumps(measure(json.loads(question))))
    except FatalError as stop:
        print(stop, file=sys.stderr)
        return stop.code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
