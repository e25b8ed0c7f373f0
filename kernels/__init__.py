"""What runs on the device, one operation a file.

The public function says what is computed and chooses by device; `<name>_reference` beside it is the computation in
torch, which every other version is tested against and which CPUs run.
"""
