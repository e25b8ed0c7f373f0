"""e4m3 of checkpoints that quantise weights alone: activations keep their 16 bits at any number of rows."""

from __future__ import annotations

from torch import Tensor

from . import floats


def pack(codes: Tensor, scales: Tensor) -> floats.Packed:
    """The form that GEMMs like best on their device."""
    return floats.pack_for_device(floats.pack(codes, scales), weight_only=True)


FORMS = (pack, floats.pack)  # of a stack's weights: CPUs do not take those with NaN as others
