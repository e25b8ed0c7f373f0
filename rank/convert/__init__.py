"""Quantises a checkpoint into another one: GPTQ over a calibration text, stored in the layout of GPTQ or AWQ."""
