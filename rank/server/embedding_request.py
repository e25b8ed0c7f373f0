"""The request for embeddings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from . import unsupported
from .api_error import bad
from .decoding import Body
from .fields import AddSpecialTokens, CacheSalt, ModelName, Positive, Priority, doc
from .schema import MAX_SEQUENCES
from .token_fields import texts_or_tokens

Pooling = Literal["mean", "last", "cls"]
POOLINGS = get_args(Pooling)


class EmbeddingRequest(Body, kw_only=True):
    """POST /v1/embeddings."""

    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.EMBEDDING

    input: Annotated[str | list[str | int | list[int]], doc("a text, token ids, or a list of either, up to 4096")]
    model: ModelName | None = None
    encoding_format: Annotated[Literal["float", "base64"] | None, doc("how a vector is written")] = None
    embedding_type: Annotated[Pooling | None, doc(
        "which hidden states make the vector, `cls` the first; else as the model says"
    )] = None  # fmt: skip
    normalize: Annotated[bool | None, doc("to length 1, unless false")] = None
    dimensions: Annotated[Positive | None, doc("keep the first so many, for models trained for that")] = None
    user: Annotated[str | None, doc("ignored")] = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    add_special_tokens: AddSpecialTokens | None = None

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
        count = len(self.prompts())
        if count > MAX_SEQUENCES:
            raise bad("input", f"input has {count} texts: at most {MAX_SEQUENCES} are allowed in a request")
