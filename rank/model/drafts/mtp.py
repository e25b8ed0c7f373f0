"""Heads for multi-token prediction (DeepSeek-AI 2024, arXiv 2412.19437, section 2.2) that checkpoints ship.

A head is one more decoder layer of the model's own kind. It reads, at each position, the model's hidden state behind
the final norm and the embedding of the token that follows: each normed, side by side, through a linear. A norm of its
own and the model's head make logits of the token after that one. Its own output behind that norm stands for the model's
hidden state where it goes on to a further token. Embedding and head are the model's, also where a checkpoint has copies
of them; and of several heads, each for a token further on, the first proposes all.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ....comm.mesh import Mesh
from ....errors import USAGE, FatalError
from .. import architectures, base
from ..batch import Batch
from ..config import Config
from ..layers.hyper_connections import HyperHead, HyperStream
from ..layers.linear import ColumnParallel
from ..layers.rope import RotaryEmbeddings
from ..load import Classes
from ..shard import whole
from . import MOST
from .part import Part


class Names(NamedTuple):
    """The names of a head's modules in a checkpoint."""

    embedding_norm: str
    hidden_norm: str
    projection: str
    layer: str
    norm: str
    hidden_first: bool = False  # the linear reads the hidden state before the embedding


def spellings(layers: int) -> list[Names]:
    """Names that checkpoints of a model with so many layers may have: Qwen's, DeepSeek's and GLM's, MiMo's, Ling's,
    Step's, DeepSeek-V4's."""
    behind, mimo = f"model.layers.{layers}", "model.mtp_layers.0"
    return [
        Names("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.layers.0", "mtp.norm"),
        Names(f"{behind}.enorm", f"{behind}.hnorm", f"{behind}.eh_proj", behind, f"{behind}.shared_head.norm"),
        Names(
            f"{mimo}.token_layernorm", f"{mimo}.hidden_layernorm", f"{mimo}.input_proj", mimo,
            f"{mimo}.final_layernorm", hidden_first=True,
        ),
        Names(f"{behind}.enorm", f"{behind}.hnorm", f"{behind}.eh_proj", behind, f"{behind}.final_layernorm"),
        Names(
            f"{behind}.enorm", f"{behind}.hnorm", f"{behind}.eh_proj", behind, f"{behind}.transformer.shared_head.norm"
        ),
        Names("mtp.0.enorm", "mtp.0.hnorm", "mtp.0.e_proj", "mtp.0", "mtp.0.norm"),
    ]  # fmt: skip


def find_names(config: Config, tensors: Collection[str]) -> Names | None:
    """The names of the head among a checkpoint's tensors; None: it ships none. Without tensors, as for dummy weights,
    config.json decides."""
    model = architectures.find(config.model_type).Model
    if not model.DRAFTS:
        return None
    qwens, deepseeks, *_, of_streams = known = spellings(config.num_layers)
    if not tensors:
        usual = of_streams if issubclass(model.STREAM, HyperStream) else deepseeks
        of_qwen = config.raw.get("mtp_num_hidden_layers")
        return qwens if of_qwen else usual if config.raw.get("num_nextn_predict_layers") else None
    modules = {name.rpartition(".")[0] for name in tensors}
    known = [one for one in known if one.projection in modules]
    own = next((one for one in known if one.norm in modules), None)
    if own is None and known:  # GGUF files may leave the norm out
        own = known[0]._replace(norm="model.norm")
    return own


class Head(Part):
    """The first of a checkpoint's heads, next to a class of `base.Model` from which it has names and layers."""

    FOLLOWS: ClassVar[bool] = True
    NAMES: ClassVar[Names]
    most = MOST
    vocabulary: Tensor | None = None

    def make(self, args: Any, mesh: Mesh, names: Collection[str]) -> None:
        norm, rope = self.DECODER.final_norm, args.rope(args.draft_layer)
        ropes = [args.rope(index) for index in range(args.num_hidden_layers)]
        self.rope_of = ropes.index(rope) if rope in ropes else 0
        if rope not in ropes:
            self.rope = RotaryEmbeddings([rope], args.head_dim, args.max_position_embeddings, self.max_model_len)
        self.embedding_norm, self.hidden_norm = norm(args), norm(args)
        self.make_projection(args.hidden_size)
        self.model.layers["0"] = self.LAYER(args, mesh, args.draft_layer, 0)
        self.model.norm = norm(args)

    def make_projection(self, hidden: int) -> None:
        self.projection = ColumnParallel(whole(2 * hidden), (whole(hidden),), bias=False)

    def paths(self) -> dict[str, str]:
        """The paths of modules here and in checkpoints."""
        names = self.NAMES
        return {
            "embedding_norm": names.embedding_norm, "hidden_norm": names.hidden_norm, "projection": names.projection,
            "model.layers.0": names.layer, "model.norm": names.norm,
        }  # fmt: skip

    def stored_path(self, path: str) -> str:
        ours = self.paths()
        found = next((one for one in ours if path == one or path.startswith(f"{one}.")), None)
        return path if found is None else ours[found] + path.removeprefix(found)

    def join(self, target: base.Model) -> None:
        """Compute with the head of this model from now on, and with its embedding and rotary tables unless there are
        own ones."""
        embedding, head = self.model.embed_tokens or target.model.embed_tokens, target.lm_head
        assert embedding is not None and head is not None
        self._embed, self._normed, self._whole_head = embedding.forward, target.normed, head.forward
        self._rope = (self.rope if self.rope.kinds else target.rope).forward

    def read(self, hidden: Tensor) -> Tensor:
        return self._normed(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._whole_head(hidden)

    def forward(self, batch: Batch, before: Tensor | None) -> Tensor:  # type: ignore[override]
        assert before is not None
        halves = [self.embedding_norm(self._embed(batch.ids)), self.hidden_norm(before)]
        if self.NAMES.hidden_first:
            halves.reverse()
        return self.model.norm(self.run(self.projection(torch.cat(halves, 1)), batch))

    def run(self, projected: Tensor, batch: Batch) -> Tensor:
        """The residual stream behind the head's layer."""
        stream = self.STREAM(projected)
        for _ in self.model.layers["0"](stream, self._rope(batch.positions)[self.rope_of], batch):
            pass
        return stream.read()


class StreamsHead(Head):
    """The head of a model with hyper-connections, DeepSeek-V4's: it reads all streams before they become one, goes on
    from its own, and has a projection for the embedding, one for each stream, and a sum of streams of its own."""

    def make(self, args: Any, mesh: Mesh, names: Collection[str]) -> None:
        super().make(args, mesh, names)
        self.model.hc_head = HyperHead(args.hyper_sizes)

    def make_projection(self, hidden: int) -> None:
        self.projection = ColumnParallel(whole(hidden), (whole(hidden),), bias=False)
        self.streams_projection = ColumnParallel(whole(hidden), (whole(hidden),), bias=False)

    def paths(self) -> dict[str, str]:
        layer = self.NAMES.layer
        more = {"streams_projection": f"{layer}.h_proj", "model.hc_head": f"{layer}.hc_head"}
        return super().paths() | more

    def read(self, hidden: Tensor) -> Tensor:
        return hidden

    def forward(self, batch: Batch, before: Tensor | None) -> Tensor:  # type: ignore[override]
        assert before is not None
        streams = self.hidden_norm(before.reshape(-1, self.hidden_size))
        projected = self.streams_projection(streams).view(len(before), -1, self.hidden_size)
        embedded = self.projection(self.embedding_norm(self._embed(batch.ids)))
        return self.run((projected + embedded[:, None]).flatten(1), batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._whole_head(self.model.norm(self.model.hc_head(hidden)))


def choose(config: Config, tensors: Collection[str]) -> Classes:
    """The classes of the head of a checkpoint with these tensors. Raises FatalError where it ships none."""
    found = find_names(config, tensors)
    if found is None:
        raise FatalError(
            f"--speculate mtp: {config.path} has no tensors of a head for multi-token prediction: choose ngram, or "
            "--draft-model with a model that drafts",
            USAGE,
        )
    module = architectures.find(config.model_type)
    head = StreamsHead if issubclass(module.Model.STREAM, HyperStream) else Head
    return Classes(module.Args, type("Head", (head, module.Model), {"NAMES": found}))
