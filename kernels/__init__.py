"""Kernels and operations that run on the device, one operation a file.

The public function documents the computation and chooses by device; `<name>_reference` is the computation in
torch, which every other version is tested against and which CPUs run.
"""
