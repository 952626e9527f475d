import pytest
from tiny import byte_tokenizer

from cb_rollout.server.protocol import ApiError, Tool
from cb_rollout.server.tool_parser import CallFormat, call_format, required_calls

TAGGED = CallFormat('<tool_call>\n{"name": ', ', "arguments": ', "}\n</tool_call>")
LOOP = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
END = "{% endfor %}{% endfor %}{{ tools }}"


def with_template(template):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_the_call_format_is_read_from_the_chat_template():
    assert call_format(byte_tokenizer()) == TAGGED
    # As Qwen's does, which also shows the model an example.
    qwen = (
        '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
        + LOOP
        + '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>" + END.replace("{{ tools }}", "")
    )
    assert call_format(with_template(qwen)) == TAGGED


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ messages[0].content }}",
        "{{ raise_exception('no tools') }}",
        LOOP + "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}" + END,
        LOOP + "<tool_call><function={{ c.function.name }}></function></tool_call>" + END,
        LOOP + "[TOOL_CALLS]{{ c.function | tojson }}" + END,
    ],
)
def test_calls_of_another_format_cannot_be_required(template):
    made = call_format(with_template(template))
    assert made is None
    tools = [Tool.model_validate({"type": "function", "function": {"name": "f"}})]
    with pytest.raises(ApiError, match="auto or none only") as caught:
        required_calls(made, tools, "required")
    assert caught.value.status == 400


def test_calls_of_a_response_template_cannot_be_required():
    tokenizer = byte_tokenizer()
    tokenizer.response_template = {}
    assert call_format(tokenizer) is None
