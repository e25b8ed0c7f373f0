"""Quantised weights, served by MPI's ranks: tokens and log-probabilities are what transformers makes of the dequantised
weights in f32.

As in test_served.py, prompts are computed in chunks, sequences are preempted, and a prompt is continued from the prefix
cache.
"""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from phalanx.kernels.quantized.ggml import CODECS
from phalanx.rank.options import JOB_ENV, Job, Options, encode_job

from .. import gguf_files
from ..engine import device
from ..ranks import run_ranks
from .model.experts import test_quantised
from .model.stored_formats import packers, test_stored
from .model.test_architectures import write
from .model.test_gguf import SINKS, SIZES, SUPER
from .reference import Reference
from .test_served import FEWER, FULL, LENGTH, OF_ALL, OF_PROBES, OPTIONS, Expected, check_answers, requests

TIMEOUT = 600  # seconds of a job, on a machine that others use too
VOCABULARY = dict(vocab_size=512)  # of the prompts
TYPES = [*CODECS, "MXFP4"]
STORED = (
    "gptq", "gptq of 8 bits", "gptq, asymmetric", "gptq with desc_act", "awq", "marlin", "fp8", "floats in channels",
    "w4a16", "w8a16", "int8",
)  # fmt: skip
EXPERTS = "gptq", "awq", "w4a16"
IN_SITU = "q8_0", "q4_0"  # of which gguf-py has codes of its own

pytestmark = [pytest.mark.long, pytest.mark.timeout(TIMEOUT + 60)]


def stored(name, folder):
    """A checkpoint of another packer, and a plain one of the dequantised weights."""
    (pack, settings), sizes = test_stored.CASES[name]
    packers.quantise(write(folder / "source", **test_stored.COMMON | sizes | VOCABULARY), folder, pack, settings)
    return folder / "quantised", folder / "plain"


def stored_experts(name, folder):
    pack, settings = test_quantised.STORED[name]
    settings = settings | {"modules_to_not_convert": ["gate", "lm_head"]}
    source = write(folder / "source", **test_quantised.MODEL_OF | VOCABULARY)
    packers.quantise(source, folder, pack, settings, (test_quantised.ROUTER,))
    return folder / "quantised", folder / "plain"


def in_a_file(sizes, kind_of, folder):
    """A GGUF file by gguf-py."""
    source = write(folder / "source", **sizes | VOCABULARY)
    return gguf_files.write(source, folder / "x.gguf", kind_of), gguf_files.dequantised(
        source, folder / "same", kind_of
    )


def in_turn():
    """A type for each tensor, the same for a name that comes again: a layer has several."""
    left = iter(TYPES * 9)
    return functools.cache(lambda name: next(left))


MAKERS = {
    **{name: functools.partial(stored, name) for name in STORED},
    **{f"experts: {name}": functools.partial(stored_experts, name) for name in EXPERTS},
    "GGUF": functools.partial(in_a_file, dict(model_type="llama", num_hidden_layers=4) | SIZES | SUPER, in_turn()),
    "experts: GGUF": functools.partial(
        in_a_file, test_quantised.MODEL_OF, test_quantised.KINDS["super-blocks"]
    ),
    "experts: MXFP4": functools.partial(
        in_a_file, dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2) | SINKS,
        lambda name: "MXFP4" if name.endswith("_exps.weight") else "F32",
    ),
}  # fmt: skip


LAYOUTS = OF_ALL | OF_PROBES
LONGEST = "q8_0"  # in several layouts and for as many tokens as plain weights
CASES = [*((name, "tp2") for name in (*MAKERS, *IN_SITU)), *((LONGEST, layout) for layout in ("tp1", "pp2"))]


def asked_of(name):
    return FULL if name == LONGEST else FEWER


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name → what is served, and the reference's model."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("format")
        if name in IN_SITU:
            path = write(folder, model_type="llama", **test_stored.COMMON | VOCABULARY)
            return path, Expected(Reference(path, name).logits)
        path, plain = MAKERS[name](folder)
        return path, Expected.of(plain, {})

    return make


@pytest.fixture(scope="module")
def answers(made, tmp_path_factory):
    """(name, layout) → what the ranks answer: of a layout one job for all formats that checkpoints have, and one for
    each of --isq."""

    @functools.cache
    def serve(isq, layout):
        names = MAKERS if isq == "none" else [isq]
        tp, pp = LAYOUTS[layout].tp, LAYOUTS[layout].pp
        ranks = tp * pp
        options = Options(ranks=ranks, tp=tp, pp=pp, device=device(ranks), isq=isq, **OPTIONS)
        environ = {
            "MODELS": ":".join(str(made(name)[0]) for name in names),
            "REQUESTS": requests(tmp_path_factory, [asked_of(name) for name in names]),
            "ANSWERS": f"{layout}.json",
            JOB_ENV: encode_job(Job(options=options, announced_size=ranks)),
        }
        return run_ranks(ranks, Path(__file__).with_name("serving.py"), timeout=TIMEOUT, **environ)

    def read(name, layout):
        done, path = serve(name if name in IN_SITU else "none", layout), made(name)[0]
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(**json.loads(((path if path.is_dir() else path.parent) / f"{layout}.json").read_text()))

    return read


@pytest.mark.parametrize("name, layout", CASES)
def test_served(made, answers, name, layout):
    found, want = answers(name, layout), made(name)[1]
    assert max(len(set(tokens)) for tokens in found.tokens) >= 8  # the text would not show an error
    assert found.chunks > 0 and found.preemptions > 0 and found.cached >= LENGTH
    check_answers(f"{name}, {layout}", want, found, asked_of(name))
