"""The shape of a model directory, by the model's own code: a process with torch builds it without memory."""

from __future__ import annotations

import json
import os
import subprocess

import msgspec

from .... import child_python
from ....errors import FatalError
from ...job import secret_variables
from .shape import Images, ModelShape, RankShape

MEASURE = ("-m", "phalanx.rank.model.measure")


class Question(msgspec.Struct, frozen=True):
    """The question to `rank/model/measure.py`."""

    model: str  # the directory; config.json alone is read
    device: str  # cpu or cuda
    dtype: str  # auto, f32, bf16 or f16
    tp: int = 0  # asked for by the user; 0: not
    pp: int = 0
    isq: str = "none"  # the format that linears are quantised to
    kv_cache_dtype: str = "auto"
    mmproj: str = ""  # the file with the tower of a GGUF model
    most: int = 1  # ranks of the largest tensor group that is wanted
    context: int = 8192  # tokens of the longest sequence, which bound its images
    speculate: str = "auto"
    draft_model: str = ""  # a directory; empty: none
    draft_tensor_parallel_size: int = 0  # ranks that it is split over; 0: as many as the target
    num_speculative_tokens: int = 0  # 0: automatic


class Answer(msgspec.Struct, frozen=True):
    """The answer of `rank/model/measure.py`."""

    model_type: str
    hidden: int
    vocab: int
    max_positions: int
    usual_dtype: str
    parameters: int
    checkpoint_bytes: int
    chosen: int
    degrees: tuple[int, ...]
    stages: tuple[tuple[int, ...], ...]
    images: Images | None
    verified: int
    ranks: dict[int, RankShape]


def read(question: Question, name: str) -> ModelShape:
    """name: what the user knows the model by. Raises FatalError in the words of serving where it would be refused."""
    answer = msgspec.json.decode(ask(question), type=Answer)
    return ModelShape(name=name, **msgspec.structs.asdict(answer))


def ask(question: Question) -> bytes:
    """Its answer as JSON. The launcher itself never imports torch."""
    words = json.dumps(msgspec.structs.asdict(question))
    environ = secret_variables.without(os.environ)
    done = subprocess.run(child_python.command(*MEASURE, words), env=environ, capture_output=True)
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise FatalError(lines[-1] if lines else "building the model without memory failed", max(1, done.returncode))
    return done.stdout
