"""Fields of OpenAI's that say how its own service is to run, and change no answer here."""

from __future__ import annotations

from typing import Any

from .decoding import Body


class Hints(Body, kw_only=True):
    """They are taken so that `--strict` does not refuse what clients always send."""

    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    prediction: Any = None
