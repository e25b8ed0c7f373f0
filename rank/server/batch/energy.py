"""What the GPUs of this host have used, from NVML; nothing where there is no NVML or it does not tell."""

from __future__ import annotations

import ctypes


class EnergyMeter:
    """Joules since it was made. `gpus`: numbers or UUIDs, as CUDA_VISIBLE_DEVICES lists them."""

    def __init__(self, gpus: list[str]):
        self._handles: list[ctypes.c_void_p] = []
        self._start = 0.0
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
            self._call("nvmlInit_v2")
            self._handles = [self._handle(gpu) for gpu in gpus]
            self._start = self._total()
        except (OSError, AttributeError, ValueError):
            self._handles = []

    def joules(self) -> float | None:
        """None where it cannot be measured."""
        try:
            return self._total() - self._start if self._handles else None
        except OSError:
            return None

    def _handle(self, gpu: str) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        if gpu.isdigit():
            self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(int(gpu)), ctypes.byref(handle))
            return handle
        try:
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(gpu.encode()), ctypes.byref(handle))
            return handle
        except OSError:
            return self._begun(gpu)

    def _begun(self, begun: str) -> ctypes.c_void_p:
        """The GPU whose UUID begins so: CUDA takes a part that fits one alone, NVML the whole only."""
        count, text = ctypes.c_uint(), ctypes.create_string_buffer(96)
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        fitting = []
        for index in range(count.value):
            handle = ctypes.c_void_p()
            try:
                self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
                self._call("nvmlDeviceGetUUID", handle, text, ctypes.c_uint(len(text)))
            except OSError:
                continue  # a GPU that this job was not given
            if text.value.decode().lower().startswith(begun.lower()):
                fitting.append(handle)
        if len(fitting) != 1:
            raise OSError(f"{len(fitting)} GPUs have a UUID that begins with {begun}")
        return fitting[0]

    def _total(self) -> float:
        total = 0.0
        for handle in self._handles:
            millijoules = ctypes.c_ulonglong()
            self._call("nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
            total += millijoules.value / 1000
        return total

    def _call(self, name: str, *arguments: object) -> None:
        if code := getattr(self._nvml, name)(*arguments):
            raise OSError(f"{name} failed with {code}")
