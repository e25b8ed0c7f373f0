"""The metadata of a GGUF file by keys, with complaints that name the file and the key."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ...errors import MODEL, FatalError
from .. import untrusted_files
from .header import Header, Tensor

MAX_LAYERS: Final = 1 << 10  # no model comes near
# Keys whose lists have zeros for layers without attention, or without an MLP.
OF_SOME_LAYERS: Final = "attention.head_count_kv", "feed_forward_length"


class Metadata:
    """Keys without `general.` in front are the architecture's own: `block_count` is `llama.block_count`."""

    def __init__(self, shards: list[Header]):
        """shards: all files of the model; the first one has the metadata."""
        self.file: Path = shards[0].file
        self.values: dict[str, Any] = shards[0].metadata
        self._shards = shards
        self.architecture: str = self._of("general.architecture", str)
        if self.integer("block_count", 0) > MAX_LAYERS:
            raise FatalError(f"{self.file}: its block_count is more than the {MAX_LAYERS} that it may be", MODEL)

    def integer(self, key: str, default: int | None = None) -> int:
        """Numbers that files list for each layer have to be equal, but for the zeros of OF_SOME_LAYERS."""
        value = self.values.get(f"{self.architecture}.{key}")
        if isinstance(value, list) and value:
            some = [one for one in value if one != 0 or key not in OF_SOME_LAYERS] or value
            value = some[0] if all(one == some[0] for one in some) else value
        return self._checked(f"{self.architecture}.{key}", default if value is None else value, int)

    def of_layers(self, key: str, kind: type, default: Any = None) -> list[Any]:
        """The values of all layers, at least one: a list, or one value for all."""
        value, layers = self.values.get(f"{self.architecture}.{key}", default), self.integer("block_count")
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers or not found:
            raise FatalError(f"{self.file}: the metadata's {key} has {len(found)} values for {layers} layers", MODEL)
        return [self._checked(f"{self.architecture}.{key}", one, kind) for one in found]

    def number(self, key: str, default: float | None = None) -> float:
        return self._own(key, (int, float), default)

    def text(self, key: str, default: str | None = None) -> str:
        return self._own(key, str, default)

    def flag(self, key: str, default: bool | None = None) -> bool:
        return self._own(key, bool, default)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.values

    def given(self, **keys: str) -> dict[str, Any]:
        """Keys of config.json with the values of these, as far as they are there."""
        own = {ours: f"{self.architecture}.{theirs}" for ours, theirs in keys.items()}
        return {ours: self.values[theirs] for ours, theirs in own.items() if theirs in self.values}

    def _own(self, key: str, kind: Any, default: Any) -> Any:
        return self._of(f"{self.architecture}.{key}", kind, default)

    def _of(self, key: str, kind: Any, default: Any = None) -> Any:
        return self._checked(key, self.values.get(key, default), kind)

    def _checked(self, key: str, value: Any, kind: Any) -> Any:
        if value is None:
            raise FatalError(f"{self.file} has no {key} in its metadata", MODEL)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FatalError(f"{self.file}: the metadata's {key} is {value!r}", MODEL)
        return value

    @property
    def num_tensors(self) -> int:
        return sum(len(one.tensors) for one in self._shards)

    def tensor(self, name: str) -> Tensor | None:
        return next((one.tensors[name] for one in self._shards if name in one.tensors), None)

    def matrices(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors that are no vectors, with their names."""
        for shard in self._shards:
            yield from ((name, tensor) for name, tensor in shard.tensors.items() if len(tensor.shape) > 1)

    def vector(self, name: str) -> list[float] | None:
        """The values of a small tensor of type F32, such as the factors of rope frequencies; None where there is none.

        They are needed to know the model, not to compute it.
        """
        for shard in self._shards:
            tensor = shard.tensors.get(name)
            if tensor is None:
                continue
            if tensor.type.name != "F32" or len(tensor.shape) > 1:
                raise FatalError(f"{shard.file}: {name} is no vector of F32", MODEL)
            try:
                with untrusted_files.open_weights(shard.file) as opened:
                    opened.seek(tensor.start)
                    data = opened.read(tensor.stop - tensor.start)
                return list(struct.unpack(f"<{tensor.shape[0]}f", data))
            except (OSError, struct.error):
                raise FatalError(f"{shard.file}: {name} cannot be read", MODEL) from None
        return None
