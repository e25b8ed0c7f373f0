"""Headers of GGUF files: what gguf-py writes is read back, and a damaged file ends in one line with code 3."""

import random
import struct

import gguf
import numpy as np
import pytest
from phalanx import errors
from phalanx.comm.mesh import Mesh
from phalanx.rank.checkpoint_files import read_index
from phalanx.rank.gguf import header
from phalanx.rank.gguf.types import TYPES
from phalanx.rank.model import architectures, measure
from phalanx.rank.model.choices import choose_format
from phalanx.rank.model.config import read_config
from phalanx.rank.model.weights.safetensors import Checkpoint
from phalanx.rank.server.text.load import Text

from ... import gguf_files
from ...checkpoints import make_checkpoint


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole model in a file."""
    folder = tmp_path_factory.mktemp("made")
    path = make_checkpoint(folder / "tiny", hidden_size=64, num_hidden_layers=1, intermediate_size=96, head_dim=16,
                           num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    return gguf_files.write(path, folder / "made.gguf", "Q8_0", tokenizer=gguf_files.tokenizer(path))


def test_types_are_gguf_pys():
    sizes = {number.value: (number.name, *size) for number, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(one) for number, one in TYPES.items()}.items() <= sizes.items()


def test_metadata_and_tensors_are_gguf_pys(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    values = dict(text="Größe", flag=True, whole=-3, real=0.5, list=[1, 2, 3], words=["a", "", "ü"], reals=[0.5, -1.0])
    for key, value in values.items():
        kind = {str: "string", bool: "bool", int: "int32", float: "float64", list: "array"}[type(value)]
        getattr(writer, f"add_{kind}")(key, value)
    writer.add_custom_alignment(64)
    data = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones((3, 2, 4), np.float16)}
    for name, array in data.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = header.read(tmp_path / "x.gguf")
    assert found.metadata == values | {"general.architecture": "llama", "general.alignment": 64}
    for name, array in data.items():
        tensor = found.tensors[name]
        assert tensor.shape == array.shape
        stored = (tmp_path / "x.gguf").read_bytes()[tensor.start : tensor.stop]
        assert stored == array.tobytes() and tensor.start % 64 == 0


def put(data, at, form, value):
    return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]


NAME = "blk.0.attn_q.weight"
# Changes of the file, given its bytes and where the entry of NAME goes on → the message
DAMAGE = {
    "cut off in the header": (lambda data, at: data[:100], "is damaged or truncated: it ends within "),
    "cut off in a tensor": (lambda data, at: data[:-100], r"tensor \S+ ends at byte \d+, the file has \d+"),
    "wrong magic": (lambda data, at: b"GGML" + data[4:], "is not a GGUF file"),
    "empty": (lambda data, at: b"", "it ends within its header"),
    "old version": (lambda data, at: put(data, 4, "<I", 1), "is of version 1; GGUF of versions 2 and 3"),
    "big-endian": (lambda data, at: put(data, 4, ">I", 3), "is big-endian; GGUF of versions 2 and 3, little-endian"),
    "axes": (lambda data, at: put(data, at, "<I", 9), f"tensor {NAME} has 9 axes"),
    "unknown type": (lambda data, at: put(data, at + 20, "<I", 99), f"tensor {NAME} is of an unknown type, 99"),
    "past the end": (lambda data, at: put(data, at + 24, "<Q", 1 << 40), f"tensor {NAME} ends at byte 1099"),
    "unaligned": (lambda data, at: put(data, at + 24, "<Q", 7), f"tensor {NAME} begins at 7, not at a multiple of 32"),
    "groups": (lambda data, at: put(data, at + 4, "<Q", 48), f"{NAME} has rows of 48, but Q8_0 has groups of 32"),
    "no elements": (lambda data, at: put(data, at + 12, "<Q", 0), f"tensor {NAME} is empty"),
    "other shape": (lambda data, at: put(data, at + 4, "<Q", 32), f"{NAME} is 64 x 34, expected 64 x 68"),
    "many tensors": (lambda data, at: put(data, 8, "<Q", 1 << 60), "is damaged or truncated: "),
    "many layers": (
        lambda data, at: put(data, data.index(b"llama.block_count") + 21, "<I", 1 << 30), "block_count is more than",
    ),
    "many elements": (
        lambda data, at: put(data, data.index(b"tokenizer.ggml.token_type") + 33, "<Q", 1 << 25), "elements",
    ),
    "many keys": (lambda data, at: put(data, 16, "<Q", 1 << 60), "is damaged or truncated: "),
}  # fmt: skip


def whole(file):
    """All that is read before the weights are."""
    config = read_config(file)
    index = read_index(file)
    format_of = choose_format(config, "none", names=index.files)
    module = architectures.find(config.model_type)
    alone = measure.GroupRank(0, 1)
    mesh = Mesh(alone, 0, alone, alone, alone)
    model = module.Model(module.Args.from_config(config), mesh, 16, [*index.files], format_of)
    checkpoint = Checkpoint(file, index)
    for part in model.slices():
        checkpoint.check(part)
    Text(str(file))
    return config


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told_in_one_line(made, tmp_path, what):
    change, words = DAMAGE[what]
    data = made.read_bytes()
    file = tmp_path / "damaged.gguf"
    file.write_bytes(change(data, data.index(NAME.encode()) + len(NAME)))
    with pytest.raises(errors.FatalError, match=words) as stopped:
        whole(file)
    assert stopped.value.code == errors.MODEL and str(stopped.value).startswith(str(file))
    assert "\n" not in str(stopped.value)


def mutated(data, draw):
    """Some bytes are others, or a part is missing or there twice; mostly where the header is."""
    data, end = bytearray(data), 24000
    kind = draw.random()
    if kind < 0.15:
        return bytes(data[: draw.randrange(len(data))])
    if kind < 0.3:
        first = draw.randrange(end)
        last = first + draw.randrange(1, 64)
        return bytes(data[:first] + data[last:] if draw.random() < 0.5 else data[:last] + data[first:])
    for _ in range(draw.choice([1, 1, 2, 8, 64])):
        at = draw.randrange(200 if draw.random() < 0.2 else end)
        data[at] = draw.choice([0, 1, 127, 128, 255, data[at] ^ 1 << draw.randrange(8), draw.randrange(256)])
    return bytes(data)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_mutated_files_are_read_or_refused(made, tmp_path):
    """2,000 of them: a line that names the file and code 3, or what a whole file would give; never another error."""
    data, draw, refused = made.read_bytes(), random.Random(0), 0
    assert whole(made).model_type == "llama"
    for number in range(2000):
        file = tmp_path / f"{number}.gguf"
        file.write_bytes(mutated(data, draw))
        try:
            whole(file)
        except (errors.FatalError, ValueError) as error:  # a tokenizer's: the server ends with code 3, too
            refused += 1
            assert str(file) in str(error) and "\n" not in str(error), (number, error)
            assert getattr(error, "code", errors.MODEL) == errors.MODEL, (number, error)
        file.unlink()
    assert 500 < refused < 1950
