"""The headers of safetensors files as they are read without torch; test_load.py breaks whole checkpoints."""

import json

import pytest
from phalanx import errors
from phalanx.rank import safetensors_header
from phalanx.rank.model.weights.safetensors import DTYPES


def write(file, header, size=0):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return file


def wrong(file) -> str:
    with pytest.raises(errors.FatalError) as stop:
        safetensors_header.read_header(file)
    assert stop.value.code == errors.MODEL
    return str(stop.value).removeprefix(f"{file} is damaged or truncated: ")


def test_the_kinds_that_are_read_are_as_wide_as_torch_has_them():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == safetensors_header.WIDTHS


def test_a_header(tmp_path):
    tensors = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "packed": {"dtype": "I32", "shape": [1], "data_offsets": [12, 16]},
    }
    file = write(tmp_path / "m", tensors, 16)
    begin = file.stat().st_size - 16
    assert safetensors_header.read_header(file) == {
        "a": safetensors_header.Entry("BF16", (2, 3), begin, begin + 12),
        "packed": safetensors_header.Entry("I32", (1,), begin + 12, begin + 16),
    }


def test_what_is_no_header(tmp_path, monkeypatch):
    file = tmp_path / "m"
    tensor = {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}
    assert wrong(write(file, {"a": tensor}, 4)) == "4 bytes for a, F32 of shape [2]"
    assert wrong(write(file, {"a": tensor | {"data_offsets": [8, 0]}})) == "-8 bytes for a, F32 of shape [2]"
    assert wrong(write(file, {"a": {"dtype": "F32"}})) == "its header lacks something (KeyError('data_offsets'))"
    assert wrong(write(file, {}, 1)).startswith("its header tells of 10 bytes, the file has 11")
    monkeypatch.setattr(safetensors_header, "LONGEST", 50)
    assert wrong(write(file, b" " * 51)) == "its header would be 51 bytes long, more than the 50 that one may have"
    file.write_bytes((1 << 40).to_bytes(8, "little"))
    assert wrong(file) == "a header of 1099511627776 bytes does not fit into a file of 8"
    file.unlink()
    assert wrong(file) == f"{file} cannot be read: No such file or directory"
