"""How each tool-call format writes calls: a line of a template that teaches it, a call, and pieces of calls."""

import json

DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI = (
    "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)  # fmt: skip
MINIMAX = "]<]minimax[>["

TEMPLATES = {
    "deepseek_v3": "<｜tool▁calls▁begin｜> ... ```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜> ...",
    "gemma": "<start_function_call>",
    "glm45": "<tool_call>{function-name} <arg_key>",
    "granite": "respond with <|tool_call|> followed by a JSON list",
    "harmony": "<|channel|>commentary <|message|>",
    "hermes": "... <tool_call> ...",
    "jamba": "<tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|>",
    "lfm2": "List of tools: <|tool_list_start|>",
    "llama3": "<|python_tag|>",
    "llama_functions": "<function=example_function_name>",
    "deepseek_v32": "<｜DSML｜function_calls>",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "minimax_m2": "<minimax:tool_call>",
    "minimax_m3": "{%- set ns_token = ']<]minimax[>[' -%} {{ ns_token ~ '<tool_call>' }}",
    "mistral": "[TOOL_CALLS]",
    "phi4": "<|tool|> <|/tool|> <|tool_call|>",
    "pythonic": "<|python_start|>",
    "qwen3_coder": "<tool_call> <function=example_function_name>",
    "seed": "<seed:tool_call> <function=",
}


def _tagged(opening, argument, closing):
    """Writes texts as they are and other values as JSON. argument: of the name, the value and whether it is a text."""

    def write(name, arguments):
        values = (
            (key, one, "true") if isinstance(one, str) else (key, json.dumps(one), "false")
            for key, one in arguments.items()
        )
        return opening.format(name) + "".join(argument.format(*one) for one in values) + closing

    return write


def _objects(before, after, key="arguments", listed=False):
    def write(name, arguments):
        one = json.dumps({"name": name, key: arguments}, ensure_ascii=False)
        return before + (f"[{one}]" if listed else one) + after

    return write


def _named(before, after):
    return lambda name, arguments: before.format(name) + json.dumps(arguments) + after


def _python(opening, closing):
    def write(name, arguments):
        return f"{opening}[{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]{closing}"

    return write


def _gemma(name, arguments):
    def write(value):
        if isinstance(value, str):
            return f"<escape>{value}<escape>"
        if isinstance(value, dict):
            return "{" + ",".join(f"{key}:{write(one)}" for key, one in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(write, value)) + "]"
        return json.dumps(value)

    return f"<start_function_call>call:{name}{write(arguments)}<end_function_call>"


def _element(name, value):
    """Lists and objects as MiniMax M3's template writes them, empty ones as JSON."""
    if value and isinstance(value, dict):
        inner = "".join(_element(key, one) for key, one in value.items())
    elif value and isinstance(value, list):
        inner = "".join(_element("item", one) for one in value)
    else:
        inner = value if isinstance(value, str) else json.dumps(value)
    return f"{MINIMAX}<{name}>{inner}{MINIMAX}</{name}>"


def _minimax_m3(name, arguments):
    inner = "".join(_element(key, value) for key, value in arguments.items())
    call = f'{MINIMAX}<invoke name="{name}">{inner}{MINIMAX}</invoke>'
    return f"{MINIMAX}<tool_call>\n{call}\n{MINIMAX}</tool_call>"


def _dsml(block):
    return _tagged(
        f'<｜DSML｜{block}>\n<｜DSML｜invoke name="{{}}">\n',
        '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n',
        f"</｜DSML｜invoke>\n</｜DSML｜{block}>",
    )


WRITE = {
    "deepseek_v3": _named(f"{DEEPSEEK[0]}{DEEPSEEK[1]}function{DEEPSEEK[2]}{{}}\n```json\n",
                          "\n```" + "".join(DEEPSEEK[3:])),
    "deepseek_v31": _named(f"{DEEPSEEK[0]}{DEEPSEEK[1]}{{}}{DEEPSEEK[2]}", "".join(DEEPSEEK[3:])),
    "gemma": _gemma,
    "glm45": _tagged("<tool_call>{}\n", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n", "</tool_call>"),
    "granite": _objects("<|tool_call|>", "", listed=True),
    "harmony": _named("<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", "<|call|>"),
    "hermes": _objects("<tool_call>\n", "\n</tool_call>"),
    "jamba": _objects("<tool_calls>\n", "\n</tool_calls>", listed=True),
    "json": _objects("```json\n", "\n```", listed=True),
    "kimi_k2": _named(f"{KIMI[0]}{KIMI[1]}functions.{{}}:0{KIMI[2]}", "".join(KIMI[3:])),
    "llama3": _objects("<|python_tag|>", "", "parameters"),
    "llama_functions": _named("<function={}>", "</function>"),
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "minimax_m2": _tagged(
        '<minimax:tool_call>\n<invoke name="{}">\n',
        '<parameter name="{}">{}</parameter>\n',
        "</invoke>\n</minimax:tool_call>",
    ),
    "minimax_m3": _minimax_m3,
    "mistral": _named("[TOOL_CALLS]{}[ARGS]", ""),
    "phi4": _objects("functools", "", listed=True),
    "lfm2": _python("<|tool_call_start|>", "<|tool_call_end|>"),
    "pythonic": _python("<|python_start|>", "<|python_end|>"),
    "qwen3_coder": _tagged(
        "<tool_call>\n<function={}>\n", "<parameter={}>\n{}\n</parameter>\n", "</function>\n</tool_call>"
    ),
    "seed": _tagged(
        "<seed:tool_call>\n<function={}>\n", "<parameter={}>{}</parameter>\n", "</function>\n</seed:tool_call>"
    ),
}  # fmt: skip

_OBJECT = ['{"name": "f", ', '{"name": "f", "arguments": {', '"arguments": {', "}}", "}", '"', "[", "]"]
_TAGGED = ["<function=", "<function=f>", "<parameter=k>", "</parameter>", "</function>", "5", "<p", "\n\n"]
_DSML = [
    '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>", '<｜DSML｜parameter name="k" string="false">',
    '<｜DSML｜parameter name="k" string="true">', "</｜DSML｜parameter>", "<｜DSML｜invoke ", "5",
]  # fmt: skip

PARTS = {
    "deepseek_v3": [*DEEPSEEK, "function", "f", "\n```json\n", '{"a"', "}", '"', "```"],
    "deepseek_v31": [*DEEPSEEK, "f", '{"a"', "}", '"', "<｜tool"],
    "gemma": ["<start_function_call>", "<end_function_call>", "call:f{", "call:f{k:<escape>", "<escape>", ",k:", "}",
              "5"],
    "glm45": ["<tool_call>", "<tool_call>f", "</tool_call>", "<arg_key>k</arg_key>", "<arg_key>", "<arg_value>",
              "</arg_value>"],
    "granite": ["<|tool_call|>", "<|tool_call|>[", *_OBJECT],
    "harmony": [
        "<|channel|>commentary to=", " to=functions.", "functions.f", "<|channel|>", "commentary", "<|constrain|>json",
        "<|message|>", "<|message|>{", "}", '"', "<|call|>", "<|end|>", "<|start|>assistant",
        "<|channel|>analysis<|message|>",
    ],
    "hermes": ["<tool_call>", "</tool_call>", "<", *_OBJECT],
    "jamba": ["<tool_calls>", "</tool_calls>", *_OBJECT],
    "json": ["```json", "```", "```json\n[", *_OBJECT],
    "kimi_k2": [*KIMI, "functions.f", ":1", '{"a"', "}", '"'],
    "llama3": ["<|python_tag|>", '{"name": "f", "parameters": {', "<|py", ";", *_OBJECT],
    "llama_functions": ["<function=", "<function=f>", "<function=f>{", "</function>", "{", "}", '"', "<f"],
    "deepseek_v32": ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>", *_DSML],
    "deepseek_v4": ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", *_DSML],
    "minimax_m2": [
        "<minimax:tool_call>", '<invoke name="f">', "</minimax:tool_call>", "</invoke>", '<parameter name="k">',
        "</parameter>", "<invoke ", "5",
    ],
    "minimax_m3": [
        f"{MINIMAX}<tool_call>", f'{MINIMAX}<invoke name="f">', f"{MINIMAX}</invoke>", f"{MINIMAX}</tool_call>",
        f"{MINIMAX}<k>", f"{MINIMAX}</k>", f"{MINIMAX}<item>", f"{MINIMAX}</item>", f"{MINIMAX}<", "5",
    ],
    "mistral": ["[TOOL_CALLS]f", "[TOOL_CALLS]f{", '[TOOL_CALLS][{"name": "f", ', '"arguments": {', "[ARGS]", "{", "}"],
    "phi4": ["functools", "functools[", "<|tool_call|>", "<|/tool_call|>", "funct", *_OBJECT],
    "lfm2": ["<|tool_call_start|>", "<|tool_call_end|>", "[f(", "[f(k=", "k=", "'", '"', ")", "]", ",", "5", "{"],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[f(", "[f(k=", "f(", "k=", "'", '"', ")", "]", ",", "5", "{"],
    "qwen3_coder": ["<tool_call>", "<tool_call>\n<function=f>\n", "</tool_call>", *_TAGGED],
    "seed": ["<seed:tool_call>", "<seed:tool_call><function=f>", "</seed:tool_call>", *_TAGGED],
}  # fmt: skip
