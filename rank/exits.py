"""The exit codes of a Phalanx job: one table for launcher, ranks and front. docs/exit-codes.md is for users."""

OK = 0  # finished, or drained after the first SIGTERM or Ctrl-C
ERROR = 1  # an error that no other code names
USAGE = 2  # a wrong option, environment or way of starting
MODEL = 3  # the model cannot be read: a file missing, truncated, or of an unsupported kind
MEMORY = 4  # not enough memory for the weights or one sequence's KV cache
RANK_FAILED = 70  # an uncaught exception in a rank, or its front ended
RANK_STUCK = 71  # a rank did not answer or did not finish a step within --timeout
UNFINISHED = 75  # a batch job that has to be started again: its time was over, or it was asked to stop
RANK_KILLED = 137  # a rank, or mpirun, was ended by a signal
STOPPED = 130  # stopped by the second SIGTERM or Ctrl-C


class Stop(Exception):
    """Ends the job with one line for the user and an exit code; raised where the cause is known."""

    def __init__(self, message: str, code: int):
        super().__init__(message)
        self.code = code
