"""Which errors are a lack of memory, and what is said of them."""

import errno
import os

import numpy as np
import pytest
import torch
from phalanx import errors
from phalanx.comm.watchdog import LocalWatchdog


class CuPys(MemoryError):
    """cupy.cuda.memory.OutOfMemoryError derives from MemoryError."""


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        CuPys("Out of memory allocating 2,147,483,648 bytes"),
        MemoryError(),
        RuntimeError("CUDA error 2 in norm: out of memory"),  # kernels/jit.py
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
    ],
)
def test_a_lack_of_memory_is_known_by_its_class_or_its_words(error):
    assert errors.lacks_memory(error)


@pytest.mark.parametrize("allocate", [lambda: torch.empty(1 << 50), lambda: np.zeros(1 << 50)])
def test_the_hosts_own_errors(allocate):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    assert errors.lacks_memory(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access"),
        ValueError("out of memory"),
        errors.FatalError("out of memory", 2),
    ],
)
def test_other_errors_are_none(error):
    assert not errors.lacks_memory(error)


def test_where_it_was_needed_and_what_to_change_is_said():
    with pytest.raises(errors.FatalError) as caught, errors.memory_for("a step of 9 tokens", "Lower --this (now 9)"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSearch for more words")
    assert caught.value.code == errors.MEMORY
    assert "2.00 GiB. Lower --this" in str(caught.value)
    for error in (ZeroDivisionError(), errors.FatalError("another reason", errors.MODEL)):
        with pytest.raises(type(error)) as other, errors.memory_for("a step", ""):
            raise error
        assert other.value is error


@pytest.mark.parametrize(
    "error, code, words",
    [
        (MemoryError(), errors.MEMORY, "not enough memory: MemoryError. Lower --max-num-batched-tokens"),
        (ZeroDivisionError("no"), errors.RANK_FAILED, "ZeroDivisionError: no"),
        (errors.FatalError("a reason", errors.MODEL), errors.MODEL, "a reason"),
    ],
)
def test_how_a_rank_ends(error, code, words, monkeypatch, capfd):
    """Also where nothing has said what the memory was for."""
    ends, told = [], []
    monkeypatch.setattr(LocalWatchdog, "end", lambda self, code: ends.append(code))
    watch = LocalWatchdog()
    watch._report_failure = lambda text, code, kind: told.append((text, code))
    watch.fail(error)
    assert ends[0] == told[0][1] == code and told[0][0].startswith(words)
