"""`python -m phalanx.rank.server.batch`: a batch job's process in the server's place. It listens to rank 0 only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

from .... import errors, logs
from ...gguf import checkpoint
from ..__main__ import prepare
from ..config import take
from ..engine_client import EngineClient
from ..text_engine import TextEngine
from .config import VARIABLE, BatchConfig
from .journal import Journal
from .run import BatchRun
from .setup import setup


def main() -> int:
    try:
        config = take(BatchConfig, VARIABLE, "batch")
    except ValueError as error:
        logs.say(str(error), "error")
        return errors.USAGE
    if not prepare(config.server):
        return errors.ERROR
    try:
        checkpoint.pair(config.server.model_dir, config.server.mmproj)  # both have weights to be known by
        journal = Journal(config.journal, config.input, setup(config.server), config.overwrite)
    except errors.FatalError as stop:
        logs.say(str(stop), "error")
        return stop.code
    return asyncio.run(run(config, journal))


async def run(config: BatchConfig, journal: Journal) -> int:
    """Listen for rank 0, and do the job."""
    link = EngineClient(config.server.link, config.server.restarts_expected, config.server.timeout)
    engine = TextEngine(link, config.server)
    batch = BatchRun(config, journal, link, engine)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, batch.stop, "asked to by a signal")
    loop.add_signal_handler(signal.SIGTERM, batch.end, errors.STOPPED, "stopped by a signal")
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # the terminal's Ctrl-C is the launcher's to handle
    await link.listen()
    code = await batch.run()
    await batch.leave(code)
    link.close()
    with contextlib.suppress(OSError):  # the job's directory, when nobody is left to remove it
        os.rmdir(os.path.dirname(config.server.link))
    return code


if __name__ == "__main__":
    code = main()
    logs.flush()
    # Not sys.exit: it would wait for threads that read the input or tokenise.
    os._exit(code)
