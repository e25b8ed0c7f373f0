"""Texts as token ids and back; conversations as the prompts that they become."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from .. import unsupported
from ..api_error import ApiError, bad
from ..conversation import Message
from ..decoding import Body
from ..fields import ModelName, doc
from ..generation import LoadedModel
from ..prompts import chat_prompt, completion_prompts, context_of, rendered_text
from ..schema import ChatRequest, CompletionRequest
from .chat import with_server_tools
from .routes import Call, Route


class TokenizeRequest(Body, kw_only=True):
    """POST /tokenize, as vLLM has it (prompt or messages) or llama.cpp (content)."""

    refused: ClassVar[dict[str, unsupported.Field]] = {
        "parse_special": unsupported.Field("control tokens in a text are always taken as such", (True,), default=True)
    }

    model: ModelName | None = None
    prompt: Annotated[str | None, doc("a text; or send `messages`")] = None
    content: Annotated[str | None, doc("a text, as llama.cpp has it")] = None
    messages: Annotated[str | list[Message] | None, doc("a conversation; its prompt's tokens are the answer")] = None
    tools: Annotated[list[dict[str, Any]] | None, doc("as in a chat")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc("as in a chat")] = None
    add_generation_prompt: Annotated[bool | None, doc("as in a chat")] = None
    continue_final_message: Annotated[bool | None, doc("as in a chat")] = None
    add_special_tokens: Annotated[bool | None, doc(
        "whether the tokenizer adds its own to `prompt`; to a conversation's only if true"
    )] = None  # fmt: skip
    add_special: Annotated[bool | None, doc("the same for `content`; false unless given")] = None
    return_token_strs: Annotated[bool | None, doc("`token_strs`: each token's text")] = None
    with_pieces: Annotated[bool | None, doc(
        "`tokens` has objects with `id` and `piece`: the token's text, or its bytes where they are no text"
    )] = None  # fmt: skip

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

    tokens: Annotated[list[int], doc("token ids")]
    model: ModelName | None = None

    def characters(self) -> int:
        return len(self.tokens)


async def tokenize(call: Call) -> dict[str, Any]:
    """Token ids of a text, or of the prompt that a conversation becomes."""
    return await call.engine.prepare(call.request, _tokenize, call.owner)


def _tokenize(model: LoadedModel, request: TokenizeRequest) -> dict[str, Any]:
    text = model.text
    meant = request.meant()
    if isinstance(meant, ChatRequest):
        tokens = text.run(chat_prompt, meant, model.ready, model.thinking).tokens
    else:
        tokens = text.run(completion_prompts, meant, model.ready)[0].tokens
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
    return await call.engine.prepare(call.request, _detokenize, call.owner)


def _detokenize(model: LoadedModel, request: DetokenizeRequest) -> dict[str, Any]:
    size = model.ready.vocab_size
    if wrong := next((token for token in request.tokens if not 0 <= token < size), None):
        raise ApiError(400, f"tokens holds token id {wrong}: this model's tokens are 0 to {size - 1}", "tokens")
    text = model.text.tokenizer.decode(request.tokens)
    return {"prompt": text, "content": text}


async def count_chat(call: Call) -> dict[str, Any]:
    """How many tokens the prompt of a chat request has, as llama.cpp's server tells it."""
    return input_tokens(await call.engine.prepare(with_server_tools(call, call.request), count_prompt, call.owner))


def count_prompt(model: LoadedModel, request: ChatRequest) -> int:
    """How many tokens a chat's prompt has."""
    return len(model.text.run(chat_prompt, request, model.ready, model.thinking).tokens)


def input_tokens(count: int) -> dict[str, Any]:
    """OpenAI's answer to how many tokens a prompt has."""
    return {"object": "response.input_tokens", "input_tokens": count}


async def apply_template(call: Call) -> dict[str, str]:
    """The prompt that the model's template makes of a chat request, as a text."""
    return {"prompt": await call.engine.prepare(call.request, _render, call.owner)}


def _render(model: LoadedModel, request: ChatRequest) -> str:
    return model.text.run(rendered_text, request, model.ready, model.thinking)


ROUTES = [
    Route("/tokenize", tokenize, TokenizeRequest, also=("/v1/tokenize",)),
    Route("/detokenize", detokenize, DetokenizeRequest, also=("/v1/detokenize",)),
    Route("/v1/chat/completions/input_tokens", count_chat, ChatRequest, also=("/chat/completions/input_tokens",)),
    Route("/apply-template", apply_template, ChatRequest),
]
