"""Some modules of a checkpoint's model, which are loaded as a model of one stage."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ....comm.mesh import Mesh
from .. import architectures, base
from ..config import Config
from ..formats import ChooseFormat, dense
from ..layers.embedding import VocabParallelEmbedding
from ..layers.rope import RotaryEmbeddings
from ..load import Classes


class Decoder(nn.Module):
    """A decoder without any module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.embed_tokens: nn.Module | None = None
        self.norm: nn.Module | None = None


class Part(base.Model):
    """A model without any module, to which a subclass adds some; ranks that are to have none load it as it is."""

    def __init__(
        self,
        args: Any,
        mesh: Mesh,
        max_model_len: int,
        names: Collection[str] = (),
        format_of: ChooseFormat = dense,
        table_of: ChooseFormat = dense,
    ):
        nn.Module.__init__(self)
        self.hidden_size, self.vocab_size, self.max_model_len = args.hidden_size, args.vocab_size, max_model_len
        self.tied, self.tensor = False, mesh.tensor
        self.vision = None
        self.lm_head = None
        self.rope = RotaryEmbeddings([], args.head_dim, args.max_position_embeddings, max_model_len)
        self.model: Any = Decoder()
        self.make(args, mesh, names)
        self._build(names, format_of, table_of)

    def make(self, args: Any, mesh: Mesh, names: Collection[str]) -> None:
        """Add the modules. names: of the checkpoint's tensors."""


class Table(Part):
    """The embedding, next to the class of the model that has it."""

    def make(self, args: Any, mesh: Mesh, names: Collection[str]) -> None:
        self.model.embed_tokens = VocabParallelEmbedding(args.vocab_size, args.hidden_size, mesh, args.embed_scale)


def choose_table(config: Config, tensors: Collection[str]) -> Classes:
    module = architectures.find(config.model_type)
    return Classes(module.Args, type("Table", (Table, module.Model), {}))


def emptied(classes: Classes) -> Classes:
    """The classes of a model without modules that reads the same files under the same names."""
    return Classes(classes.args, type("Empty", (classes.model,), {"__init__": Part.__init__, "make": Part.make}))
