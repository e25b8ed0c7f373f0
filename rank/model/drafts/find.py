"""Finds and loads the draft model that options ask for, or that the model's checkpoint ships."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import torch

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from ..base import Model
from ..config import read_config
from ..load import ChooseClasses, load
from . import DraftSource, eagle3, language_model, mtp, part

log = logging.getLogger(__name__)
Progress = Callable[[int, int], None]
# The draft models, for the log.
LOG_TEXTS = {
    "mtp": "the checkpoint's head for multi-token prediction", "eagle3": "the EAGLE-3 head in {}",
    "draft": "the model in {}",
}  # fmt: skip
CHOOSE = {"mtp": mtp.choose, "eagle3": eagle3.choose, "draft": language_model.choose}


def is_eagle3(path: str | Path) -> bool:
    """Whether a model directory has an EAGLE-3 head."""
    return any("eagle3" in str(one).lower() for one in read_config(path).raw.get("architectures") or ())


class Wanted(NamedTuple):
    """The options by which a draft model is found."""

    speculate: str  # auto, or the kind
    draft_model: str  # a directory; empty: none
    dtype: str = "auto"
    load_format: str = "auto"
    way: str = "auto"
    isq: str = "none"
    quantization: str = "auto"
    tensor_size: int = 0  # ranks that a smaller model is split over, 1; 0: as many as the target


def kind_of(wanted: Wanted, device: torch.device) -> str:
    """mtp, eagle3 or draft; empty: no draft model. A head that no option asks for is left alone: drafting costs
    where it does not pay. Raises FatalError where options contradict one another."""
    kind, draft = wanted.speculate, wanted.draft_model
    if kind in ("none", "ngram", "mtp") and draft:
        raise FatalError(f"--speculate {kind} takes no --draft-model: leave one of them out", USAGE)
    if kind in ("eagle3", "draft") and not draft:
        raise FatalError(f"--speculate {kind} needs --draft-model with the directory of a model that drafts", USAGE)
    if device.type == "mps" and (draft or kind in ("mtp", "eagle3", "draft")):
        asked = "--draft-model" if draft else f"--speculate {kind}"
        raise FatalError(f"{asked}: models do not draft on --device mps: leave it out, or use --speculate ngram", USAGE)
    if draft and kind == "auto":
        return "eagle3" if is_eagle3(draft) else "draft"
    return "" if kind in ("auto", "none", "ngram") else kind


def check_tensor_size(kind: str, size: int, tp: int) -> None:
    """Raises FatalError where a draft model of this kind is not split over so many ranks."""
    if size in (0, tp) or (size == 1 and kind == "draft"):
        return
    raise FatalError(
        f"--draft-tensor-parallel-size {size}: a smaller model is split over 1 or all {tp} ranks of the tensor group, "
        "a head over all of them: leave it out",
        USAGE,
    )


def find(
    wanted: Wanted, path: Path, target: Model, mesh: Mesh, device: torch.device, room: int | None = None,
    progress: Progress = lambda done, total: None,
) -> DraftSource | None:  # fmt: skip
    """The draft model of a target that is loaded from `path`; None: there is none, or other stages have it. Collective
    over the mesh's world. room: bytes of the device that it may take; None: unlimited. Raises FatalError."""
    kind = kind_of(wanted, device)
    check_tensor_size(kind, wanted.tensor_size, mesh.tensor.size)
    if not kind:
        return None
    place = mesh.of_one_rank if wanted.tensor_size == 1 else mesh.of_one_stage
    draft = path if kind == "mtp" else Path(wanted.draft_model)
    config = read_config(draft)
    if kind == "draft" and mesh.world.rank == 0:
        language_model.check_tokenizers(path, draft)

    def read(source: Path, choose: ChooseClasses, left: int | None) -> Model:
        """On the last stage; elsewhere a model without modules."""
        isq = wanted.isq if source == path or not read_config(source).quantization else "none"
        of = place, device, wanted.dtype, target.max_model_len, wanted.load_format, wanted.way, progress
        return load(
            source, *of, left, None, isq, wanted.quantization if source == path else "auto", images=False,
            draft=choose if mesh.last else lambda *names: part.emptied(choose(*names)),
        )  # fmt: skip

    model, used = read(draft, CHOOSE[kind], room), 0
    lacks = mesh.last and kind != "draft" and model.model.embed_tokens is target.model.embed_tokens is None
    if int(mesh.world.all_reduce(torch.tensor([int(lacks)]))):  # the first stage has it
        table = read(path, part.choose_table, None if room is None else room - model.weight_bytes)
        model.model.embed_tokens, used = table.model.embed_tokens, table.weight_bytes
    if mesh.world.rank == 0:
        megabytes = (model.weight_bytes + used) / 1e6
        log.info("%s drafts tokens: %.0f MB on this rank", LOG_TEXTS[kind].format(draft), megabytes)
    if kind == "eagle3":
        target.aux_layers = eagle3.layers_read(config, read_config(path).num_layers)
    if not mesh.last:
        return None
    if isinstance(model, eagle3.Head | mtp.Head):
        model.join(target)
        return cast(DraftSource, model)
    return language_model.LanguageModel(model)
