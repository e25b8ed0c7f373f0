"""The requests that clients send: their fields, and what is refused before any work is done.

Unknown fields are ignored, as other servers do, but those that would change the answer are refused (unsupported.py). A
known one with a wrong value is an error that names the field, the value and what is allowed.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import msgspec

from . import unsupported
from .api_error import bad
from .constraint import Constraint, StructuredOutputs, guided, need_llguidance, response_format, structured_outputs
from .conversation import Message
from .custom_tools import as_function
from .decoding import Body, show
from .token_fields import TokenFields, texts_or_tokens
from .tool_choice import check_tools, chosen

TOKEN_ID = re.compile(r"[0-9]{1,10}")  # int() refuses to read thousands of digits
MAX_CHOICES = 128
MAX_SEQUENCES = 4096
MAX_STOPS = 64
MAX_BIASES = 1 << 16
MAX_LOGPROBS = 20
MAX_NAMED = 256
MAX_ID = 256

# Field: lowest and highest value.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "top_k": (-1, 1 << 31),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "seed": (-(1 << 63), (1 << 64) - 1),
    "n": (1, MAX_CHOICES),
    "min_tokens": (0, 1 << 31),
    "max_tokens": (0, 1 << 31),
    "max_completion_tokens": (1, 1 << 31),
    "max_output_tokens": (1, 1 << 31),
    "priority": (-(1 << 31), 1 << 31),
    "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "dimensions": (1, 1 << 31),
    "thinking_token_budget": (0, 1 << 31),
    "truncate_prompt_tokens": (-1, 1 << 31),
    "repeat_last_n": (-1, 1 << 16),
}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ReasoningOptions(msgspec.Struct):
    """OpenRouter's and, of the first two, OpenAI's."""

    effort: str | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None


class Sampled(TokenFields, kw_only=True):
    """What all that generates takes, whosever API it is."""

    model: str | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | dict[str, Any] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None

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
        check_ranges(self)
        self.stops()
        if (count := len(self.logit_bias or ())) > MAX_BIASES:
            raise bad("logit_bias", f"logit_bias names {count} tokens: at most {MAX_BIASES} are allowed")
        for key, value in (self.logit_bias or {}).items():
            if not TOKEN_ID.fullmatch(key) or not -100 <= value <= 100:
                shown = show({key: value})
                raise bad("logit_bias", f"logit_bias is {shown}: expected token ids with values between -100 and 100")
        if any(token < 0 for token in self.stop_token_ids or ()):
            raise bad("stop_token_ids", f"stop_token_ids is {show(self.stop_token_ids)}: token ids are not negative")


class Common(Sampled, kw_only=True):
    """What chat completions and completions take."""

    prompt_field: ClassVar[str]  # where the prompt is
    cut_to_context: ClassVar[bool] = False  # a limit that the context does not leave is lowered instead of refused

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    max_tokens: int | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    def constraint(self) -> Constraint | None:
        """What the answer must be. Raises ApiError."""
        guides = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        if not any(guides) and self.structured_outputs is None and self.response_format is None:
            return None
        need_llguidance()
        found = guided("guided_", *guides)
        if self.structured_outputs is not None:
            found += structured_outputs(self.structured_outputs)
        if self.response_format and (form := response_format("response_format", self.response_format)):
            found.append(form)
        if len(found) > 1:
            raise bad(found[1].field, f"{found[0].field} and {found[1].field} exclude each other: give one of them")
        return found[0] if found else None

    def limit(self) -> int | None:
        """The most tokens that a choice may have, where the request says so."""
        return self.max_tokens

    def prompt_likeliest(self) -> int:
        """As `likeliest`, beside each token of the prompt."""
        return -1 if self.prompt_logprobs is None else self.prompt_logprobs

    def likeliest(self) -> int:
        """How many of the likeliest tokens are wanted beside each token; -1: no log probabilities at all."""
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
        if len(self.logprob_token_ids or ()) > MAX_NAMED:
            count = len(self.logprob_token_ids or ())
            raise bad("logprob_token_ids", f"logprob_token_ids names {count} tokens: at most {MAX_NAMED} are allowed")
        if self.logprob_token_ids and (self.likeliest() < 0 or min(self.logprob_token_ids) < 0):
            shown = show(self.logprob_token_ids)
            raise bad("logprob_token_ids", f"logprob_token_ids is {shown}: it needs logprobs, and ids are not negative")
        if self.prompt_logprobs is not None and self.stream:
            raise bad("prompt_logprobs", "prompt_logprobs come with whole answers only: leave out stream")
        if self.min_tokens and limit and self.min_tokens > limit:
            raise bad("min_tokens", f"min_tokens is {self.min_tokens}, more than max_tokens {limit}")


class ChatRequest(Common, kw_only=True):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    refused: ClassVar[dict[str, unsupported.Field]] = unsupported.CHAT

    messages: str | list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    thinking: bool | dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    reasoning: ReasoningOptions | None = None
    include_reasoning: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    conversation_id: str | None = None
    record_conversation: bool | None = None

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
        """Whether the model is to think; None where the request does not say."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        if self.thinking is not None:
            return self.thinking.get("type") == "enabled" if isinstance(self.thinking, dict) else self.thinking
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        return False if self.effort() == "none" else None  # few templates know this effort; most have a switch

    def thinking_budget(self) -> int | None:
        """Anthropic and OpenRouter have names of their own for it."""
        if self.thinking_token_budget is None and isinstance(self.thinking, dict):
            return self.thinking.get("budget_tokens")
        limit = self.reasoning.max_tokens if self.reasoning is not None else None
        return limit if self.thinking_token_budget is None else self.thinking_token_budget

    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (self.reasoning and self.reasoning.exclude)

    def characters(self) -> int:
        tools = len(msgspec.json.encode(self.tools)) if self.tools else 0
        return tools + sum(message.characters() for message in self.conversation())

    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call, as functions."""
        return [as_function(tool) for tool in self.chosen()] or None

    def chosen(self) -> list[dict[str, Any]]:
        """The same as the request has them."""
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
        budget = self.thinking_budget()
        if budget is not None and (not isinstance(budget, int) or budget < 0):
            raise bad("thinking_token_budget", f"the limit of the reasoning is {show(budget)}: it must be at least 0")
        self._check_messages()
        self.check_tools()

    def check_recorded(self) -> None:
        """What a conversation that is recorded may ask for. Raises ApiError 400."""
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

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: int | None = None

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
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise bad("logprobs", f"logprobs is {show(self.logprobs)}: it must be between 0 and {MAX_LOGPROBS}")


def check_ranges(request: Body) -> None:
    """The numbers of a request against RANGES."""
    for name, (low, high) in RANGES.items():
        value = getattr(request, name, None)
        if value is not None and not low <= value <= high:  # NaN fails too
            raise bad(name, f"{name} is {show(value)}: it must be between {low} and {high}")
