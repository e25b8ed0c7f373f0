"""Chat templates of model families, for checkpoints that have none: how the family's chat models write turns.

A family is known by the control tokens of its tokenizer, which its base models have too, or else by its model_type.
Sources: the prompt formats that model cards publish. Only DeepSeek's newer models are shown tools. What a family's own
template says for a chat without a system message is left out: it says which of its models is speaking, or what day it
is.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ... import vision
from ...vision import blip
from . import tekken
from .model_files import read_json
from .tokenizer_file import CHATGLM


class FamilyTemplate(NamedTuple):
    family: str
    source: str  # Jinja
    end: str = ""  # the token that ends an answer; empty: the tokenizer's eos_token
    tokens: tuple[str, ...] = ()  # the tokenizer has all of these
    models: tuple[str, ...] = ()  # the model_type is one of these


TEXT = "{{ message['content'] or '' }}"  # a message of calls may have none


def turns(open: str, after: str, close: str, begin: str = "", assistant: str = "", fold: str = "") -> str:
    """Each turn as open, role, after, text, close. begin: before the first turn; assistant: that role's name where the
    only other one is the user; fold: what the first turn has before its text."""
    role = "{{ message['role'] }}"
    if assistant:
        role = f"{{{{ '{assistant}' if message['role'] == 'assistant' else 'user' }}}}"
    assistant = assistant or "assistant"
    return (
        f"{begin}{{% for message in messages %}}{open}{role}{after}{fold}{TEXT}{close}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{open}{assistant}{after}{{% endif %}}"
    )


def instructions(user: str, fold: str = "") -> str:
    """[INST] text [/INST] answer. user: before each [INST]; fold: what the first one has before its text."""
    return (
        f"{{% for message in messages %}}{{% if message['role'] == 'assistant' %}} {TEXT}{{{{ eos_token }}}}"
        f"{{% else %}}{user}[INST] {fold}{TEXT} [/INST]{{% endif %}}{{% endfor %}}"
    )


def framed(frames: Iterable[str], prompt: str, begin: str = "") -> str:
    """Each turn within its role's frame, which has TEXT where the text is. frames: of system, user and assistant;
    prompt: what an answer follows."""
    system, user, assistant = frames
    return (
        f"{begin}{{% for message in messages %}}{{% if message['role'] == 'assistant' %}}{assistant}"
        f"{{% elif message['role'] == 'system' %}}{system}{{% else %}}{user}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


BOS = "{{ bos_token }}"
EOS = "{{ eos_token }}"
# Families without a system turn put its message before the user's first text, framed or not. Where no message
# of the user follows it, it is one of the user's.
FIRST = (
    "{% set folds = messages | length > 1 and messages[0]['role'] == 'system' and messages[1]['role'] != 'assistant' %}"
    "{% set system = messages[0]['content'] if folds else '' %}"
    "{% set messages = messages[1:] if folds else messages %}"
)
FOLD = "{% if system and loop.first %}{{ system }}\n\n{% endif %}"
FRAMED = "{% if system and loop.first %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
# The user's text, after the number of its round.
ROUNDS = (
    "[gMASK]sop{% set round = namespace(number=0) %}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}答：" + TEXT + "\n\n"
    "{% else %}{% set round.number = round.number + 1 %}[Round {{ round.number }}]\n\n问：" + FOLD + TEXT + "\n\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}答：{% endif %}"
)  # fmt: skip


def seeing(caption: str, question: str, objects: str, between: str = "") -> str:
    """Moondream's turns. caption: asks for one, of the `length` that the user names; question: asks TEXT; objects: asks
    for the boxes or points, by the `task`, of what the user names; between: in front of an answer. An image without
    words, and the words "Caption", "Short caption" and "Long caption" alone, ask for a caption; "Detect:" and "Point:"
    before a name ask for objects."""
    return (
        FIRST + "{% macro words(content) %}{% if content is string %}{{ content }}{% else %}"
        "{% for part in content or () if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
        "{% endmacro %}"
        "<|endoftext|>{% for message in messages %}{% set text = words(message['content']) | trim %}"
        "{% set length = {'': 'normal', 'caption': 'normal', 'short caption': 'short', 'long caption': 'long'}"
        "[text | lower | replace('.', '') | replace(':', '')] %}"
        "{% set task, _, name = text.partition(':') %}{% set task, name = task | lower, name | trim %}"
        f"{{% if message['role'] == 'assistant' %}}{between}{{{{ text }}}}"
        f"{{% elif length and not (system and loop.first) %}}{caption}"
        f"{{% elif task in ('detect', 'point') and name and not (system and loop.first) %}}{objects}"
        f"{{% if loop.last %}}{vision.task('{{ task }}')}{{% endif %}}{{% else %}}{question}{{% endif %}}{{% endfor %}}"
    )


def dsml(block: str, results: str, result: str, results_end: str, prompt: str) -> str:
    """DeepSeek's chats since V3.2, whose checkpoints bring a Python program instead of a template.

    block: the tag around calls. results, results_end: around the results of tools that stand together. result: one of
    them. prompt: opens the answer to them. Thoughts before the last message of the user are left out.
    """
    tag = "｜DSML｜"
    call = (
        f"<{tag}invoke name=\"{{{{ call['function']['name'] }}}}\">\n"
        "{% for key, value in call['function']['arguments'].items() %}"
        f"<{tag}parameter name=\"{{{{ key }}}}\" string=\"{{{{ 'true' if value is string else 'false' }}}}\">"
        "{{ value if value is string else value | tojson }}"
        f"</{tag}parameter>\n{{% endfor %}}</{tag}invoke>\n"
    )
    tools = (
        "\n\n## Tools\n\nThese functions can be called. Each is described by its JSON schema:\n\n"
        "{% for tool in tools %}{{ tool['function'] | tojson }}\n{% endfor %}"
        "\nCalls stand in one block, each with an element for every argument:\n\n"
        f'<{tag}{block}>\n<{tag}invoke name="FUNCTION">\n<{tag}parameter name="ARGUMENT" string="true">TEXT'
        f'</{tag}parameter>\n<{tag}parameter name="ARGUMENT" string="false">JSON</{tag}parameter>\n</{tag}invoke>\n'
        f'</{tag}{block}>\n\nA text (string="true") is written as it is, every other value (string="false") as JSON.'
    )
    begin = "{{ '<think>' if enable_thinking else '</think>' }}"
    source = (
        "{% set turn = namespace(user=-1) %}{% for message in messages if message['role'] == 'user' %}"
        "{% set turn.user = turn.user + 1 %}{% endfor %}{% set place = namespace(user=-1, last='') %}" + BOS + ""
        "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] or '' }}"
        "{% set messages = messages[1:] %}{% endif %}"
        f"{{% if tools %}}{tools}{{% endif %}}"
        "{% for message in messages %}{% set role = message['role'] %}"
        f"{{% if role == 'tool' %}}{{% if place.last != 'tool' %}}{results}{{% endif %}}{result}"
        f"{{% if loop.last or loop.nextitem['role'] != 'tool' %}}{results_end}{{% endif %}}"
        "{% elif role == 'assistant' %}"
        f"{{% if place.last == 'tool' %}}{prompt}{{% else %}}<｜Assistant｜>{{% endif %}}"
        "{% if enable_thinking and place.user == turn.user %}<think>{{ message['reasoning_content'] or '' }}{% endif %}"
        f"</think>{TEXT}"
        f"{{% if message['tool_calls'] %}}\n\n<{tag}{block}>\n"
        f"{{% for call in message['tool_calls'] %}}{call}{{% endfor %}}</{tag}{block}>{{% endif %}}{EOS}"
        f"{{% elif role == 'system' %}}{TEXT}"
        f"{{% else %}}{{% set place.user = place.user + 1 %}}<｜User｜>{TEXT}{{% endif %}}"
        "{% set place.last = role %}{% endfor %}"
        "{% if add_generation_prompt %}"
        f"{{% if place.last == 'tool' %}}{prompt}{{% else %}}<｜Assistant｜>{{% endif %}}{begin}{{% endif %}}"
    )
    return source.replace("%}\n", "%}{{ '\\n' }}")  # Jinja drops a newline behind a block


# BLIP goes on with what the last message of the user begins; [CLS] becomes the image and the decoder's beginning.
CAPTIONED = (
    "[CLS]{% for message in messages %}{% set content = message['content'] %}{% if content is string %} {{ content }}"
    "{% else %}{% for part in content or () if part['type'] == 'text' %} {{ part['text'] }}{% endfor %}{% endif %}"
    "{% endfor %}"
)
# The last message is the question of its models that answer some.
QUESTION = (
    "[CLS]{% set content = messages[-1]['content'] %}{% if content is string %} {{ content }}"
    "{% else %}{% for part in content or () if part['type'] == 'text' %} {{ part['text'] }}{% endfor %}{% endif %}"
)
CAPTION = "{{ '\\n\\n' }}{{ {'short': 'Short caption', 'normal': 'Caption', 'long': 'Long caption'}[length] }}:"
ASKED = FOLD + "{{ text }}"
OBJECTS = "{{ '\\n\\n' }}{{ task | capitalize }}: {{ name }}{{ '\\n\\n' }}"
# Apertus's text behind its system message, or before all others where there is none.
DEVELOPER = "<|developer_start|>Deliberation: disabled\nTool Capabilities: disabled<|developer_end|>"
ROLES = "system", "user", "assistant"
SPEAKERS = "SYSTEM", "USER", "CHATBOT"
FAMILIES = (
    FamilyTemplate(
        "Phi-4", turns("<|im_start|>", "<|im_sep|>", "<|im_end|>"), "<|im_end|>",
        tokens=("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    ),
    FamilyTemplate(
        "ChatML", turns("<|im_start|>", "\n", "<|im_end|>\n"), "<|im_end|>", tokens=("<|im_start|>", "<|im_end|>")
    ),
    FamilyTemplate(
        "Llama 3", turns("<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>", BOS), "<|eot_id|>",
        tokens=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    FamilyTemplate(
        "Gemma", FIRST + turns("<start_of_turn>", "\n", "<end_of_turn>\n", BOS, assistant="model", fold=FOLD),
        "<end_of_turn>", tokens=("<start_of_turn>", "<end_of_turn>"),
    ),
    FamilyTemplate(
        "Granite", turns("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"), "<|end_of_text|>",
        tokens=("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    FamilyTemplate(
        "GLM-4", turns("<|", "|>\n", "", "[gMASK]<sop>"), "<|user|>", tokens=("[gMASK]", "<sop>", "<|user|>"),
    ),
    FamilyTemplate(
        "ChatGLM3", framed((f"<|{role}|>\n {TEXT}" for role in ROLES), "<|assistant|>", "[gMASK]sop"),
        "<|user|>", tokens=("[gMASK]", "sop", "<|user|>"),
    ),
    FamilyTemplate("ChatGLM2", FIRST + ROUNDS, models=("chatglm2",)),
    FamilyTemplate(
        "Phi-3", turns("<|", "|>\n", "<|end|>\n"), "<|end|>", tokens=("<|user|>", "<|assistant|>", "<|end|>")
    ),
    FamilyTemplate(
        "DeepSeek-V3.2",
        dsml(
            "function_calls", "\n\n<function_results>", f"\n<result>{TEXT}</result>", "\n</function_results>", "\n\n"
        ),
        tokens=("<｜User｜>", "<｜Assistant｜>"), models=("deepseek_v32",),
    ),
    FamilyTemplate(
        "DeepSeek-V4",
        dsml("tool_calls", "<｜User｜>", f"<tool_result>{TEXT}</tool_result>", "", "<｜Assistant｜>"),
        tokens=("<｜User｜>", "<｜Assistant｜>"), models=("deepseek_v4",),
    ),
    FamilyTemplate(
        "DeepSeek-V3", framed((TEXT, f"<｜User｜>{TEXT}", f"<｜Assistant｜>{TEXT}{EOS}"), "<｜Assistant｜>", BOS),
        tokens=("<｜User｜>", "<｜Assistant｜>"),
    ),
    FamilyTemplate(
        "Command",
        framed(
            (f"<|START_OF_TURN_TOKEN|><|{role}_TOKEN|>{TEXT}<|END_OF_TURN_TOKEN|>" for role in SPEAKERS),
            "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", BOS,
        ),
        "<|END_OF_TURN_TOKEN|>", tokens=("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    FamilyTemplate(
        "Kimi K2",
        framed(
            (f"<|im_{role}|>{role}<|im_middle|>{TEXT}<|im_end|>" for role in ROLES),
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        "<|im_end|>", tokens=("<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    ),
    FamilyTemplate(
        "gpt-oss",
        framed(
            (
                f"<|start|>developer<|message|># Instructions\n\n{TEXT}<|end|>",
                f"<|start|>user<|message|>{TEXT}<|end|>",
                f"<|start|>assistant<|channel|>final<|message|>{TEXT}<|end|>",
            ),
            "<|start|>assistant",
        ),
        "<|return|>", tokens=("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>"),
    ),
    FamilyTemplate(
        "MiniMax",
        framed((f"]~b]{role}\n{TEXT}[e~[\n" for role in ("system", "user", "ai")), "]~b]ai\n<think>\n", "]~!b["),
        "[e~[", tokens=("]~!b[", "]~b]", "[e~["),
    ),
    FamilyTemplate(
        "Apertus",
        framed(
            (
                f"<|system_start|>{TEXT}<|system_end|>{{% if loop.first %}}{DEVELOPER}{{% endif %}}",
                f"<|user_start|>{TEXT}<|user_end|>",
                f"<|assistant_start|>{TEXT}<|assistant_end|>",
            ),
            "<|assistant_start|>", f"{BOS}{{% if messages[0]['role'] != 'system' %}}{DEVELOPER}{{% endif %}}",
        ),
        "<|assistant_end|>", tokens=("<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
    ),
    FamilyTemplate(
        "DeepSeek-V2",
        framed((f"{TEXT}\n\n", f"User: {TEXT}\n\n", f"Assistant: {TEXT}{EOS}"), "Assistant:", BOS),
        models=("deepseek_v2",),
    ),
    FamilyTemplate(
        "Phi-2", framed((f"{TEXT}\n", f"Instruct: {TEXT}\n", f"Output: {TEXT}\n"), "Output:"), models=("phi",)
    ),
    FamilyTemplate(
        "Zephyr", turns("<|", "|>\n", "<|endoftext|>\n"), "<|endoftext|>", models=("stablelm",)
    ),
    FamilyTemplate(
        "OLMo", turns("<|", "|>\n", "{{ eos_token if message['role'] == 'assistant' else '' }}\n", BOS),
        models=("olmo2", "olmo3"),
    ),
    FamilyTemplate(
        "Mistral, tekken",
        BOS + "{% for message in messages %}{% if message['role'] == 'system' %}[SYSTEM_PROMPT]" + TEXT
        + "[/SYSTEM_PROMPT]{% elif message['role'] == 'assistant' %}" + TEXT + "{{ eos_token }}{% else %}[INST]" + TEXT
        + "[/INST]{% endif %}{% endfor %}",
        tokens=("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]"),
    ),
    FamilyTemplate(
        "Moondream 2, starmie",
        seeing(
            "<|md_reserved_0|>describe<|md_reserved_1|>{{ length }}<|md_reserved_2|>",
            f"<|md_reserved_0|>query<|md_reserved_1|>{ASKED}<|md_reserved_2|>",
            "<|md_reserved_0|>{{ task }}<|md_reserved_1|> {{ name }}<|md_reserved_2|>",
        ),
        "<|endoftext|>", tokens=("<|md_reserved_0|>", "<|md_reserved_1|>", "<|md_reserved_2|>"),
    ),
    FamilyTemplate(
        "Moondream 2", seeing(CAPTION, f"{{{{ '\\n\\n' }}}}Question: {ASKED}\n\nAnswer:", OBJECTS, " "),
        "<|endoftext|>", models=("moondream1",),
    ),
    FamilyTemplate("BLIP", CAPTIONED, "[SEP]", models=("blip",)),
    FamilyTemplate("BLIP, questions", QUESTION, "[SEP]", models=(blip.ANSWERS,)),
    FamilyTemplate("Llama 2", FIRST + instructions(BOS, FRAMED), models=("llama",)),
    FamilyTemplate(
        "Mistral", FIRST + BOS + instructions("", FOLD),
        models=("ministral", "ministral3", "mistral", "mistral3", "mistral4", "mixtral"),
    ),
)  # fmt: skip


def family_template(model_dir: Path) -> FamilyTemplate | None:
    """The family of a model directory; None where it is unknown."""
    config = read_json(model_dir, "config.json")
    tokens = {token["content"] for token in read_json(model_dir, "tokenizer.json").get("added_tokens") or ()}
    if not tokens and (model_dir / tekken.NAME).is_file():
        tokens = tekken.control(model_dir / tekken.NAME)
    model_type = config.get("model_type")
    if model_type == "chatglm" and "chatglm2" in str(config.get("_name_or_path")).lower():
        model_type = "chatglm2"  # whose tokenizer is of ChatGLM3's class
    elif model_type == "blip" and blip.kind(config) == blip.ANSWERS:
        model_type = blip.ANSWERS
    elif not tokens:
        tokens = set(CHATGLM.get(str(read_json(model_dir, "tokenizer_config.json").get("tokenizer_class")), ()))
    for family in FAMILIES:
        named = not family.models or model_type in family.models
        if named and family.tokens and tokens.issuperset(family.tokens):
            return family
    return next((family for family in FAMILIES if not family.tokens and model_type in family.models), None)
