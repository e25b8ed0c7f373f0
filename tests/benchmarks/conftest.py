"""benchmarks/serve.py, and the server that answers words."""

from types import SimpleNamespace

import pytest
from phalanx.benchmarks import serve
from phalanx.launcher.commands.bench import run

from .. import word_server

SMALL = ("--batch", 4, "--input-len", 101, "--output-len", 5)


@pytest.fixture(scope="module")
def running():
    with word_server.running() as running:
        yield running


@pytest.fixture
def server(running):
    return word_server.fresh(running)


@pytest.fixture
def bench(server, capsys, monkeypatch):
    """Run it; what it printed, by stream, and its exit code."""
    monkeypatch.setattr(run, "FIRST_WAIT", 0.01)

    def bench(*flags, port=True):
        try:
            code = serve.main([*(("--port", str(server.port)) if port else ()), *map(str, flags)])
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, out=printed.out, err=printed.err)

    return bench
