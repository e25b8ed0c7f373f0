"""Usage of each API key, for those who share a server."""

from __future__ import annotations

from typing import Any

from .routes import Call, Route


def usage(call: Call) -> dict[str, Any]:
    """Requests and tokens of the API key that asks, or of everybody where there are no keys, since the server began."""
    assert call.server is not None
    used = call.server.used[call.key]
    return {
        "object": "usage",
        "name": call.server.config.key_names.get(call.server.config.api_keys[call.key]) if call.server.keys else None,
        "since": call.server.started,
        "requests": used.requests,
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }


ROUTES = [Route("/v1/usage", usage, method="GET")]
