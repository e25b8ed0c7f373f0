"""Facts of GPUs that are read through NVML, with a module that stands for nvidia-ml-py on a host with GPUs."""

import sys
from types import SimpleNamespace

import pytest
from phalanx.rank import nvml

UUIDS = ("GPU-ab01", "GPU-ab02", "GPU-cd03")


class Fake:
    """Three GPUs, numbered as their handles are; another job has the second. 0 and 2 have NVLink between them."""

    class NVMLError(Exception):
        pass

    NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 2, 0
    foreign: tuple[int, ...] = (1,)
    nvlink = ({0, 2},)
    broken = False
    open = 0

    def nvmlInit(self):
        if self.broken:
            raise self.NVMLError("Driver Not Loaded")
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetCount(self):
        return len(UUIDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.foreign or index >= len(UUIDS):
            raise self.NVMLError("Insufficient Permissions")
        return index

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(domain=0, bus=0x19 + handle, device=0)

    def nvmlDeviceGetMemoryInfo(self, handle):
        if handle == 2:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(total=100, used=4)

    def nvmlDeviceGetUUID(self, handle):
        return handle if isinstance(handle, str) else UUIDS[handle]

    def nvmlDeviceGetP2PStatus(self, one, other, kind):
        assert kind == self.NVML_P2P_CAPS_INDEX_NVLINK
        return self.NVML_P2P_STATUS_OK if {one, other} in self.nvlink else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one, other):
        return 50

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle, index):
        if index > 1:
            raise self.NVMLError("Not Found")
        return f"MIG-{handle}{index}-x"

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return 1_000_000 * (handle + 1)


@pytest.fixture
def fake(monkeypatch):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    yield fake
    assert fake.open == 0


def test_the_gpus_of_a_host(fake):
    node = nvml.node()
    assert node.gpus == [
        nvml.Gpu(0, "NVIDIA H200", 100, 4, "0000:19:00.0"),
        nvml.Gpu(2, "NVIDIA H200", 0, 0, "0000:1b:00.0"),  # NVML does not tell its memory
    ]
    assert (node.driver, node.links) == ("580.1", ["NVLink"])


def test_the_commonest_link_comes_first(fake):
    fake.foreign = ()
    assert nvml.node().links == ["SYS", "NVLink"]


@pytest.mark.parametrize(
    ("mig", "parent"), [("MIG-21-x", UUIDS[2]), ("mig-0", UUIDS[0]), ("MIG-", ""), ("MIG-1", ""), ("MIG-3", "")]
)
def test_the_gpu_of_a_mig_device(fake, mig, parent):
    assert nvml.mig_parent(mig) == parent


@pytest.mark.parametrize(
    ("gpus", "joules"), [(["0"], 1000), (["0", "2"], 4000), (["GPU-cd03"], 3000), (["gpu-C"], 3000), ([], 0)]
)
def test_energy(fake, gpus, joules):
    assert nvml.joules(gpus) == joules


@pytest.mark.parametrize("gpu", ["1", "9", "GPU-x", "GPU-ab02", "MIG-0"])
def test_no_energy_of_a_gpu_that_is_not_ours(fake, gpu):
    with pytest.raises(OSError):
        nvml.joules([gpu])


def test_a_uuid_that_fits_two_gpus(fake):
    fake.foreign = ()
    with pytest.raises(OSError, match="2 GPUs"):
        nvml.joules(["GPU-ab"])


def test_without_the_driver(fake):
    fake.broken = True
    with pytest.raises(OSError, match="Driver Not Loaded"):
        nvml.node()
    assert nvml.mig_parent("MIG-0") == ""


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(OSError, match="nvidia-ml-py"):
        nvml.node()
    assert nvml.mig_parent("MIG-0") == ""
