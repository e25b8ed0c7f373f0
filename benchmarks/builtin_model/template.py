"""The chat template, written here in readable lines and stored in tokenizer_config.json by tokenizer.py."""

TOOLS_HEAD = "You can call these functions:\n<tools>"
TOOLS_TAIL = (
    "\n</tools>\nTo call one, answer with its name and arguments as JSON:\n"
    '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
)

# Thoughts of earlier rounds are dropped: only answers after the last question of the user keep theirs.
TEMPLATE = """\
{%- set ns = namespace(last=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set first = 1 if messages and messages[0].role == 'system' else 0 -%}
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is iterable and content is not mapping -%}
        {%- for part in content -%}{{- part.text if part is mapping else part -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if first or tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if first -%}{{- text(messages[0].content) -}}{%- endif -%}
    {%- if tools -%}
        {%- if first -%}{{- '\\n\\n' -}}{%- endif -%}
        {{- HEAD -}}
        {%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}
        {{- TAIL -}}
    {%- endif -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[first:] -%}
    {%- set index = loop.index0 + first -%}
    {%- if message.role == 'assistant' -%}
        {%- set body = text(message.content) -%}
        {%- set thought = '' -%}
        {%- if message.reasoning_content is string -%}
            {%- set thought = message.reasoning_content -%}
        {%- elif '</think>' in body -%}
            {%- set thought = body.split('</think>')[0].split('<think>')[-1] -%}
            {%- set body = body.split('</think>')[-1] -%}
        {%- endif -%}
        {%- set thought = thought.strip() -%}
        {%- set body = body.strip() -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if thought and index > ns.last -%}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' -}}{%- endif -%}
        {{- body -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function if call.function else call -%}
            {%- if body or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[index - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response>' -}}
        {%- if loop.last or messages[index + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- else -%}
        {{- '<|im_start|>' + message.role + '\\n' + text(message.content) + '<|im_end|>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""


def chat_template() -> str:
    """The template with the two texts around a list of tools filled in, as Jinja string literals."""
    literal = lambda text: "'" + text.replace("'", "\\'").replace("\n", "\\n") + "'"  # noqa: E731
    return TEMPLATE.replace("HEAD", literal(TOOLS_HEAD)).replace("TAIL", literal(TOOLS_TAIL))
