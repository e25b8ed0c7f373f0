"""What the GPUs of this host have used, from NVML; nothing where there is no NVML or it does not tell."""

from __future__ import annotations

import ctypes


class Meter:
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
        else:
            self._call("nvmlDeviceGetHandleByUUID", ctypes.c_char_p(gpu.encode()), ctypes.byref(handle))
        return handle

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
