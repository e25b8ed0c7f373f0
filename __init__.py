"""Phalanx serves large language models from an MPI job.

`from phalanx import LLM, SamplingParams` is the library; the names load what they need when they are first used, so
that `import phalanx` and the `phalanx` command load nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launcher.agent import Agent
    from .launcher.llm import LLM, AsyncLLM, SamplingParams

__all__ = ["LLM", "Agent", "AsyncLLM", "SamplingParams", "__version__"]
__version__: str


def __getattr__(name: str) -> object:
    if name in ("LLM", "AsyncLLM", "SamplingParams"):
        from .launcher import llm

        return getattr(llm, name)
    if name == "Agent":
        from .launcher.agent import Agent

        return Agent
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("phalanx")
        except PackageNotFoundError:  # run from a checkout that is on the path, not installed
            return "0+checkout"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
