"""Fields of OpenAI's that steer its own service, and change no answer here."""

from __future__ import annotations

from typing import Annotated, Any

from .decoding import Body
from .fields import doc


class Hints(Body, kw_only=True):
    """They are taken so that `--strict` does not refuse what clients always send."""

    prompt_cache_key: Annotated[Any, doc("ignored: prefixes are found by themselves")] = None
    prompt_cache_retention: Annotated[Any, doc("ignored")] = None
    safety_identifier: Annotated[Any, doc("ignored")] = None
    service_tier: Annotated[Any, doc("ignored: `priority` orders requests")] = None
