"""`phalanx fit`: what a model needs on a cluster and how fast it would be, before there is an allocation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Annotated

import msgspec

from .... import errors, linux_calls
from ....logs import say
from ....rank.options import IN_SITU, ISQ_SPELLINGS, KV_DTYPES, degrees, flag
from ....rank.protocol import MAX_DRAFTS
from ...job import binding
from ...options import option_sources, resolve
from ...options.help import shown
from . import devices, directory, headers, measured, plan, report
from .devices import DEVICES, Device
from .measured import Question
from .memory import Workload
from .shape import ModelShape

HELP = "what a model needs on a cluster and how fast it would be, before the allocation"
USAGE = """phalanx fit [DIR] [options]: what fits and how fast, from config.json and tensor headers alone

  phalanx fit DIR --nodes 2 --gpus 8 --gpu-mem 141 --context 32768 --concurrency 256
  phalanx fit DIR --device cpu --gpus 4
"""
_GROUP = "Fit"
LONGEST = 8192  # tokens, of the context when none is given
ZIPF = 0.8  # as benchmarks/offload.py is used; no real text has been compared
_DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_NAMES = {name.lower(): name for name in DEVICES}


class FitOptions(msgspec.Struct, frozen=True, kw_only=True):
    model: Annotated[
        str,
        flag("--model", "--w", "--weight-path", "--m", group=_GROUP, metavar="DIR", positional=True,
             help="directory, GGUF file, or hub id; none: the built-in model"),
    ] = ""  # fmt: skip
    weight_file: Annotated[
        str, flag("--f", "--weight-file", group=_GROUP, metavar="FILE",
                  help="a GGUF file, its first shard; in --model's directory or fetched"),
    ] = ""  # fmt: skip
    mmproj: Annotated[
        str, flag("--mmproj", group=_GROUP, metavar="FILE", help="the GGUF file with the tower of a GGUF model")
    ] = ""
    nodes: Annotated[int, flag("--nodes", "-N", group=_GROUP, metavar="N", low=1, help="hosts")] = 1
    gpus: Annotated[int, flag("--gpus", group=_GROUP, metavar="N", low=1, help="GPUs, or CPU ranks, of each host")] = 1
    gpu_mem: Annotated[
        float,
        flag("--gpu-mem", group=_GROUP, metavar="GB", low=0,
             help="memory of one by its data sheet: 141 for an H200; on CPUs that of one rank"),
    ] = 0.0  # fmt: skip
    device: Annotated[
        str,
        flag("--device", group=_GROUP, choices=("auto", "cpu", *DEVICES), spellings=_NAMES,
             help="auto: what is sold with --gpu-mem"),
    ] = "auto"  # fmt: skip
    network: Annotated[
        float, flag("--network", group=_GROUP, metavar="GB/s", low=0.01, help="of a host to the others")
    ] = 50.0
    host_mem: Annotated[
        float, flag("--host-mem", group=_GROUP, metavar="GB", low=0, help="of a host, for experts; 0: unknown")
    ] = 0.0
    cpu_offload_gb: Annotated[
        float,
        flag("--cpu-offload-gb", group=_GROUP, metavar="GiB", low=0, help="a rank's tables and layers in host memory"),
    ] = 0.0
    context: Annotated[
        int, flag("--context", "--max-model-len", group=_GROUP, metavar="N", low=0,
                  help="longest prompt + output; 0: the model's, at most 8192"),
    ] = 0  # fmt: skip
    concurrency: Annotated[
        int, flag("--concurrency", "--max-num-seqs", group=_GROUP, metavar="N", low=1, help="sequences at once")
    ] = 64
    length: Annotated[
        int, flag("--length", group=_GROUP, metavar="N", low=0,
                  help="tokens of an average sequence, for the speeds; 0: half of --context"),
    ] = 0  # fmt: skip
    images: Annotated[
        int, flag("--images", group=_GROUP, metavar="N", low=0,
                  help="images of 1024 x 1024 pixels in each sequence, for memory and speeds"),
    ] = 0  # fmt: skip
    dtype: Annotated[
        str, flag("--dtype", group=_GROUP, choices=("auto", "bf16", "f16", "f32"), spellings=_DTYPES,
                  help="of weights and arithmetic; auto: the checkpoint's, f32 on CPUs"),
    ] = "auto"  # fmt: skip
    isq: Annotated[
        str, flag("--isq", group=_GROUP, choices=("none", *IN_SITU), spellings=ISQ_SPELLINGS,
                  help="quantise the weights while they are loaded"),
    ] = "none"  # fmt: skip
    kv_cache_dtype: Annotated[
        str, flag("--kv-cache-dtype", "--kvcache-dtype", group=_GROUP, choices=("auto", "fp8"), spellings=KV_DTYPES,
                  short={"--fp8-kvcache": "fp8"}, help="fp8: e4m3 with scales, twice the tokens; auto: --dtype"),
    ] = "auto"  # fmt: skip
    kv_fraction: Annotated[
        float, flag("--kv-fraction", "--gpu-memory-utilization", group=_GROUP, metavar="X", low=0, high=1,
                    help="KV cache's share of the memory free after loading; 0: automatic"),
    ] = 0.0  # fmt: skip
    speculate: Annotated[
        str, flag("--speculate", group=_GROUP, choices=("auto", "none", "ngram", "mtp", "eagle3", "draft"),
                  help="what guesses tokens, for memory alone; auto: --draft-model"),
    ] = "auto"  # fmt: skip
    draft_model: Annotated[
        str, flag("--draft-model", group=_GROUP, metavar="DIR", help="an EAGLE-3 head, or a smaller model")
    ] = ""
    draft_tensor_parallel_size: Annotated[
        int, flag("--draft-tensor-parallel-size", group=_GROUP, metavar="N", low=0,
                  help="ranks that a smaller model is split over, 1; 0: the target's"),
    ] = 0  # fmt: skip
    num_speculative_tokens: Annotated[
        int, flag("--num-speculative-tokens", group=_GROUP, metavar="N", low=0, high=MAX_DRAFTS,
                  help="most guessed tokens of a sequence in a step; 0: automatic"),
    ] = 0  # fmt: skip
    tp: Annotated[int, flag("--tp", group=_GROUP, metavar="N", low=0, help="only this tensor degree")] = 0
    pp: Annotated[int, flag("--pp", group=_GROUP, metavar="N", low=0, help="only this many pipeline stages")] = 0
    dp: Annotated[int, flag("--dp", group=_GROUP, metavar="N", low=0, help="only this many replicas")] = 0
    ep: Annotated[
        int, flag("--ep", group=_GROUP, metavar="N", low=0, help="only this expert degree; 1: each expert is split")
    ] = 0
    offload: Annotated[
        int, flag("--offload", "--num-experts-offload-per-rank", group=_GROUP, metavar="N", low=0,
                  help="experts of a layer on each rank in host memory alone; 0: as few as fit"),
    ] = 0  # fmt: skip
    zipf: Annotated[
        float, flag("--zipf", group=_GROUP, metavar="S", low=0, high=4,
                    help="skew of what chooses experts in host memory, the exponent of Zipf's law; 0: evenly"),
    ] = ZIPF  # fmt: skip
    json: Annotated[bool, flag("--json", group=_GROUP, off=("--no-json",), help="print JSON")] = False


def main(argv: Sequence[str]) -> int:
    chosen = option_sources.read(FitOptions, argv, os.environ)
    if shown(chosen, USAGE):
        return 0
    for note in chosen.notes:
        say(note)
    options = chosen.options
    found = directory.find(options.model, options.weight_file)
    device = _device(options)
    cluster = plan.Cluster(options.nodes, options.gpus, device, options.network * 1e9, options.host_mem * devices.GIB)
    kind = "cpu" if device.cpu else "cuda"
    question = Question(
        model=str(found.path), device=kind, dtype=options.dtype, tp=options.tp, pp=options.pp, isq=options.isq,
        kv_cache_dtype=options.kv_cache_dtype, most=cluster.per_node,
        mmproj=resolve.mmproj_file(options.mmproj, str(found.path)), context=options.context or LONGEST,
        speculate=options.speculate, num_speculative_tokens=options.num_speculative_tokens,
        draft_model=str(directory.find(options.draft_model).path) if options.draft_model else "",
        draft_tensor_parallel_size=options.draft_tensor_parallel_size,
    )  # fmt: skip
    shape = measured.read(question, found.name)
    asked = _asked(options, shape)
    checkpoint = headers.compare(shape, headers.by_class(found.path))
    possible = plan.layouts(shape, cluster, options.tp, options.pp, options.dp, options.ep)
    figures = plan.estimates(shape, possible, cluster, asked, options.offload)
    if not figures:
        raise errors.FatalError(_no_layout(options, shape, cluster), errors.USAGE)
    best = plan.best(figures)
    given = options.dtype, options.mmproj
    run = [] if best is None else plan.command(found.served_as, best, cluster, asked, *given)
    smallest = plan.fewest(shape, cluster, asked)
    answer = plan.Answer(shape, cluster, asked, checkpoint, figures, best, smallest, run)
    print(json.dumps(report.as_json(answer), indent=1) if options.json else "\n".join(report.text(answer)))
    return errors.OK if best is not None else errors.MEMORY


def _asked(options: FitOptions, shape: ModelShape) -> Workload:
    if options.context > shape.max_positions:
        raise errors.FatalError(
            f"--context {options.context}: the model takes at most {shape.max_positions} tokens", errors.USAGE
        )
    context = options.context or min(shape.max_positions, LONGEST)
    shown = _shown(options.images, shape, context)
    return Workload(
        context=context,
        concurrency=options.concurrency,
        length=max(min(context, options.length) or max(1, context // 2), shown),
        dtype=shape.usual_dtype if options.dtype == "auto" else options.dtype,
        isq=options.isq,
        kv_fraction=options.kv_fraction,
        kv_cache_dtype=options.kv_cache_dtype,
        cpu_offload=int(options.cpu_offload_gb * devices.GIB),
        images=options.images,
        speculate=options.speculate,
        draft_model=options.draft_model,
        draft_tensor_parallel_size=options.draft_tensor_parallel_size,
        num_speculative_tokens=options.num_speculative_tokens,
        zipf=options.zipf,
    )


def _shown(images: int, shape: ModelShape, context: int) -> int:
    """Tokens of so many images, which a sequence has at least."""
    if not images:
        return 0
    if shape.images is None:
        why = "takes text alone, as each model does that another one or a head drafts for"
        raise errors.FatalError(f"--images {images}: {shape.name} {why}", errors.USAGE)
    one = shape.images.usual
    if (tokens := images * one.tokens) > context:
        raise errors.FatalError(
            f"--images {images}: images of {one.width} x {one.height} pixels are {one.tokens} tokens each, {tokens} "
            f"together: more than the {context} of --context",
            errors.USAGE,
        )
    return tokens


def _device(options: FitOptions) -> Device:
    if options.device == "cpu":
        return _cpu(options)
    name = options.device if options.device != "auto" else devices.SOLD.get(round(options.gpu_mem), "")
    if not name:
        known = ", ".join(f"{gigabytes} ({name})" for gigabytes, name in sorted(devices.SOLD.items()))
        given = f"--gpu-mem {options.gpu_mem:g} is no size that is known" if options.gpu_mem else "which GPU?"
        raise errors.FatalError(
            f"{given}: give --gpu-mem as one of {known}, or --device {'|'.join(DEVICES)}, or --device cpu", errors.USAGE
        )
    host = devices.host(devices.saved_speed(os.environ), options.gpus)
    device = msgspec.structs.replace(DEVICES[name], host=host)
    if options.device != "auto" and options.gpu_mem:
        memory = (options.gpu_mem - devices.HIDDEN) * devices.GIB
        device = msgspec.structs.replace(device, memory=memory)
    return device


def _cpu(options: FitOptions) -> Device:
    """A rank on CPUs: as fast as `doctor` found this host to be, else as cores usually are."""
    speed = devices.saved_speed(os.environ)
    source = devices.measured(speed) if speed else ""
    if speed is None:
        cores = len(binding.by_core(sorted(linux_calls.processors())))  # hyperthreads compute no faster
        speed = devices.typical(cores)
        source = f"typical of {cores} cores; `phalanx doctor` measures this machine's"
    memory = options.gpu_mem * devices.GIB or linux_calls.host_memory()[1] / options.gpus
    return devices.cpu(speed, options.gpus, memory, source)


def _no_layout(options: FitOptions, shape: ModelShape, cluster: plan.Cluster) -> str:
    try:
        degrees(cluster.ranks, options.tp, options.pp, options.dp)
    except ValueError as error:
        return str(error)  # as serving says it
    allowed = ", ".join(map(str, shape.degrees))
    if options.ep > 1 and shape.experts == 1:
        return f"--ep {options.ep}: {shape.name} has no experts"
    if options.ep > shape.experts:
        return f"--ep {options.ep} is more than the {shape.experts} experts of {shape.name}"
    if options.offload and (shape.experts == 1 or cluster.device.cpu):
        reason = f"{shape.name} has no experts" if shape.experts == 1 else "CPUs have all experts in host memory"
        return f"--offload {options.offload}: {reason}"
    if options.offload and plan.layouts(shape, cluster, options.tp, options.pp, options.dp, options.ep):
        return f"--offload {options.offload}: experts that span replicas cannot be in host memory"
    given = {"tp": options.tp, "pp": options.pp, "dp": options.dp, "ep": options.ep}
    asked = "".join(f" --{name} {value}" for name, value in given.items() if value)
    return (
        f"{cluster.ranks} ranks cannot share {shape.name}{' with' + asked if asked else ''}: tensor degrees that its "
        f"heads allow are {allowed}, pipeline stages at most {len(shape.stages)}, and all together must divide "
        "the ranks" + ("; --ep divides --tp" if options.ep else "")
    )
