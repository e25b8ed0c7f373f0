"""What each field of a request means, for docs/api.md and OpenAPI. The requests' structs have types and limits."""

from __future__ import annotations

MEANINGS = {
    # all that generate
    "model": "any name gets the one model; with `--strict` another name gets 404",
    "user": "ignored",
    "metadata": "ignored",
    "store": "ignored: answers are not kept",
    "prompt_cache_key": "ignored: prefixes are found by themselves",
    "prompt_cache_retention": "ignored",
    "safety_identifier": "ignored",
    "service_tier": "ignored: `priority` orders requests",
    "prediction": "ignored: it would only make the answer come sooner",
    "priority": "a lower number goes first",
    "cache_salt": "cached prefixes are shared only between requests with the same salt",
    "add_special_tokens": "whether the tokenizer adds its own; of a chat's prompt only if true",
    # chat and completions
    "temperature": "0 is greedy",
    "top_k": "0 or -1 keeps all tokens",
    "top_p": "nucleus; 0 is greedy, 1 keeps all",
    "min_p": "relative to the likeliest token",
    "repetition_penalty": "1 is none; prompt and output count",
    "repeat_last_n": "`repetition_penalty` looks at the last so many tokens; -1: at all; 0: at none",
    "presence_penalty": "0 is none",
    "frequency_penalty": "0 is none",
    "logit_bias": "token ids, as texts, with values from -100 to 100",
    "seed": "the same request gets the same answer; else `--seed`, else drawn",
    "n": "choices for each prompt",
    "best_of": "only as large as `n`",
    "use_beam_search": "only false",
    "stop": "up to 64 texts; the answer ends before the first that comes",
    "stop_token_ids": "tokens that end the answer",
    "ignore_eos": "go on after the model's own end",
    "min_tokens": "no end before so many tokens",
    "max_tokens": "longest answer; else `--max-tokens`, the model's own, or what the context leaves. 0 where only the "
    "prompt is asked back",
    "stream": "server-sent events",
    "stream_options": "`include_usage`, `continuous_usage_stats`",
    "echo": "`/v1/completions` only: the prompt before the answer, and its `logprobs` before the answer's",
    "logprob_token_ids": "log probabilities of these tokens instead of the likeliest; needs `logprobs`",
    "allowed_token_ids": "no other tokens are sampled",
    "bad_words": "texts that the answer never has, as tokens spell them alone or behind a blank; up to 256",
    "thinking_token_budget": "most tokens of reasoning, which is closed then, where the model has tokens around it",
    "truncate_prompt_tokens": "only the last so many tokens of a prompt are read; -1: as many as the context leaves",
    "prompt_logprobs": "how many likely tokens beside each token of the prompt; not in streams",
    "return_token_ids": "`token_ids` and `prompt_token_ids` of each choice",
    "skip_special_tokens": "false shows them in the answer",
    "include_stop_str_in_output": "the answer ends after the stop text instead of before it",
    "response_format": "type `text`, `json_object`, or `json_schema` with its `schema`, which the answer keeps to; "
    "`strict` or not",
    "guided_json": "a JSON schema that the answer keeps to, as an object or a text",
    "guided_regex": "a regular expression that the whole answer matches",
    "guided_choice": "the answer is one of these texts",
    "guided_grammar": "a grammar for the answer, in llguidance's Lark or in GBNF",
    "structured_outputs": "vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`",
    # chat
    "messages": "roles are system, developer, user, assistant, tool and function; content is text or parts of type "
    "`text`. A text alone is one message of the user",
    "max_completion_tokens": "goes before `max_tokens`",
    "logprobs": "of the answer's tokens; in a completion how many likely tokens beside each, 0 to 20",
    "top_logprobs": "how many likely tokens beside each; needs `logprobs`",
    "tools": "functions that the model may call, where its template takes tools; arguments keep to the schema where a "
    "tool is `strict` or a call is required. Custom tools (`type` `custom`) take a text, which keeps to a `grammar`: a "
    "`regex`, or `lark` where the model writes texts in calls as they are. None: those of the tool servers "
    "(`--mcp-config`), under the name `server_tool`; `[]`: none at all",
    "tool_choice": "`auto`, `none`, `required`, the name of a function or a custom tool, or `allowed_tools`",
    "parallel_tool_calls": "false keeps the first call only",
    "thinking": 'true, false or `{"type": "enabled"}`: let the model reason; `budget_tokens` is as '
    "`thinking_token_budget`",
    "enable_thinking": "the same; goes before `thinking`",
    "reasoning_effort": "handed to the template; `none` switches reasoning off",
    "verbosity": "handed to the template",
    "reasoning": "`effort`, `enabled`, `exclude`, `max_tokens`: the same in one object",
    "include_reasoning": "false leaves the reasoning out of the answer",
    "conversation_id": "of a conversation that is recorded: one that the server has given, or the client's own",
    "record_conversation": "true: the server remembers this exchange under `conversation_id`, and `messages` are only "
    "what is new in it; else as `--record-conversation` says",
    "chat_template": "refused: the server's option `--chat-template` sets it",
    "chat_template_kwargs": "variables for the template",
    "add_generation_prompt": "whether the prompt ends where the assistant begins; true unless the last message goes on",
    "continue_final_message": "go on with the last message, which is the assistant's",
    # completions
    "prompt": "a text, token ids, or a list of either",
    "suffix": "refused: it needs a model trained to fill in the middle",
    # embeddings
    "input": "a text, token ids, or a list of either, up to 4096",
    "encoding_format": "`float` or `base64`",
    "embedding_type": "`mean`, `last` or `cls`, the first: which hidden states make the vector; else as the model says",
    "normalize": "to length 1, unless false",
    "dimensions": "keep the first so many, for models trained for that",
    # /v1/messages
    "CountRequest.messages": "roles are user and assistant; blocks of type `text`, `tool_use`, `tool_result`, "
    "`thinking`. A last message of the assistant is continued",
    "system": "a text, or blocks of type `text`",
    "CountRequest.tools": "tools with an `input_schema`, which the client runs; `strict` holds their arguments to it",
    "CountRequest.tool_choice": '`{"type": "auto"}`, `any`, `tool` with a name, or `none`; `disable_parallel_tool_use` '
    "keeps the first call only",
    "CountRequest.thinking": "`enabled`, `adaptive` or `disabled`. `budget_tokens` is no limit here: `max_tokens` "
    "counts thoughts and answer",
    "output_config": "`effort`, handed to the template; `format`, a JSON schema that the answer keeps to",
    "output_format": "the beta's name for `output_config.format`",
    "MessagesRequest.max_tokens": "longest answer; at most what the context leaves",
    "stop_sequences": "as `stop`",
    # /v1/models/select
    "SelectRequest.model": "the name of the model to load",
    "SelectRequest.model_id": "the same under candle-vLLM's name",
    # /v1/responses
    "ResponsesRequest.input": "a text of the user, or items: messages, function_call, function_call_output, "
    "custom_tool_call, custom_tool_call_output, reasoning, those of tool servers",
    "instructions": "the system message",
    "previous_response_id": "go on from a response that is kept (`--response-store`)",
    "ResponsesRequest.store": "false keeps the response out of the store",
    "background": "answer at once; the response is made meanwhile and asked for by its id",
    "max_output_tokens": "longest answer, its reasoning included",
    "ResponsesRequest.tools": "of type `function`, which the client runs (`strict` holds their arguments to it), "
    "`custom`, whose input is a text (`format`: `text`, or `grammar` with `syntax` and `definition`), and `mcp`: the "
    "tool server of `--mcp-config` with this `server_label`, whose calls are made here (`allowed_tools`, "
    "`require_approval`)",
    "ResponsesRequest.max_tool_calls": "how many calls of tool servers are made; at most 64",
    "ResponsesRequest.tool_choice": "`auto`, `none`, `required`, the name of a function or a custom tool, a tool "
    "server (`mcp`) or one of its tools, or `allowed_tools`",
    "ResponsesRequest.reasoning": "`effort` is handed to the template, as `reasoning_effort`; `summary` is ignored",
    "text": "`format` of type `text`, `json_object` or `json_schema`, which the answer keeps to; `verbosity`, "
    "handed to the template",
    "include": "only `reasoning.encrypted_content`, of which there is none",
    "truncation": "only `disabled`",
    "ResponsesRequest.metadata": "comes back in the response",
    # /v1/rerank, /v1/score
    "query": "what the documents are to fit",
    "documents": 'texts, or objects with "text"',
    "top_n": "only the best so many",
    "return_documents": "false leaves the texts out",
    "instruction": "what a reranker is told to look for",
    "text_1": "a text for all of `text_2`, or one for each",
    "text_2": "a text or several",
    # /v1/batches
    "input_file_id": "an uploaded file of request lines ([docs/batch.md](batch.md))",
    "endpoint": "which one all lines are for",
    "completion_window": "`24h`, or another time from `1h` to `30d`: what is not answered then is given up",
    "BatchRequest.metadata": "comes back in the batch",
    # /v1/models/select
    "model_id": "candle-vLLM's name for `model`",
    # /tokenize, /detokenize
    "content": "a text, as llama.cpp has it",
    "TokenizeRequest.add_special_tokens": "whether the tokenizer adds its own to `prompt`; to a conversation's only if "
    "true",
    "add_special": "the same for `content`; false unless given",
    "with_pieces": "`tokens` has objects with `id` and `piece`: the token's text, or its bytes where they are no text",
    "return_token_strs": "`token_strs`: each token's text",
    "tokens": "token ids",
    "TokenizeRequest.prompt": "a text; or send `messages`",
    "TokenizeRequest.messages": "a conversation; its prompt's tokens are the answer",
}


def meaning(kind: type, field: str) -> str:
    """What a field of a kind of request means: the words for this kind, or for all."""
    own = (MEANINGS.get(f"{one.__name__}.{field}") for one in kind.__mro__)
    return next(filter(None, own), "") or MEANINGS[field]
