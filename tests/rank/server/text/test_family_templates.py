"""The templates of families, for models that have none."""

import json

import pytest
from phalanx.rank import vision
from phalanx.rank.server.text.family_templates import FAMILIES, family_template
from phalanx.rank.server.text.template import load_template
from phalanx.rank.server.text.tool_formats import choose, find
from phalanx.rank.vision.blip import ANSWERS

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Ho"},
    {"role": "user", "content": "Bye"},
]
WRITTEN = {
    "Phi-4": "<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>"
    "assistant<|im_sep|>Ho<|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|><|im_start|>assistant<|im_sep|>",
    "Mistral, tekken": "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Ho</s>[INST]Bye[/INST]",
    "ChatML": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo"
    "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n",
    "Llama 3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|><|start_header_id|>"
    "user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "Gemma": "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHo<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "Granite": "<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>Hi"
    "<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>Ho<|end_of_text|>\n<|start_of_role|>user<|end_of_role|>"
    "Bye<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "GLM-4": "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHi<|assistant|>\nHo<|user|>\nBye<|assistant|>\n",
    "ChatGLM3": "[gMASK]sop<|system|>\n Be brief.<|user|>\n Hi<|assistant|>\n Ho<|user|>\n Bye<|assistant|>",
    "ChatGLM2": "[gMASK]sop[Round 1]\n\n问：Be brief.\n\nHi\n\n答：Ho\n\n[Round 2]\n\n问：Bye\n\n答：",
    "Phi-3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHo<|end|>\n<|user|>\nBye<|end|>\n"
    "<|assistant|>\n",
    "DeepSeek-V3": "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Ho</s><｜User｜>Bye<｜Assistant｜>",
    "DeepSeek-V3.2": "<s>Be brief.<｜User｜>Hi<｜Assistant｜></think>Ho</s><｜User｜>Bye<｜Assistant｜></think>",
    "DeepSeek-V4": "<s>Be brief.<｜User｜>Hi<｜Assistant｜></think>Ho</s><｜User｜>Bye<｜Assistant｜></think>",
    "DeepSeek-V2": "<s>Be brief.\n\nUser: Hi\n\nAssistant: Ho</s>User: Bye\n\nAssistant:",
    "Command": "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>"
    "<|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Ho<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Bye<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "Kimi K2": "<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Hi<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>Ho<|im_end|><|im_user|>user<|im_middle|>Bye<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "gpt-oss": "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hi<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Ho<|end|><|start|>user<|message|>Bye<|end|><|start|>assistant",
    "MiniMax": "]~!b[]~b]system\nBe brief.[e~[\n]~b]user\nHi[e~[\n]~b]ai\nHo[e~[\n]~b]user\nBye[e~[\n]~b]ai\n<think>\n",
    "Apertus": "<s><|system_start|>Be brief.<|system_end|><|developer_start|>Deliberation: disabled\n"
    "Tool Capabilities: disabled<|developer_end|><|user_start|>Hi<|user_end|><|assistant_start|>Ho<|assistant_end|>"
    "<|user_start|>Bye<|user_end|><|assistant_start|>",
    "Phi-2": "Be brief.\nInstruct: Hi\nOutput: Ho\nInstruct: Bye\nOutput:",
    "Moondream 2": "<|endoftext|>\n\nQuestion: Be brief.\n\nHi\n\nAnswer: Ho\n\nQuestion: Bye\n\nAnswer:",
    "Moondream 2, starmie": "<|endoftext|><|md_reserved_0|>query<|md_reserved_1|>Be brief.\n\nHi<|md_reserved_2|>Ho"
    "<|md_reserved_0|>query<|md_reserved_1|>Bye<|md_reserved_2|>",
    "BLIP": "[CLS] Be brief. Hi Ho Bye",
    "BLIP, questions": "[CLS] Bye",
    "Zephyr": "<|system|>\nBe brief.<|endoftext|>\n<|user|>\nHi<|endoftext|>\n<|assistant|>\nHo<|endoftext|>\n"
    "<|user|>\nBye<|endoftext|>\n<|assistant|>\n",
    "OLMo": "<s><|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\nHo</s>\n<|user|>\nBye\n<|assistant|>\n",
    "Llama 2": "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Ho</s><s>[INST] Bye [/INST]",
    "Mistral": "<s>[INST] Be brief.\n\nHi [/INST] Ho</s>[INST] Bye [/INST]",
}


def write(path, tokens=(), model_type=None, **config):
    (path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"content": one} for one in tokens]}))
    named = {"model_type": "chatglm", "_name_or_path": "THUDM/chatglm2-6b"} if model_type == "chatglm2" else {}
    named |= {"model_type": "blip", "architectures": [ANSWERS]} if model_type == ANSWERS else {}
    (path / "config.json").write_text(json.dumps({"model_type": model_type} | named))
    return load_template(path, {"bos_token": "<s>", "eos_token": "</s>", **config})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda one: one.family)
def test_how_a_family_writes_chats(tmp_path, family):
    template = write(tmp_path, family.tokens, next(iter(family.models), "some"))
    assert template.family is family and template.takes_tools == (family.family in DSML)
    assert template.render(CHAT) == WRITTEN[family.family]
    assert template.render(CHAT[:3], continue_final=True).endswith("Ho")


def test_control_tokens_say_more_than_the_model_type(tmp_path):
    assert write(tmp_path, ("<|im_start|>", "<|im_end|>"), "llama").family.family == "ChatML"
    assert write(tmp_path, ("<|im_start|>",), "llama").family.family == "Llama 2"
    assert write(tmp_path, (), "starcoder2") is None
    assert family_template(tmp_path / "none") is None


@pytest.mark.parametrize("name, kind, family", [
    ("THUDM/chatglm2-6b", "ChatGLMTokenizer", "ChatGLM2"), ("THUDM/chatglm3-6b", "ChatGLMTokenizer", "ChatGLM3"),
    ("THUDM/glm-4-9b-chat", "ChatGLM4Tokenizer", "GLM-4"),
])  # fmt: skip
def test_tokenizers_whose_code_has_the_control_tokens(tmp_path, name, kind, family):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "chatglm", "_name_or_path": name}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
    assert family_template(tmp_path).family == family


def test_apertus_says_what_it_may_without_a_system_message_too(tmp_path):
    apertus = next(one for one in FAMILIES if one.family == "Apertus")
    written = write(tmp_path, apertus.tokens, "apertus").render(CHAT[1:])
    assert written == WRITTEN["Apertus"].replace("<|system_start|>Be brief.<|system_end|>", "")


@pytest.mark.parametrize("text, old, new", [
    ("", "\n\nCaption:", "describe<|md_reserved_1|>normal"),
    ("Short caption.", "\n\nShort caption:", "describe<|md_reserved_1|>short"),
    ("long caption", "\n\nLong caption:", "describe<|md_reserved_1|>long"),
    ("What is it?", "\n\nQuestion: What is it?\n\nAnswer:", "query<|md_reserved_1|>What is it?"),
])  # fmt: skip
def test_moondream_captions_and_answers(tmp_path, text, old, new):
    content = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    chat = [{"role": "user", "content": content}]
    assert write(tmp_path, (), "moondream1").render(chat) == f"<|endoftext|>{old}"
    reserved = [f"<|md_reserved_{i}|>" for i in range(3)]
    assert write(tmp_path, reserved).render(chat) == f"<|endoftext|>{reserved[0]}{new}{reserved[2]}"


@pytest.mark.parametrize("task", ["detect", "point"])
def test_moondream_marks_the_task_of_the_last_message(tmp_path, task):
    asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": f"{task.upper()}: a  Cat "}]}
    old, reserved = write(tmp_path, (), "moondream1"), [f"<|md_reserved_{i}|>" for i in range(3)]
    written = f"<|endoftext|>\n\n{task.capitalize()}: a  Cat\n\n"
    assert old.render([asked]) == written + vision.task(task)
    question = {"role": "user", "content": "What: this?"}
    assert old.render([asked, question]) == written + "\n\nQuestion: What: this?\n\nAnswer:"
    new = write(tmp_path, reserved).render([asked])
    assert new == f"<|endoftext|>{reserved[0]}{task}{reserved[1]} a  Cat{reserved[2]}{vision.task(task)}"


def test_a_template_of_its_own_stays(tmp_path):
    template = write(tmp_path, ("<|im_start|>", "<|im_end|>"), "qwen2", chat_template="own")
    assert template.family is None and template.source == "own"


CALLED = [
    {"role": "user", "content": "Add."},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": "x", "b": [1]}}}],
    },
    {"role": "tool", "content": "3"},
    {"role": "tool", "content": "4"},
]
DSML = {  # the calls' tag, the results, what an answer follows
    "DeepSeek-V3.2": (
        "function_calls", "\n\n<function_results>\n<result>3</result>\n<result>4</result>\n</function_results>", "\n\n"
    ),
    "DeepSeek-V4": (
        "tool_calls", "<｜User｜><tool_result>3</tool_result><tool_result>4</tool_result>", "<｜Assistant｜>"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DSML)
def test_deepseek_s_newer_models_are_shown_tools(tmp_path, name):
    """Their own format reads their calls, which stand in the next prompt as they were written."""
    family = next(one for one in FAMILIES if one.family == name)
    template = write(tmp_path, family.tokens, family.models[0])
    block, results, prompt = DSML[name]
    shown = template.render(CALLED[:1], [{"function": {"name": "add"}}], variables={"enable_thinking": True})
    assert '{"name": "add"}' in shown and shown.endswith("<｜User｜>Add.<｜Assistant｜><think>")
    call = (
        f'\n\n<｜DSML｜{block}>\n<｜DSML｜invoke name="add">\n'
        '<｜DSML｜parameter name="a" string="true">x</｜DSML｜parameter>\n'
        f'<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{block}></s>'
    )
    written = template.render(CALLED, variables={"enable_thinking": True})
    assert written.endswith(f"<｜Assistant｜><think>Hm.</think>{call}{results}{prompt}<think>")
    later = [*CALLED, {"role": "assistant", "content": "7"}, CHAT[1]]
    assert "Hm." not in template.render(later, variables={"enable_thinking": True})
    assert choose(template.source) is find(family.models[0])


@pytest.mark.parametrize("family", [one for one in FAMILIES if one.models != (ANSWERS,)], ids=lambda one: one.family)
def test_nothing_is_lost(tmp_path, family):
    template = write(tmp_path, family.tokens, next(iter(family.models), "some"))
    assert template.render(CHAT[:1]).count("Be brief.") == 1
    written = template.render([CHAT[0], *CHAT[2:]])
    assert [written.count(text) for text in ("Be brief.", "Ho", "Bye")] == [1, 1, 1]
    assert written.index("Be brief.") < written.index("Ho") < written.index("Bye")
    assert "None" not in template.render([CHAT[1], {"role": "assistant", "content": None, "tool_calls": []}, CHAT[3]])


def test_a_system_message_that_no_user_follows(tmp_path):
    answered = [CHAT[0], *CHAT[2:]]
    assert write(tmp_path, (), "llama").render(answered) == "<s>[INST] Be brief. [/INST] Ho</s><s>[INST] Bye [/INST]"
    gemma = write(tmp_path, ("<start_of_turn>", "<end_of_turn>")).render(CHAT[:1])
    assert gemma == "<s><start_of_turn>user\nBe brief.<end_of_turn>\n<start_of_turn>model\n"
