"""A process's heap: Python's objects, and freed memory that the C library keeps."""

import contextlib
import ctypes
import gc

_M_MMAP_THRESHOLD = -3
LARGE = 128 << 10  # bytes, as malloc begins


def freeze() -> None:
    """Keep the objects that are here now out of the garbage collector's way, until `collect`.

    It halts all threads while it goes through them: between two steps of a rank of a GPU nothing was launched for 0.2 s
    once. A rank's program freezes what its imports made before that.
    """
    gc.collect()
    gc.freeze()


def collect() -> None:
    """Free what is unreachable, of frozen objects too, and freeze the rest again."""
    gc.unfreeze()
    freeze()


def trim() -> None:
    """Hand freed memory back to the system, where the C library can (glibc). malloc keeps what is freed below anything
    in use."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_large() -> None:
    """Have blocks of LARGE bytes handed back to the system as soon as they are freed, where the C library can (glibc).

    Otherwise malloc raises that limit to the largest block that was freed, cuts later ones from its heaps, and the
    small blocks that threads cache keep the gaps between them apart: a server grew by 90 bytes a request, without end.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE)
