"""CUDA_VISIBLE_DEVICES as CUDA reads it, on machines that are written down as files."""

import os
from pathlib import Path

import pytest
from phalanx.launcher.job import visible_devices

UUIDS = [f"GPU-{letter * 8}-1111-2222-3333-444444444444" for letter in "abcd"]
ADDRESSES = ["0000:1b:00.0", "0000:43:00.0", "0000:9d:00.0", "10000:02:00.0"]


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """Four GPUs, whose minor numbers are in another order than their addresses; a function that describes one anew."""
    monkeypatch.setattr(visible_devices, "PROC", tmp_path)
    monkeypatch.setattr(visible_devices, "DEV", tmp_path / "dev")
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "null", *(f"nvidia{minor}" for minor in range(4))):
        (tmp_path / "dev" / name).touch()

    def describe(index, **more):
        told = {"Model": "NVIDIA H200", "GPU UUID": UUIDS[index], "Device Minor": 3 - index, "GPU Excluded": "No"}
        place = tmp_path / "driver/nvidia/gpus" / ADDRESSES[index].upper()
        place.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{name}: \t {value}\n" for name, value in (told | more).items())
        (place / "information").write_text(text)

    for index in range(4):
        describe(index)
    return describe


def of(value, **more):
    return {"CUDA_VISIBLE_DEVICES": value} | more


@pytest.mark.parametrize(("value", "expected"), [
    ("0,3", ["0", "3"]), (" 3, 1 ", ["3", "1"]), ("", []), ("-1", []), ("0,2,-1,1", ["0", "2"]), ("0,,1", ["0"]),
    ("NoDevFiles", []), ("1,1", []), ("GPU-aa,GPU-bb", ["GPU-aa", "GPU-bb"]), ("GPU-aa,1", ["GPU-aa"]),
    ("MIG-5,MIG-6", ["MIG-5"]), ("MIG-GPU-aa/1/0", ["MIG-GPU-aa/1/0"]),
])  # fmt: skip
def test_entries_that_count(value, expected):
    assert visible_devices.listed(of(value)) == expected
    assert visible_devices.count(of(value)) == len(expected)


def test_without_the_variable(gpus, tmp_path, monkeypatch):
    assert visible_devices.listed({}) is None
    assert visible_devices.count({}) == 4
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "nvidia2")  # as in a device cgroup
    assert visible_devices.count({}) == 3
    monkeypatch.setattr(visible_devices, "DEV", tmp_path / "none")
    assert visible_devices.count({}) == 0


@pytest.mark.parametrize(("value", "index", "expected"), [
    ("2,3", 0, 2), ("2,3", 1, 3), ("3,1", 1, 1),
    (UUIDS[3], 0, 3), ("GPU-cc,GPU-b", 1, 1), ("GPU-CC", 0, 2), ("MIG-" + UUIDS[2] + "/1/0", 0, 2),
])  # fmt: skip
def test_where_a_gpu_is(gpus, value, index, expected):
    assert visible_devices.locate(index, of(value)) == (ADDRESSES[expected], "")


def test_where_a_gpu_is_without_the_variable(gpus):
    assert [visible_devices.locate(index, {})[0] for index in range(4)] == ADDRESSES
    address, why = visible_devices.locate(4, {})
    assert address == "" and "number 4" in why


@pytest.mark.parametrize(("value", "index", "words"), [
    ("0", 1, "CUDA_VISIBLE_DEVICES has no entry for it"), ("7", 0, "none has the number 7"),
    ("GPU-", 0, "4 of the GPUs that this process may open fit GPU-"), ("GPU-e", 0, "none of the GPUs"),
])  # fmt: skip
def test_entries_that_name_no_gpu_here(gpus, value, index, words):
    address, why = visible_devices.locate(index, of(value))
    assert address == "" and words in why


def test_a_cgroup_that_leaves_one_gpu(gpus, monkeypatch):
    """Slurm's tasks all have CUDA_VISIBLE_DEVICES=0 then, and each has another GPU as its first."""
    for minor in range(4):
        monkeypatch.setattr(os, "access", lambda path, mode, mine=minor: Path(path).name == f"nvidia{mine}")
        assert visible_devices.locate(0, of("0")) == (ADDRESSES[3 - minor], "")


def test_models_that_differ(gpus):
    """Which of them is CUDA's first depends on their speed."""
    gpus(1, Model="NVIDIA L4")
    address, why = visible_devices.locate(0, of("1"))
    assert address == "" and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in why
    assert visible_devices.locate(0, of("1", CUDA_DEVICE_ORDER="PCI_BUS_ID")) == (ADDRESSES[1], "")
    assert visible_devices.locate(0, of("GPU-b")) == (ADDRESSES[1], "")


def test_gpus_that_the_driver_leaves_out(gpus):
    gpus(0, **{"GPU Excluded": "Yes"})
    gpus(1, **{"GPU UUID": "GPU-????????-????-????-????-????????????"})  # not initialised yet
    assert visible_devices.locate(0, of("0")) == (ADDRESSES[1], "")
    assert "none of the GPUs" in visible_devices.locate(0, of("GPU-b"))[1]


def test_the_gpu_of_a_mig_device(gpus, monkeypatch):
    parents = {"MIG-2222-a": UUIDS[2]}
    monkeypatch.setattr(visible_devices.nvml, "mig_parent", lambda mig: parents.get(mig, ""))
    assert visible_devices.locate(0, of("MIG-2222-a")) == (ADDRESSES[2], "")
    address, why = visible_devices.locate(0, of("MIG-3"))
    assert address == "" and "NVML" in why and "MIG-3" in why


def test_a_machine_without_the_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(visible_devices, "PROC", tmp_path)
    assert visible_devices.locate(0, of("0")) == ("", f"{tmp_path}/driver/nvidia/gpus lists none")
