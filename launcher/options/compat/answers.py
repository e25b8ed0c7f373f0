"""Flags of other servers: sampling, templates, reasoning and tools."""

from __future__ import annotations

from .flag import note, refuse

FLAGS = {
    **refuse(
        "give sampling defaults as flags: --temperature X, --top-p X, --top-k N, …",
        "--override-generation-config X, --preferred-sampling-params X",
    ),
    **refuse("--no-generation-config ignores the model's sampling defaults", "--sampling-defaults X", "model"),
    **refuse("--seed N draws the same for equal requests", "--random-seed X"),
    **refuse(
        "of samplers there are temperature, top-k, top-p, min-p and penalties, in a fixed order",
        """--samplers X, --sampler-seq X, --sampling-seq X, --mirostat X, --mirostat-* X, --dry-* X, --xtc-* X
        --dynatemp-* X, --typical X, --typical-p X, --top-nsigma X, --top-n-sigma X, --adaptive-* X""",
    ),
    **refuse("penalties see the whole text; --repetition-penalty sets how strong they are", "--repeat-last-n X"),
    **refuse(
        "a request says this: `logit_bias`, `ignore_eos`, `skip_special_tokens`",
        "--logit-bias X, -l X, --ignore-eos, --special, -sp",
    ),
    **note("texts of requests are taken as they are", "--escape, -e"),
    **refuse("the texts that end an answer are a request's `stop`", "--reverse-prompt X"),
    **refuse(
        "a request names its schema or grammar: `response_format`, `guided_json`, `guided_grammar`",
        "--grammar X, --grammar-file X, --json-schema X, -j X, --json-schema-file X, -jf X",
    ),
    **refuse("a request may ask for 20 at most", "--max-logprobs X", " ".join(str(count) for count in range(21))),
    **refuse("a request asks for them: `return_token_ids`", "--return-tokens-as-token-ids"),
    **refuse(
        "--thinking and --no-thinking set enable_thinking; requests send other variables as `chat_template_kwargs`",
        "--chat-template-kwargs X, --default-chat-template-kwargs X",
    ),
    **refuse("a template gets each message's content as one text", "--chat-template-content-format X", "auto string"),
    **refuse(
        "--chat-template FILE gives another template",
        "--hf-chat-template-name X, --completion-template X, --trust-request-chat-template",
    ),
    **note("chat templates are Jinja", "--jinja"),
    **refuse("chat templates are Jinja; --chat-template FILE gives another", "--no-jinja"),
    **refuse("answers have the role assistant", "--response-role X", "assistant"),
    **refuse(
        "thoughts come in a field of their own; --reasoning-parser none leaves them in the text",
        "--reasoning-format X",
        "auto deepseek",
    ),
    **note(
        "thoughts come in a field of their own; --reasoning-parser none leaves them in the text", "--enable-reasoning"
    ),
    **refuse("use --thinking or --no-thinking", "--reasoning X, -rea X", "auto"),
    **refuse(
        "a request limits it: `thinking_token_budget`; --no-thinking switches reasoning off",
        "--reasoning-budget X, --reasoning-config X, --reasoning-budget-message X",
        "-1",
    ),
    **refuse("a request says it: `reasoning_effort`", "--reasoning-effort X", "default"),
    **note("the model may always call the tools that a request has", "--enable-auto-tool-choice"),
    **refuse("the format of tool calls is chosen by the model's chat template", "--enforce-parser X"),
    **refuse(
        "write the tool server into a file: --mcp-config FILE (docs/tool-servers.md has its shape)",
        """--mcp-command X, --mcp-args X, --mcp-servers-config X, --mcp-servers-json X, --tool-server X, --tools X
        --tools-runtime X, --agent, -ag""",
    ),
    **refuse("use --reasoning-parser none and --tool-call-parser none", "--skip-chat-parsing"),
    **refuse("a request goes on with its last message by `continue_final_message`", "--prefill-assistant"),
}
