"""The headers of safetensors files as they are read without torch; test_load.py breaks whole checkpoints."""

import json
import re

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
    assert re.search("^4 bytes.*F32", wrong(write(file, {"a": tensor}, 4)))
    assert re.search("-8 bytes.*F32", wrong(write(file, {"a": tensor | {"data_offsets": [8, 0]}})))
    assert wrong(write(file, {"a": {"dtype": "F32"}})).endswith("missing required field `shape`")
    assert "header tells" in wrong(write(file, {}, 1))
    monkeypatch.setattr(safetensors_header, "LONGEST", 50)
    assert re.search("header.*50 bytes", wrong(write(file, b" " * 51)))
    file.write_bytes((1 << 40).to_bytes(8, "little"))
    assert re.search("header.*first 8.*8 bytes", wrong(file))
    file.unlink()
    assert re.search(f"{file} .*No such file", wrong(file))


@pytest.mark.parametrize(
    "header",
    [
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
        b'{"a": {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [2, 9223372036854775808], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "odd", "shape": [' + b"99999999," * 100_000 + b'1], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": "many", "data_offsets": [0, 16]}}',
        b"[]",
        b"\xff\xfe{}",
        b"{",
    ],
    ids=range(9),
)
def test_headers_of_strangers(tmp_path, header):
    """Each is refused in words, without a number that is multiplied up or a byte of what may be no weights."""
    assert len(wrong(write(tmp_path / "m", header, 16))) < 300


def test_a_header_of_too_many_tensors_is_refused_before_it_becomes_objects(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_header, "MAX_TENSORS", 10)
    one = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    file = write(tmp_path / "m", {f"{i}": one for i in range(10)}, 4)
    assert len(safetensors_header.read_header(file)) == 10
    monkeypatch.setattr(safetensors_header, "json_decoding", None)
    assert "10 tensors" in wrong(write(tmp_path / "m", {f"{i}": one for i in range(13)}, 4))


def test_no_byte_of_another_file_is_shown(tmp_path):
    file = tmp_path / "m"
    for secret in (b"s3cr3t!!" + b"x" * 100, b"\x05\0\0\0\0\0\0\0s3cr3t!!"):
        file.write_bytes(secret)
        said = wrong(file).replace(str(len(secret)), "")
        assert "s3cr" not in said
        assert str(int.from_bytes(secret[:8], "little")) not in said


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "{}", "\udcff", '{"a'], ids=range(6)
)
def test_an_index_of_strangers(tmp_path, text):
    (tmp_path / safetensors_header.INDEX).write_text(text, errors="surrogateescape")
    with pytest.raises(errors.FatalError) as stop:
        safetensors_header.read_index(tmp_path)
    assert stop.value.code == errors.MODEL and "garbled" in str(stop.value)
