"""`python -m phalanx.rank.server.text_worker`: reads a model's tokenizer and chat template, and forks workers that run
them (text_process.py).

Limits are the kernel's: a timer of processor time whose signal ends the process, whatever it is computing, and a limit
on its memory, at which allocating fails. Functions and arguments come pickled, as only the server process writes to
these sockets; answers are msgpack.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pickle
import resource
import signal
import socket
import traceback
from collections.abc import Sequence

import msgspec

from .. import fork_server
from ..framed_socket import FramedSocket
from . import generation, prompts, relevance, text_process, token_fields
from .api_error import ApiError, PromptTooLong
from .decoding import nested_too_deeply
from .text.load import Text
from .text_process import Answer, Limits, Work

# Imported once, for all forks: what is run is in these.
USED = (generation, prompts, relevance, text_process, token_fields)
PROBE = "Hello, world! 你好 x1 123456\n\n  " + 50 * "a"  # finds a tokenizer that never ends when it is read
KEPT = 128 << 20  # bytes: a worker that has taken more ends, as malloc would keep them


def load(data: bytes) -> fork_server.Work:
    settings, limits = pickle.loads(data)
    with contextlib.suppress(ImportError):
        importlib.import_module("llguidance")  # once, for all forks
    signal.setitimer(signal.ITIMER_PROF, limits.loading_seconds)
    fork_server.limit_memory(limits.loading_memory)
    try:
        text = Text(**settings._asdict())  # which tries the template
        text.tokenizer.encode(PROBE, True)
    except MemoryError:
        raise ValueError(f"it takes more than {limits.loading_memory >> 20} MiB of memory") from None
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    return functools.partial(work, text, limits)


def work(text: Text | None, limits: Limits, sock: socket.socket, files: Sequence[int]) -> None:
    """Answer one task after the other, until the socket is closed or the memory has grown."""
    server = FramedSocket(sock, Work)
    most = _largest()
    while (messages := server.receive()) is not None:
        for one in messages:
            fork_server.limit_memory(limits.memory + limits.memory_per_byte * min(len(one.call), limits.counted))
            signal.setitimer(signal.ITIMER_PROF, one.seconds)
            answer = _answer(text, one.call)
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            answer.last = answer.last or _largest() - most > KEPT
            server.send(answer)
            del one, answer
        messages.clear()


def _answer(text: Text | None, call: bytes) -> Answer:
    try:
        function, args, options = pickle.loads(call)
        return Answer(msgspec.msgpack.encode(function(text, *args, **options)))
    except PromptTooLong as error:
        return Answer(too_long=(error.message, error.param or "", error.tokens, error.context))
    except ApiError as error:
        return _refused(error)
    except RecursionError:  # schemas and arguments are walked level by level, deeper than JSON is read
        return _refused(nested_too_deeply())
    except MemoryError:
        return Answer(exhausted="it takes too much memory", last=True)
    except Exception as error:
        lines = traceback.format_exception(error, limit=-8)
        return Answer(failure=_clean("".join(lines).strip()[-4000:]), last=True)
    except BaseException as error:  # a panic of Rust, as of regular expressions that have tried too often
        return Answer(exhausted=_clean(str(error)[:1000]) or type(error).__name__, last=True)


def _refused(error: ApiError) -> Answer:
    return Answer(refusal=(error.status, _clean(error.message), error.param, error.code))


def _clean(text: str) -> str:
    """A template may write halves of surrogate pairs, which UTF-8 cannot have."""
    return text.encode("utf-8", "replace").decode()


def _largest() -> int:
    """The most memory that this process had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    fork_server.serve(load)
