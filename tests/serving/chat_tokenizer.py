"""Bytes as tokens, with a chat template that writes tools and calls."""

from dataclasses import replace

from meshwright.execution.text.tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}({{ message.tool_call_id }}){% endif %}"
    "{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<{{ call.function.name }} {{ call.function.arguments.city }}>"
    "{% endfor %}"
    "{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %} at once:{% endif %}"
)


def chat_tokenizer():
    """The tokenizer."""
    return replace(byte_tokenizer(), stop_tokens=(0,), config={"chat_template": TEMPLATE})
