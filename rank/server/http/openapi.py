"""The server's own description: OpenAPI 3.1 for programs, a page for people."""

from __future__ import annotations

import functools
import html
from typing import Any

import msgspec

from ..api_error import TYPES, ApiError
from ..fields import REFERENCE, properties
from .routes import EVENTS, JSON, PART, Call, Reply, Route, routes
from .upload import PURPOSES

ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}
ANTHROPIC_ERROR = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
        },
    },
    "required": ["type", "error"],
}
FORM = {  # of an upload
    "type": "object",
    "properties": {"purpose": {"enum": list(PURPOSES)}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
}
STYLE = """\
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
code { font: 13px ui-monospace, monospace }
summary { cursor: pointer; padding: .3rem 0 }
td, th { text-align: left; vertical-align: top; padding: .1rem 1rem .1rem 0 }
"""


def openapi(call: Call) -> Reply:
    """This server's endpoints and their fields, as OpenAPI has it."""
    return Reply(description(), headers={"Content-Type": "application/json"})


def page(call: Call) -> Reply:
    """The OpenAPI page for people."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    return Reply(documents(), headers={"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": policy})


@functools.cache
def description() -> bytes:
    """OpenAPI 3.1 as JSON. Schemas of bodies are those that requests are checked with."""
    schemas = list(dict.fromkeys(route.schema for route in routes() if route.schema))
    refs, components = msgspec.json.schema_components(schemas, ref_template=REFERENCE)
    for schema in schemas:
        components[schema.__name__]["properties"] = properties(schema)
    by_schema = dict(zip(schemas, refs, strict=True))
    found: dict[str, dict[str, Any]] = {}
    for route in routes():
        for path in (route.path, *route.also):
            ref = by_schema[route.schema] if route.schema else None
            found.setdefault(path, {})[route.method.lower()] = _operation(route, path, ref)
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Phalanx", "version": "1"},
            "paths": found,
            "components": {
                "schemas": {**components, "Error": ERROR, "AnthropicError": ANTHROPIC_ERROR},
                "responses": {name: _error(name) for name in ("Error", "AnthropicError")},
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
                },
            },
        }
    )


def _error(name: str) -> dict[str, Any]:
    return {
        "description": "an error",
        "content": {JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}},
    }


def _operation(route: Route, path: str, ref: dict[str, Any] | None) -> dict[str, Any]:
    error = {"$ref": f"#/components/responses/{'Error' if route.error is ApiError.body else 'AnthropicError'}"}
    media = (*route.media, EVENTS) if route.render is not None else route.media
    answer: dict[str, Any] = {"description": "the answer"} | ({"content": {one: {} for one in media}} if media else {})
    operation: dict[str, Any] = {
        "summary": route.about,
        "operationId": route.method.lower() + PART.sub(r"\1", path).replace("/", "_").replace("-", "_"),
        "responses": {"200": answer, **{str(status): error for status in TYPES}},
    }
    if parts := PART.findall(path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parts
        ]
    if ref is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": ref}}}
    if route.receive is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": FORM}}}
    if route.needs_key:
        operation["security"] = [{"bearer": []}, {"header": []}, {}]  # {}: a server may have no keys
    return operation


@functools.cache
def documents() -> bytes:
    """One page without scripts: each endpoint with its fields."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>Phalanx</title><style>{STYLE}</style>"]
    parts.append("<h1>Phalanx</h1><p>The same for programs: <a href=openapi.json>openapi.json</a></p>")
    for route in routes():
        head = f"<code>{route.method} {html.escape(route.path)}</code> {html.escape(route.about)}"
        if route.schema is None:
            parts.append(f"<p>{head}</p>")
            continue
        rows = "".join(
            f"<tr><td><code>{name}</code><td>{html.escape(field['description'])}"
            for name, field in properties(route.schema).items()
        )
        parts.append(f"<details><summary>{head}</summary><table><tr><th>field<th>meaning{rows}</table></details>")
    return "\n".join(parts).encode()


ROUTES = [
    Route("/openapi.json", openapi, method="GET", needs_key=False),
    Route("/docs", page, method="GET", needs_key=False, media=("text/html",)),
]
