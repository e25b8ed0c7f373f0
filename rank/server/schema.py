"""The requests that clients send: their fields, and what is refused before any work is done.

Unknown fields are ignored, as other servers do, but those that would change the answer are refused (unsupported.py). A
known one with a wrong value is an error that names the field, the value and what is allowed.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ..sampling_fields import MAX_SEED, MinP, Penalty, RepetitionPenalty, Temperature, TopK, TopP
from . import unsupported
from .api_error import bad
from .constraint import Constraint, StructuredOutputs, guided, need_llguidance, response_format, structured_outputs
from .conversation import Message, Part
from .custom_tools import as_function
from .decoding import show
from .fields import (
    MAX_STOPS,
    AddSpecialTokens,
    CacheSalt,
    Choices,
    Count,
    LogitBias,
    ModelName,
    NamedTokens,
    Positive,
    Priority,
    PromptLogprobs,
    Seed,
    Tail,
    TokenId,
    TopLogprobs,
    doc,
)  # fmt: skip
from .token_fields import TokenFields, texts_or_tokens
from .tool_choice import check_tools, chosen

MAX_SEQUENCES = 4096
MAX_ID = 256
WHOLE_VOCABULARY = 1 << 31  # more than any vocabulary has

SWITCHES = ("enable_thinking", "thinking")  # what templates call the switch of the reasoning
THINKING = {"enabled": True, "disabled": False, "adaptive": None, "auto": None}  # by thinking.type


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Prediction(msgspec.Struct):
    """OpenAI's: a text that the answer will probably have, as when a file is edited."""

    type: Literal["content"]
    content: str | list[Part]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.words() for part in self.content)


class ReasoningOptions(msgspec.Struct):
    """OpenRouter's and, of the first two, OpenAI's."""

    effort: str | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None


class Sampled(TokenFields, kw_only=True):
    """Fields of every request that generates, in all APIs."""

    model: ModelName | None = None
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[LogitBias | None, doc("token ids, as texts, with values from -100 to 100")] = None
    seed: Annotated[Seed | None, doc("the same request gets the same answer; else `--seed`, else drawn")] = None
    stop: Annotated[str | list[str] | dict[str, Any] | None, doc(
        "up to 64 texts; the answer ends before the first that comes"
    )] = None  # fmt: skip
    stop_token_ids: Annotated[list[TokenId] | None, doc("tokens that end the answer")] = None
    ignore_eos: Annotated[bool | None, doc("go on after the model's own end")] = None
    min_tokens: Annotated[Count | None, doc(
        "no end before so many tokens, neither by end tokens nor by stop texts"
    )] = None  # fmt: skip
    include_stop_str_in_output: Annotated[bool | None, doc(
        "the answer ends after the stop text instead of before it"
    )] = None  # fmt: skip
    skip_special_tokens: Annotated[bool | None, doc("false shows them in the answer")] = None
    stream: Annotated[bool | None, doc("server-sent events")] = None
    user: Annotated[str | None, doc("ignored")] = None
    metadata: Annotated[dict[str, Any] | None, doc("ignored")] = None
    store: Annotated[bool | None, doc("ignored: answers are not kept")] = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None

    def stops(self) -> list[str]:
        """The stop strings; {"Single": …} and {"Multi": […]} are how candle-vLLM's examples write them."""
        stop = self.stop
        if isinstance(stop, dict):
            stop = stop.get("Single", stop.get("Multi", ""))
        if stop is None:
            stop = []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(text, str) and text for text in stop):
            raise bad("stop", f"stop is {show(self.stop)}: expected a text, or a list of texts, none of them empty")
        if len(stop) > MAX_STOPS:
            raise bad("stop", f"stop has {len(stop)} texts, at most {MAX_STOPS} are allowed")
        return stop

    def check(self) -> None:
        super().check()
        self.stops()
        if (self.seed or 0) > MAX_SEED:
            raise bad("seed", f"seed is {show(self.seed)}: it must be at most {MAX_SEED}")


class Common(Sampled, kw_only=True):
    """Fields of chat completions and completions."""

    prompt_field: ClassVar[str]  # where the prompt is
    cut_to_context: ClassVar[bool] = False  # a limit that the context does not leave is lowered instead of refused

    n: Annotated[Choices | None, doc("choices for each prompt")] = None
    best_of: Annotated[int | None, doc("only as large as `n`")] = None
    use_beam_search: Annotated[bool | None, doc("only false")] = None
    max_tokens: Annotated[Count | None, doc(
        "longest answer; else `--max-tokens`, the model's own, or what the context leaves. 0 where only the prompt is "
        "asked back"
    )] = None  # fmt: skip
    stream_options: Annotated[StreamOptions | None, doc("`include_usage`, `continuous_usage_stats`")] = None
    echo: Annotated[bool | None, doc(
        "`/v1/completions` only: the prompt before the answer, and its `logprobs` before the answer's"
    )] = None  # fmt: skip
    return_token_ids: Annotated[bool | None, doc("`token_ids` and `prompt_token_ids` of each choice")] = None
    return_tokens_as_token_ids: Annotated[bool | None, doc("`logprobs` name tokens as `token_id:ID`")] = None
    add_special_tokens: AddSpecialTokens | None = None
    response_format: Annotated[dict[str, Any] | None, doc(
        "type `text`, `json_object`, with or without a `schema`, or `json_schema` with its `schema`; the answer keeps "
        "to it. Keywords that cannot be enforced are passed over, with `strict` rejected"
    )] = None  # fmt: skip
    prompt_logprobs: Annotated[PromptLogprobs | None, doc(
        "how many likely tokens beside each token of the prompt; -1: the whole vocabulary, for as many tokens of "
        "prompts as times the vocabulary are at most 262,144; not in streams"
    )] = None  # fmt: skip
    logprob_token_ids: Annotated[NamedTokens | None, doc(
        "log probabilities of these tokens instead of the likeliest; needs `logprobs`"
    )] = None  # fmt: skip
    truncate_prompt_tokens: Annotated[Tail | None, doc(
        "only the last so many tokens of a prompt are read; -1: as many as the context leaves"
    )] = None  # fmt: skip
    truncation_side: Annotated[Literal["left", "right"] | None, doc(
        "with `truncate_prompt_tokens`: `left`, the prompt's beginning is cut off, or `right`, its end"
    )] = None  # fmt: skip
    guided_json: Annotated[str | dict[str, Any] | None, doc(
        "a JSON schema that the answer keeps to, as an object or a text"
    )] = None  # fmt: skip
    guided_regex: Annotated[str | None, doc("a regular expression that the whole answer matches")] = None
    guided_choice: Annotated[list[str] | None, doc("the answer is one of these texts")] = None
    guided_grammar: Annotated[str | None, doc("a grammar for the answer, in llguidance's Lark or in GBNF")] = None
    guided_whitespace_pattern: Annotated[str | None, doc(
        "a regular expression of what `guided_json` may have between its tokens"
    )] = None  # fmt: skip
    structured_outputs: Annotated[StructuredOutputs | None, doc(
        "vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`; JSON has at each gap nothing, a blank, or "
        "a newline with up to 20 blanks, or what `whitespace_pattern` says, or nothing with `disable_any_whitespace`"
    )] = None  # fmt: skip

    def constraint(self) -> Constraint | None:
        """The constraint on the answer. Raises ApiError."""
        guides = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        space = self.guided_whitespace_pattern
        if all(one is None for one in (*guides, space, self.structured_outputs, self.response_format)):
            return None
        need_llguidance()
        found = guided("guided_", *guides, space)
        if self.structured_outputs is not None:
            found += structured_outputs(self.structured_outputs)
        if self.response_format and (form := response_format("response_format", self.response_format)):
            found.append(form)
        if len(found) > 1:
            raise bad(found[1].field, f"{found[0].field} and {found[1].field} exclude each other: give one of them")
        return found[0] if found else None

    def limit(self) -> int | None:
        """A choice's max_tokens, where the request limits them."""
        return self.max_tokens

    def prompt_likeliest(self) -> int:
        """Number of likeliest tokens to list for each token of the prompt; WHOLE_VOCABULARY: all tokens."""
        if self.prompt_logprobs is None:
            return -1
        return WHOLE_VOCABULARY if self.prompt_logprobs < 0 else self.prompt_logprobs

    def likeliest(self) -> int:
        """How many top log probabilities are wanted for each token; -1: no log probabilities at all."""
        return -1

    def parallel_calls(self) -> bool:
        """Whether an answer may have several tool calls."""
        return True

    def characters(self) -> int:
        """Nearly how many are to be tokenised."""
        raise NotImplementedError

    def sequences(self) -> int:
        return self.n or 1

    def check(self) -> None:
        super().check()
        n = self.n or 1
        if self.best_of is not None and self.best_of != n:
            raise bad("best_of", f"best_of is {show(self.best_of)} with n {n}: only best_of equal to n is supported")
        if self.use_beam_search:
            raise bad("use_beam_search", "use_beam_search is true: beam search is not supported, leave it out")
        self.constraint()
        if (self.allowed_token_ids or self.bad_words) and self.constraint() is not None:
            name = "allowed_token_ids" if self.allowed_token_ids else "bad_words"
            raise bad(name, f"{name} and an output's format exclude each other: leave one of them out")
        limit = self.limit()
        if limit == 0 and not (self.echo or self.prompt_likeliest() >= 0):
            raise bad("max_tokens", "max_tokens is 0: it must be at least 1, unless the prompt is asked back (echo)")
        if self.prompt_likeliest() >= 0 and n > 1:
            raise bad("n", f"n is {n} with log probabilities of the prompt: they are given with n 1 only")
        if self.truncate_prompt_tokens == 0:
            raise bad("truncate_prompt_tokens", "truncate_prompt_tokens is 0: it must be at least 1, or -1")
        if self.logprob_token_ids and self.likeliest() < 0:
            raise bad("logprob_token_ids", f"logprob_token_ids is {show(self.logprob_token_ids)}: it needs logprobs")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs", "prompt_logprobs come with whole answers only: leave out stream")
        if self.min_tokens and limit and self.min_tokens > limit:
            raise bad("min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens {limit}")


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.CHAT

    messages: Annotated[str | list[Message], doc(
        "roles are system, developer, user, assistant, tool and function; content is text or parts of type `text` or "
        "`image_url`, where the model takes images. A text alone is one message of the user"
    )]  # fmt: skip
    max_completion_tokens: Annotated[Positive | None, doc("goes before `max_tokens`")] = None
    logprobs: Annotated[bool | None, doc("log probabilities of the answer's tokens")] = None
    top_logprobs: Annotated[TopLogprobs | None, doc("how many likely tokens beside each; needs `logprobs`")] = None
    tools: Annotated[list[dict[str, Any]] | None, doc(
        "functions that the model may call, where its template takes tools; arguments keep to the schema where a tool "
        "is `strict` or a call is required. Custom tools (`type` `custom`) take a text, which keeps to a `grammar`: a "
        "`regex`, or `lark` where the model writes texts in calls as they are; else the model is only shown it. None: "
        "those of the tool servers (`--mcp-config`), under the name `server_tool`; `[]`: none at all"
    )] = None  # fmt: skip
    tool_choice: Annotated[str | dict[str, Any] | None, doc(
        "`auto`, `none`, `required`, the name of a function or a custom tool, or `allowed_tools`"
    )] = None  # fmt: skip
    parallel_tool_calls: Annotated[bool | None, doc("false keeps the first call only")] = None
    thinking: Annotated[bool | dict[str, Any] | None, doc(
        'true, false or `{"type": "enabled"}`: let the model reason; `budget_tokens` is as `thinking_token_budget`'
    )] = None  # fmt: skip
    enable_thinking: Annotated[bool | None, doc("the same; goes before `thinking`")] = None
    reasoning_effort: Annotated[str | None, doc("handed to the template; `none` switches reasoning off")] = None
    verbosity: Annotated[str | None, doc("handed to the template")] = None
    reasoning: Annotated[ReasoningOptions | None, doc(
        "`effort`, `enabled`, `exclude`, `max_tokens`: the same in one object; `summary` is ignored"
    )] = None  # fmt: skip
    include_reasoning: Annotated[bool | None, doc("false leaves the reasoning out of the answer")] = None
    chat_template: Annotated[str | None, doc("rejected: the server's option `--chat-template` sets it")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc(
        "variables for the template; switches are true or false, not texts"
    )] = None  # fmt: skip
    add_generation_prompt: Annotated[bool | None, doc(
        "whether the prompt ends where the assistant begins; true unless the last message goes on"
    )] = None  # fmt: skip
    continue_final_message: Annotated[bool | None, doc("go on with the last message, which is the assistant's")] = None
    prediction: Annotated[Prediction | None, doc(
        '`{"type": "content", "content": …}`: what the answer will probably have, which makes it come sooner '
        "(docs/speculation.md) and never changes it"
    )] = None  # fmt: skip
    conversation_id: Annotated[str | None, doc(
        "of a conversation that is recorded: one that the server has given, or the client's own; rejected where the "
        "chat is not recorded, unless `record_conversation` is false"
    )] = None  # fmt: skip
    record_conversation: Annotated[bool | None, doc(
        "true: the server remembers this exchange under `conversation_id`, and `messages` are only what is new in it; "
        "else as `--record-conversation` says"
    )] = None  # fmt: skip

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def likeliest(self) -> int:
        return (self.top_logprobs or 0) if self.logprobs else -1

    def parallel_calls(self) -> bool:
        return self.parallel_tool_calls is not False

    def effort(self) -> str | None:
        """How much the model is to think, in the template's words."""
        return self.reasoning_effort or (self.reasoning.effort if self.reasoning else None)

    def thinks(self) -> bool | None:
        """Whether the model is to think; None where the request leaves it open."""
        for name in SWITCHES:  # they go before the fields in the template, too
            if (switch := (self.chat_template_kwargs or {}).get(name)) is not None:
                return bool(switch)
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None:
            return THINKING[self.thinking.get("type", "auto")] if isinstance(self.thinking, dict) else self.thinking
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        return False if self.effort() == "none" else None  # few templates know this effort; most have a switch

    def thinking_budget(self) -> int | None:
        """Anthropic and OpenRouter have names of their own for it."""
        if self.thinking_token_budget is None and isinstance(self.thinking, dict):
            budget = self.thinking.get("budget_tokens")
            return int(budget) if isinstance(budget, float) and budget.is_integer() else budget
        limit = self.reasoning.max_tokens if self.reasoning is not None else None
        return limit if self.thinking_token_budget is None else self.thinking_token_budget

    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    def characters(self) -> int:
        tools = len(msgspec.json.encode(self.tools)) if self.tools else 0
        tools += len(self.prediction.text()) if self.prediction is not None else 0
        return tools + sum(message.characters() for message in self.conversation())

    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, as functions."""
        return [as_function(tool) for tool in self.chosen()] or None

    def chosen(self) -> list[dict[str, Any]]:
        """The tools in the request's own form."""
        return chosen(self.tools, self.tool_choice)

    def conversation(self) -> list[Message]:
        """The messages; a text alone is one of the user."""
        return [Message("user", self.messages)] if isinstance(self.messages, str) else self.messages

    def check(self) -> None:
        super().check()
        if self.echo:
            raise bad("echo", "echo is for /v1/completions; a chat returns only the answer")
        if self.chat_template is not None:
            raise bad("chat_template", "chat_template in a request is not supported: the server's option sets it")
        if self.top_logprobs and not self.logprobs:
            raise bad("top_logprobs", f'top_logprobs is {self.top_logprobs}, which needs "logprobs": true')
        if self.continue_final_message and self.add_generation_prompt:
            raise bad("continue_final_message", "continue_final_message and add_generation_prompt exclude each other")
        kind = self.thinking.get("type", "auto") if isinstance(self.thinking, dict) else "auto"
        if not isinstance(kind, str) or kind not in THINKING:
            raise bad("thinking", f"thinking.type is {show(kind)}: expected one of {', '.join(THINKING)}")
        for name, value in (self.chat_template_kwargs or {}).items():
            at = f"chat_template_kwargs.{name[:100]}"
            if isinstance(value, str) and (name in SWITCHES or value.lower() in ("true", "false")):
                raise bad(at, f"{at} is {show(value)}, a text, which templates take for true: send true or false")
            if name in SWITCHES and not isinstance(value, int | None):
                raise bad(at, f"{at} is {show(value)}: send true or false")
        budget = self.thinking_budget()
        if budget is not None and (not isinstance(budget, int) or budget < 0):
            raise bad("thinking_token_budget", f"the limit of the reasoning is {show(budget)}: it must be at least 0")
        self._check_messages()
        self.check_tools()

    def check_recorded(self) -> None:
        """Checks that a recorded conversation asks for what can be recorded. Raises ApiError 400."""
        if self.conversation_id is not None and not 0 < len(self.conversation_id) <= MAX_ID:
            count = len(self.conversation_id)
            raise bad("conversation_id", f"conversation_id has {count} characters: expected 1 to {MAX_ID}")
        if (self.n or 1) > 1:
            raise bad("n", f"n is {self.n} with record_conversation: one answer is recorded, ask for one")
        if self.continue_final_message:
            raise bad("continue_final_message", "continue_final_message and record_conversation exclude each other")

    def _check_messages(self) -> None:
        messages = self.conversation()
        if not messages:
            raise bad("messages", "messages is an empty list: give at least one message")
        for i, message in enumerate(messages):
            message.check(f"messages[{i}]")
        if self.continue_final_message and messages[-1].role != "assistant":
            raise bad(
                "continue_final_message",
                f"continue_final_message needs a last message of the assistant, it is of {show(messages[-1].role)}",
            )

    def check_tools(self) -> None:
        """The tools, and whether tool_choice fits them. Raises ApiError 400."""
        check_tools(self.tools, self.tool_choice)


class CompletionRequest(Common, kw_only=True):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.COMPLETION

    prompt: Annotated[str | list[str | int | list[int]], doc("a text, token ids, or a list of either")]
    suffix: Annotated[str | None, doc("rejected: it needs a model trained to fill in the middle")] = None
    logprobs: Annotated[TopLogprobs | None, doc("how many likely tokens beside each token of the answer")] = None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt as text or token ids."""
        return texts_or_tokens("prompt", self.prompt)

    def likeliest(self) -> int:
        return -1 if self.logprobs is None else self.logprobs

    def prompt_likeliest(self) -> int:
        return max(super().prompt_likeliest(), self.likeliest() if self.echo else -1)

    def characters(self) -> int:
        return sum(len(one) for one in self.prompts() if isinstance(one, str))

    def sequences(self) -> int:
        return len(self.prompts()) * (self.n or 1)

    def check(self) -> None:
        super().check()
        if (count := self.sequences()) > MAX_SEQUENCES:
            raise bad(
                "prompt",
                f"{len(self.prompts())} prompts with n {self.n or 1} are {count} sequences: "
                f"at most {MAX_SEQUENCES} are allowed in a request",
            )
        if self.suffix:
            raise bad("suffix", "suffix is not supported: it needs a model trained to fill in the middle")
