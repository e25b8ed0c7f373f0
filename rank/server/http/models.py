"""The model under each of its names, or several models and which of them is loaded."""

from __future__ import annotations

from typing import Annotated, Any

from ..anthropic_format import rfc3339
from ..api_error import ApiError, bad
from ..decoding import Body
from ..fields import doc
from ..models import Models
from ..text_engine import TextEngine
from .paging import anthropic_page
from .routes import Call, Route
from .state import ServerState


class SelectRequest(Body):
    """POST /v1/models/select."""

    model: Annotated[str | None, doc("the name of the model to load")] = None
    model_id: Annotated[str | None, doc("the same under candle-vLLM's name")] = None

    def check(self) -> None:
        self.model = self.model or self.model_id
        if not self.model:
            raise bad("model", "model is missing: the name of the model to load")


def models(call: Call) -> dict[str, Any]:
    """The models that there are, with `max_model_len` and `input_modalities`, what `images` they take once they are
    loaded, and `chat_template: false` for one that ships none; of several with their `status`. In Anthropic's shape
    where the client sends `anthropic-version`."""
    assert call.server is not None
    data = [_shown(call, *one) for one in _names(call.server)]
    return anthropic_page(data, call.query) if call.anthropic else {"object": "list", "data": data}


def model(call: Call) -> dict[str, Any]:
    """Answers with the model of this name; 404 for another."""
    assert call.server is not None
    name, known = call.args["model"], dict(_names(call.server))
    if name not in known:
        raise ApiError(
            404,
            f"the model {name!r} does not exist; this server has {', '.join(known)}",
            "model",
            "model_not_found",
        )
    return _shown(call, name, known[name])


def status(call: Call) -> dict[str, Any]:
    """The state of several models: which is loaded, how many requests wait for each, why one cannot be loaded."""
    several = _several(call)
    return {"object": "list", "loaded": _loaded(several), "data": several.describe()}


def select(call: Call) -> dict[str, Any]:
    """Load one of several models, once the requests of the running one have ended."""
    # The model is loaded by now, as for every request that names it.
    several = _several(call)
    return {"model": call.engine.names[0], "status": several.status(call.engine)}


def _several(call: Call) -> Models:
    assert call.server is not None
    if call.server.models is None:
        raise ApiError(404, "this server has one model; --models-config gives it several", code="not_found")
    return call.server.models


def _loaded(several: Models) -> str | None:
    return None if several.loaded is None else several.engines[several.loaded].names[0]


def _names(state: ServerState) -> list[tuple[str, TextEngine]]:
    """Every name with its model; all names of a model after the first are other names of the same."""
    engines = state.models.engines if state.models is not None else [state.engine]
    return [(name, engine) for engine in engines for name in engine.names]


def _shown(call: Call, name: str, engine: TextEngine) -> dict[str, Any]:
    """A model's entry in the shape that the client expects."""
    assert call.server is not None
    found = _describe(call.server, name, engine)
    if not call.anthropic:
        return found
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": rfc3339(found["created"]),
        "lifecycle": "active",
        "max_input_tokens": found["max_model_len"],
        "max_tokens": found["max_model_len"],
    }


def _describe(state: ServerState, name: str, engine: TextEngine) -> dict[str, Any]:
    """A model's entry."""
    real, ready = engine.names[0], state.link.ready
    images = engine.image_limits
    entry = {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "phalanx",
        "max_model_len": ready.max_model_len if ready is not None and ready.model == engine.model else None,
        "root": real,
        "parent": None if name == real else real,
        "permission": [],
        "input_modalities": ["text", "image"] if images is not None else ["text"],
    }
    if images is not None:
        entry["images"] = images
    if engine.text is not None and engine.text.family:
        entry["chat_template"] = False
    if state.models is not None:
        entry["status"] = state.models.status(engine)
        if notes := state.config.models[engine.model].notes:
            entry["notes"] = notes
    return entry


ROUTES = [
    Route("/v1/models", models, method="GET", also=("/models",), both=True),
    Route("/v1/models/status", status, method="GET"),
    Route("/v1/models/select", select, SelectRequest),
    Route("/v1/models/{model}", model, method="GET", both=True),
]
