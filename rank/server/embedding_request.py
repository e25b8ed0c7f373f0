"""The request for embeddings."""

from __future__ import annotations

from typing import ClassVar

from . import unsupported
from .api_error import bad
from .decoding import Body, show
from .schema import MAX_SEQUENCES, check_ranges
from .token_fields import texts_or_tokens

POOLINGS = ("mean", "last", "cls")


class EmbeddingRequest(Body, kw_only=True):
    """POST /v1/embeddings."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.EMBEDDING

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: str | None = None  # float or base64
    embedding_type: str | None = None  # one of POOLINGS
    normalize: bool | None = None  # to length 1, unless false
    dimensions: int | None = None
    user: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """Each input as text or token ids."""
        return texts_or_tokens("input", self.input)

    def limit(self) -> int | None:
        return 1

    def characters(self) -> int:
        return sum(len(one) for one in self.prompts() if isinstance(one, str))

    def sequences(self) -> int:
        return len(self.prompts())

    def check(self) -> None:
        check_ranges(self)
        count = len(self.prompts())
        if count > MAX_SEQUENCES:
            raise bad("input", f"input has {count} texts: at most {MAX_SEQUENCES} are allowed in a request")
        for name, allowed in (("encoding_format", ("float", "base64")), ("embedding_type", POOLINGS)):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise bad(name, f"{name} is {show(value)}: expected {' or '.join(allowed)}")
