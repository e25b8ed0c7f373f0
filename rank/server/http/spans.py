"""The span of a request: its attributes, by OpenTelemetry's conventions for HTTP and generative AI and by vLLM's names.

https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..session import Session
from ..tracing import CACHED, INPUT, OUTPUT

if TYPE_CHECKING:
    from ..otel import RequestTrace
    from .handler import Handler

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}
# The attributes that fields of requests become.
ASKED = {
    "model": "model", "max_tokens": "max_tokens", "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "seed": "seed",
    "n": "choice.count", "stream": "stream", "dimensions": "dimensions",
}  # fmt: skip


def asked(path: str, request: Any, served: str) -> dict[str, Any]:
    """Attributes of a request whose body has been read. path: its route's; served: the model's name in answers."""
    found: dict[str, Any] = {"gen_ai.provider.name": "phalanx", "gen_ai.operation.name": OPERATIONS.get(path)}
    found["gen_ai.request.model"] = found["gen_ai.response.model"] = served
    for name, attribute in ASKED.items():
        value = getattr(request, name, None)
        if isinstance(value, str | bool | int | float):
            found[f"gen_ai.request.{attribute}"] = value
    return found


def generated(session: Session) -> dict[str, Any]:
    """Attributes of what was generated, and in which time."""
    usage = session.usage()
    found = {
        INPUT: usage["prompt_tokens"],
        CACHED: usage["prompt_tokens_details"]["cached_tokens"],
        OUTPUT: usage["completion_tokens"],
        "gen_ai.usage.reasoning.output_tokens": usage["completion_tokens_details"]["reasoning_tokens"],
        "gen_ai.response.finish_reasons": [choice.finish for choice in session.choices if choice.finish],
        "gen_ai.usage.num_sequences": len(session.choices),
    }
    if session.first_token:
        first = session.first_token - session.start
        found |= {"gen_ai.latency.time_to_first_token": first, "gen_ai.response.time_to_first_chunk": first}
    if session.last_token:
        found["gen_ai.latency.e2e"] = session.last_token - session.start
    return found


def latencies(session: Session) -> dict[str, float]:
    """vLLM's attributes of the times that rank 0 has a part in. session: one without rounds of tools."""
    first, last, admitted = session.first_token, session.last_token, session.admitted
    if not (admitted and first and last):
        return {}
    return {
        "gen_ai.latency.time_in_queue": admitted - session.submitted,
        "gen_ai.latency.time_in_model_prefill": first - admitted,
        "gen_ai.latency.time_in_model_decode": last - first,
        "gen_ai.latency.time_in_model_inference": last - admitted,
    }


def end(handler: Handler, trace: RequestTrace, session: Session | None) -> None:
    """The request is answered. session: what was generated for it, if anything was."""
    status = handler.get_status()
    trace.attributes |= {
        "http.request.method": handler.request.method,
        "http.route": handler.label,
        "http.response.status_code": status,
        "url.path": handler.request.path,
        "gen_ai.request.id": handler.request_id,
    }
    if session is not None:
        trace.attributes |= generated(session)
        if len(trace.sessions) == 1:
            trace.attributes |= latencies(trace.sessions[0])
    failed = status >= 500 or (handler.failure and status < 400)  # or a stream has ended in an error
    trace.end(f"{handler.request.method} {handler.label}", handler.failure or str(status) if failed else "")
