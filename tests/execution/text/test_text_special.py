"""Special tokens: those that end texts against the vocabulary, those shown in texts, and chats that continue."""

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HuggingFaceTokenizer

from meshwright.errors import MeshwrightError
from meshwright.execution.text.byte_files import byte_tokenizer_files
from meshwright.execution.text.chat import apply_chat_template
from meshwright.execution.text.tokenizer import TokenStream, byte_tokenizer, read_tokenizer


@pytest.fixture
def directory(tmp_path):
    """Of a tokenizer of bytes with a special token, 256."""
    of = HuggingFaceTokenizer.from_str(byte_tokenizer_files(None)["tokenizer.json"].decode())
    of.add_special_tokens([AddedToken("<end>", special=True)])
    of.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("token", [9999, [256, 300], -1, True, "2", [None]])
def test_a_token_that_ends_texts_is_one_of_the_model(directory, name, token):
    (directory / name).write_text(json.dumps({"eos_token_id": token}))
    with pytest.raises(MeshwrightError, match=rf"{name} has the eos_token_id .*; the model has the tokens 0 to 299"):
        read_tokenizer(directory, vocab=300)
    # A table of weights may have more rows than the tokenizer has tokens.
    (directory / name).write_text(json.dumps({"eos_token_id": [256, 299]}))
    assert read_tokenizer(directory, vocab=300).stop_tokens == (256, 299)


def test_special_tokens_are_in_a_text_where_they_are_asked_for(directory):
    tokenizer = read_tokenizer(directory, vocab=257)
    tokens = [*b"a", 256, *b"b"]
    assert (tokenizer.decode(tokens), tokenizer.decode(tokens, skip_special_tokens=False)) == ("ab", "a<end>b")
    stream = TokenStream(tokenizer, skip_special_tokens=False)
    assert "".join(map(stream.add, tokens)) + stream.finish() == "a<end>b"


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content FILTER }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(("filter_", "end"), [("", "I am "), ("| trim", "I am")])
def test_a_chat_may_end_with_a_message_that_goes_on(filter_, end):
    tokenizer = replace(byte_tokenizer(), config={"chat_template": TEMPLATE.replace("FILTER", filter_)})
    messages = [{"role": "user", "content": "I am "}, {"role": "assistant", "content": "I am "}]

    def text(**options):
        return bytes(apply_chat_template(tokenizer, messages, **options)).decode()

    begun = f"<user>{end}</><assistant>{end}"
    assert text(add_generation_prompt=False, continue_final_message=True) == begun
    assert text(add_generation_prompt=False) == f"{begun}</>"
    assert text() == f"{begun}</><assistant>"
    messages[-1]["content"] = " "
    with pytest.raises(MeshwrightError, match="the text of the last message is not in the chat"):
        text(add_generation_prompt=False, continue_final_message=True)
