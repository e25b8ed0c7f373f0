"""Types of requests' fields: their limits, which msgspec checks, and their meanings.

Errors, docs/api.md and OpenAPI have both from here and from the structs of the requests.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ..sampling_fields import MAX_COUNT, MAX_SEED

REFERENCE = "#/components/schemas/{name}"
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_PROMPT_ENTRIES = 1 << 18  # log probabilities of a prompt where each token's are of the whole vocabulary
MAX_STOPS = 64


def doc(meaning: str) -> Meta:
    """The meaning of a field, for docs/api.md and OpenAPI."""
    return Meta(description=meaning)


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Choices = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
PromptLogprobs = Annotated[int, Meta(ge=-1, le=MAX_LOGPROBS)]
Tail = Annotated[int, Meta(ge=-1, le=MAX_COUNT)]
Window = Annotated[int, Meta(ge=-1, le=1 << 16)]
Seed = Annotated[int, Meta(ge=-(1 << 63), extra_json_schema={"maximum": MAX_SEED})]  # msgspec's bounds have 63 bits
TokenId = Annotated[int, Meta(ge=0)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
NamedTokens = Annotated[list[TokenId], Meta(max_length=256)]
LogitBias = Annotated[  # int() refuses to read thousands of digits
    dict[Annotated[str, Meta(pattern="^[0-9]{1,10}$")], Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=1 << 16),
]
Word = Annotated[str, Meta(min_length=1)]
BadWords = Annotated[list[Word], Meta(max_length=256)]
Stops = Annotated[list[Word], Meta(max_length=MAX_STOPS)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
# Fields that several APIs have, with their meaning.
Priority = Annotated[
    int,
    Meta(
        ge=-MAX_COUNT,
        le=MAX_COUNT,
        description="a lower number goes first; other than 0 only with `--client-priorities`",
    ),
]
ModelName = Annotated[str, doc("any name gets the one model; with `--strict` another name gets 404")]
CacheSalt = Annotated[str, doc("cached prefixes are shared only between requests with the same salt")]
AddSpecialTokens = Annotated[bool, doc("whether the tokenizer adds its own; of a chat's prompt only if true")]


@functools.cache
def properties(kind: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each field of a request, which names others as OpenAPI does."""
    _, components = msgspec.json.schema_components([kind], ref_template=REFERENCE)
    found: dict[str, dict[str, Any]] = components[kind.__name__]["properties"]
    for schema in found.values():
        for part in schema.get("anyOf", ()):  # of a field that may be null
            if meaning := part.pop("description", ""):
                schema["description"] = meaning
    return found


def limits(kind: type[msgspec.Struct], name: str) -> str:
    """A field's values, in words; "" if its type says all."""
    field = properties(kind)[name]
    for part in (field, *field.get("anyOf", ())):
        if "enum" in part:
            return ", ".join(part["enum"])
        for low, high in (("minimum", "maximum"), ("minItems", "maxItems")):
            if low in part and high in part:
                return f"{part[low]} to {part[high]}"
            if low in part or high in part:
                return f"{part[low]} or more" if low in part else f"up to {part[high]}"
    return ""


def allowed(kind: type[msgspec.Struct], name: str) -> str:
    """The words of an error for a number, one of a few values, or an object whose keys have a form; "" for others."""
    field, words = properties(kind)[name], limits(kind, name)
    for part in (field, *field.get("anyOf", ())):
        if "enum" in part:
            return f"expected one of {words}"
        if "minimum" in part and "maximum" in part:
            return f"it must be between {part['minimum']} and {part['maximum']}"
        if "pattern" in part.get("propertyNames", ()):
            return f"expected {field['description']}"
    return ""
