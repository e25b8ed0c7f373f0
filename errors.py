"""The exit codes of a Phalanx job: one table for all its processes. docs/exit-codes.md is for users."""

import contextlib
from collections.abc import Iterator

OK = 0  # finished, or drained after the first SIGTERM or Ctrl-C
ERROR = 1  # an error that no other code names
USAGE = 2  # a wrong option, environment or way of starting
MODEL = 3  # the model cannot be read: a file missing, truncated, with a wrong value, or of an unsupported kind
MEMORY = 4  # not enough memory for the weights, the KV cache or a step
RANK_FAILED = 70  # an uncaught exception in a rank, or its server process ended
RANK_STUCK = 71  # a rank or the server process was silent, or a step unfinished, for --timeout; or the start stalled
UNFINISHED = 75  # a batch job that has to be started again: its time was over, or it was asked to stop
RANK_KILLED = 137  # a rank, or mpirun, was ended by a signal
STOPPED = 130  # stopped by the second SIGTERM or Ctrl-C


class FatalError(Exception):
    """Ends the job with one line for the user and an exit code; raised where the cause is known."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code


# Messages of errors without a class of their own: torch's on a host and on a GPU, the driver's, cuBLAS's, the system's.
NO_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "alloc_failed")
LESS_MEMORY = "Lower --max-num-batched-tokens, --max-num-seqs, --kv-fraction or --mem, or use more ranks"


class HostMemoryError(MemoryError):
    """The system refuses host memory. The message has the size and the limit."""


def lacks_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, of the host or of a GPU."""
    told = isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in NO_MEMORY)
    return told or isinstance(error, MemoryError)  # CuPy's is one, too


@contextlib.contextmanager
def memory_for(what: str, advice: str) -> Iterator[None]:
    """Raise FatalError with the advice where memory runs out; what: that it was needed for."""
    try:
        yield
    except Exception as error:
        if not lacks_memory(error):
            raise
        raise FatalError(f"not enough memory for {what}: {first_line(error)} {advice}", MEMORY) from error


def first_line(error: BaseException) -> str:
    """The error's message as a sentence; its type where there is none."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if line.endswith(".") else f"{line}."
