"""mpirun's lines about the end of a rank are taken out; everything else passes as it comes."""

import pytest
from phalanx.launcher.job.output_filter import OutputFilter

RULE = b"-" * 74 + b"\n"
KILLED = RULE + b"prterun noticed that process rank 1 with PID 5867 on node vm exited on\nsignal 9 (Killed).\n" + RULE
KILLED_4 = RULE + b"mpirun noticed that process rank 0 with PID 0 on node a.b exited on signal 11 (x).\n" + RULE
CODE = RULE + b"prterun detected that one or more processes exited with non-zero status,\nthus\n\n  code: 71\n" + RULE
ABORT = RULE + b"MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n" + RULE
HYDRA = (
    b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   PID 17635 RUNNING AT vm\n"
    b"=   EXIT CODE: %d\n=   CLEANING UP REMAINING PROCESSES\n=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES\n"
    + b"=" * 83 + b"\n"
)  # fmt: skip
TAIL = (
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    b"This typically refers to a problem with your application.\n"
    b"Please see the FAQ page for debugging suggestions\n"
)
OTHER = RULE + b"There are not enough slots available in the system\n" + RULE


def through(data: bytes, size: int) -> tuple[bytes, str]:
    noise = OutputFilter()
    shown = b"".join(noise.feed(data[at : at + size]) for at in range(0, len(data), size))
    return shown + noise.flush(), noise.casualty


@pytest.mark.parametrize("size", [1, 7, 64, 10000])
@pytest.mark.parametrize(
    ("data", "shown", "casualty"),
    [
        (b"a\n" + KILLED + b"b\n", b"a\nb\n", "rank 1 on vm was ended by signal 9"),
        (KILLED_4 + CODE + ABORT + b"b", b"b", "rank 0 on a.b was ended by signal 11"),
        (b"a\n" + HYDRA % 9 + TAIL + b"b\n", b"a\nb\n", "a rank on vm was ended by signal 9"),
        (HYDRA % 71 + b"b\n" + TAIL, b"b\n", ""),
        (TAIL + b"= a\n=\n", TAIL + b"= a\n=\n", ""),
        (b"a\n" + OTHER + CODE, b"a\n" + OTHER, ""),
        (b"- a list\n--\n---- b\n", b"- a list\n--\n---- b\n", ""),
        (b"a\nmpirun: Forwarding signal 10 to job\nb\n", b"a\nb\n", ""),
        (b"mpiexec: Forwarding signal 10 to job\nmpirun: Forwarding nothing\nm", b"mpirun: Forwarding nothing\nm", ""),
        (b"x mpirun: Forwarding signal 10 to job\n", b"x mpirun: Forwarding signal 10 to job\n", ""),
        (b"progress 1%\rprogress 2%", b"progress 1%\rprogress 2%", ""),
        (RULE + b"never closed\n", RULE + b"never closed\n", ""),
        (RULE + b"x\n" * 5000, RULE + b"x\n" * 5000, ""),
    ],
)
def test_what_passes(data, shown, casualty, size):
    assert through(data, size) == (shown, casualty)


def test_what_is_no_message_is_not_held_back():
    noise = OutputFilter()
    assert noise.feed(b"loading 10%") == b"loading 10%"
    assert noise.feed(b"\rloading 20%\n") == b"\rloading 20%\n"
