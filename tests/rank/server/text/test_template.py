"""Chat templates with Hugging Face's conventions."""

import json
import re

import pytest
from phalanx.rank.server.api_error import ApiError
from phalanx.rank.server.text.template import ChatTemplate, load_template

pytestmark = pytest.mark.timeout(30)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HI = [{"role": "user", "content": "hi"}]


def render(source, messages=HI, **options):
    return ChatTemplate({"default": source}, TOKENS).render(messages, **options)


def test_conventions():
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ messages[0].role }}{{ eos_token }}") == "<s>hiuser</s>"
    assert render("{% for m in messages %}\n  {% if m.role == 'user' %}\nX\n  {% endif %}\n{% endfor %}\n") == "X\n"
    assert render("{{ x | tojson }}", variables={"x": {"a": "<é>'&"}}) == '{"a": "<é>\'&"}'
    assert render("{{ x | tojson(indent=1) }}", variables={"x": [1]}) == "[\n 1\n]"
    assert render("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abhic"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert re.fullmatch(r"\d{4}", render("{{ strftime_now('%Y') }}"))
    assert render("{{ add_generation_prompt }}{{ tools is none }}{{ nothing is defined }}") == "TrueTrueFalse"


def test_refusals_become_400():
    with pytest.raises(ApiError, match="refuses.*roles must alternate") as e:
        render("{{ raise_exception('roles must alternate') }}")
    assert e.value.status == 400 and e.value.param == "messages"
    with pytest.raises(ApiError, match="fails.*TypeError"):
        render("{{ messages[0].content + 1 }}")


def test_sandbox():
    with pytest.raises(ApiError, match="refuses"):
        render("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}")


def test_continue_final_message():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</m>{% endfor %}<assistant>"
    messages = [*HI, {"role": "assistant", "content": "Once upon"}]
    assert render(source, messages, generate=False, continue_final=True) == "<user>hi</m><assistant>Once upon"
    with pytest.raises(ApiError, match="message's content"):
        render("{{ messages[0].content }}", messages, generate=False, continue_final=True)


def test_named_templates():
    template = ChatTemplate({"default": "plain", "tool_use": "with {{ tools[0].name }}"}, TOKENS)
    assert template.render(HI) == "plain"
    assert template.render(HI, [{"name": "f"}]) == "with f"


def test_where_templates_are(tmp_path):
    assert load_template(tmp_path, {}) is None
    config = {"chat_template": [{"name": "default", "template": "list"}], "bos_token": {"content": "B"}}
    assert load_template(tmp_path, config).render(HI) == "list"
    config["chat_template"] = "{{ bos_token }}"
    assert load_template(tmp_path, config).render(HI) == "B"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load_template(tmp_path, config).render(HI) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert load_template(tmp_path, config).render(HI) == "jinja"
    (tmp_path / "own").write_text("own")
    assert load_template(tmp_path, config, str(tmp_path / "own")).render(HI) == "own"


def test_like_transformers():
    transformers = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{%- for m in messages %}\n    {%- if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% endif %}\n{{- m.role + ': ' + m.content }}\n{% endfor %}{{ tools | tojson(indent=2) if tools }}"
        "{% if add_generation_prompt %}go{% endif %}"
    )
    messages = [*HI, {"role": "assistant", "content": "é", "tool_calls": [{"function": {"arguments": {"q": "ü<"}}}]}]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": 2}}}]
    expected = transformers.render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=True
    )[0][0]
    assert render(source, messages, tools=tools) == expected
