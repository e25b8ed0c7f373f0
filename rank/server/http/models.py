"""The model under each of its names."""

from __future__ import annotations

from typing import Any

from ..api_error import ApiError
from .routes import Call, Route
from .state import ServerState


def models(call: Call) -> dict[str, Any]:
    """The model under each of its names, with `max_model_len`."""
    assert call.server is not None
    return {"object": "list", "data": [_describe(call.server, name) for name in call.engine.names]}


def model(call: Call) -> dict[str, Any]:
    """The same of one name; 404 for another."""
    assert call.server is not None
    name, names = call.args["model"], call.engine.names
    if name not in names:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {', '.join(names)}",
            "model",
            "model_not_found",
        )
    return _describe(call.server, name)


def _describe(state: ServerState, name: str) -> dict[str, Any]:
    """A model's entry; all names after the first are other names of the same model."""
    real = state.sessions.names[0]
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "phalanx",
        "max_model_len": state.link.ready.max_model_len if state.link.ready else None,
        "root": real,
        "parent": None if name == real else real,
        "permission": [],
    }


ROUTES = [
    Route("/v1/models", models, method="GET", also=("/models",)),
    Route("/v1/models/{model}", model, method="GET"),
]
