"""Texts as token ids and back; conversations as the prompts that they become."""

from __future__ import annotations

from typing import Any, ClassVar

from .. import unsupported
from ..api_error import ApiError, bad
from ..conversation import Message
from ..decoding import Body
from ..generation import LoadedModel
from ..prompts import chat_prompt, completion_prompts, context_of, render_chat
from ..schema import ChatRequest, CompletionRequest
from ..text.control import MARK
from .routes import Call, Route


class TokenizeRequest(Body, kw_only=True):
    """POST /tokenize, as vLLM has it (prompt or messages) or llama.cpp (content)."""

    refused: ClassVar[dict[str, unsupported.Field]] = {
        "parse_special": unsupported.Field("control tokens in a text are always taken as such", (True,), default=True)
    }

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: str | list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None

    def meant(self) -> ChatRequest | CompletionRequest:
        """The request whose prompt is meant."""
        if self.messages is None:
            if self.content is None:
                return CompletionRequest(prompt=self.prompt or "", add_special_tokens=self.add_special_tokens)
            return CompletionRequest(
                prompt=self.content, add_special_tokens=bool(self.add_special or self.add_special_tokens)
            )
        names = "messages tools chat_template_kwargs add_generation_prompt continue_final_message add_special_tokens"
        return ChatRequest(**{name: getattr(self, name) for name in names.split()})

    def characters(self) -> int:
        return self.meant().characters()

    def check(self) -> None:
        given = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise bad("prompt", f"{' and '.join(given) or 'none of them'} given: send one of prompt, content, messages")
        self.meant().check()


class DetokenizeRequest(Body, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None

    def characters(self) -> int:
        return len(self.tokens)


async def tokenize(call: Call) -> dict[str, Any]:
    """Token ids of a text, or of the prompt that a conversation becomes."""
    return await call.engine.prepare(call.request, _tokenize)


def _tokenize(model: LoadedModel, request: TokenizeRequest) -> dict[str, Any]:
    text = model.text
    meant = request.meant()
    if isinstance(meant, ChatRequest):
        tokens = chat_prompt(text, meant, model.ready, model.thinking).tokens
    else:
        tokens = completion_prompts(text, meant, model.ready)[0].tokens
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": context_of(model.ready), "tokens": tokens}
    if request.return_token_strs:
        answer["token_strs"] = [text.tokenizer.piece(token).decode(errors="replace") for token in tokens]
    if request.with_pieces:
        answer["tokens"] = [{"id": token, "piece": _piece(text.tokenizer.piece(token))} for token in tokens]
    return answer


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes where they are no text alone."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(call: Call) -> dict[str, Any]:
    """The text of token ids, control tokens included."""
    return await call.engine.prepare(call.request, _detokenize)


def _detokenize(model: LoadedModel, request: DetokenizeRequest) -> dict[str, Any]:
    size = model.ready.vocab_size
    if wrong := next((token for token in request.tokens if not 0 <= token < size), None):
        raise ApiError(400, f"tokens holds token id {wrong}: this model's tokens are 0 to {size - 1}", "tokens")
    text = model.text.tokenizer.decode(request.tokens)
    return {"prompt": text, "content": text}


async def apply_template(call: Call) -> dict[str, str]:
    """The prompt that the model's template makes of a chat request, as a text."""
    return {"prompt": await call.engine.prepare(call.request, _render)}


def _render(model: LoadedModel, request: ChatRequest) -> str:
    return render_chat(model.text, request, model.ready, model.thinking)[0].replace(MARK, "")


ROUTES = [
    Route("/tokenize", tokenize, TokenizeRequest, also=("/v1/tokenize",)),
    Route("/detokenize", detokenize, DetokenizeRequest, also=("/v1/detokenize",)),
    Route("/apply-template", apply_template, ChatRequest),
]
