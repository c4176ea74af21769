"""What a loaded model is asked that cannot be: each mistake is one line, and no value is read as another."""

import math
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.execution.models.inference.prompts import as_message, prompt_of
from meshwright.execution.models.inference.tasks import read_task
from meshwright.execution.text.tokenizer import byte_tokenizer
from meshwright.execution.training.loop import run_steps
from meshwright.execution.training.run_directory.run import RunConfig
from meshwright.execution.training.update.optimizer import Optimizer

GOLDEN = Path(__file__).parents[2] / "references" / "llama"


@pytest.fixture(scope="module")
def model():
    return mw.load(GOLDEN, on="cpu:1")


REFUSED = {
    "no prompt": ({"prompts": []}, "there is no prompt"),
    "no text": ({"prompts": ""}, "there is no prompt"),
    "nothing": ({"prompts": None}, "prompts are None; they are text, tokens or messages"),
    "sampling a number": ({"sampling": 0.5}, "sampling is 0.5; it is a Sampling"),
    "no tokens": ({"prompts": [[]]}, r"a prompt is \[\]; it is text, tokens or messages"),
    "fractions": ({"prompts": [[1.5]]}, r"a prompt is \[1.5\]"),
    "truths": ({"prompts": [[True]]}, r"a prompt is \[True\]"),
    "three dims": ({"prompts": [[[[1]]]]}, "a prompt is"),
    "text without a tokenizer": ({"prompts": "x"}, "llama has no tokenizer; give the tokens"),
    "a chat without a tokenizer": ({"prompts": [{"role": "user", "content": "x"}]}, "llama has no tokenizer"),
    "a negative token": ({"prompts": [[-1]]}, "token -1 is not one of llama, which has 0 to 95"),
    "a large token": ({"prompts": [[96]]}, "token 96 is not one"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens is 0; it is 1 or more"),
    "max_tokens a fraction": ({"max_tokens": 1.5}, r"max_tokens is 1.5; it is a whole number"),
    "max_tokens true": ({"max_tokens": True}, "max_tokens is True; it is a whole number"),
    "max_tokens text": ({"max_tokens": "3"}, "max_tokens is '3'; it is a whole number"),
    "stop without a tokenizer": ({"stop": "a"}, "has no tokenizer, so no text can stop it"),
    "stop is empty": ({"stop": [""]}, "a text of stop is empty"),
    "stop is a number": ({"stop": [3]}, "stop"),
    "stop_tokens text": ({"stop_tokens": ["a"]}, "stop_tokens"),
    "stop_tokens large": ({"stop_tokens": [96]}, "token 96 is not one"),
    "sampling a dict": ({"sampling": [{"temperature": 1.0}]}, "sampling"),
    "samplings": ({"sampling": [Sampling()] * 2}, "there are 2 samplings for 1 prompts"),
    "another option": ({"temperature": 1.0}, "there is no option 'temperature'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_generated_is_one_line(model, case):
    said, message = REFUSED[case]
    with pytest.raises(mw.MeshwrightError, match=message) as raised:
        model.generate(**{"prompts": [[5]], **said})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("tokens", "lengths", "message"),
    [
        ([1, 2], None, r"tokens are \[1, 2\]; they are whole numbers \[batch, seq\]"),
        ([[1, 2], [3]], None, r"tokens are \[\[1, 2\], \[3\]\]"),
        ([[]], None, r"tokens are \[\[\]\]"),
        ([[True]], None, r"tokens are \[\[True\]\]"),
        ([[1, 2]], [3], r"lengths are \[3\]; they are 1 whole numbers from 1 to 2"),
        ([[1, 2]], [1.0], r"lengths are \[1.0\]"),
    ],
)
def test_tokens_that_have_no_logits_are_one_line(model, tokens, lengths, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        model.logits(tokens, lengths)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.score([]), "there is no text; give at least one"),
        (lambda model: model.log_likelihoods("ab"), r"pairs are 'ab'; they are \(context, continuation\) each"),
        (lambda model: model.save(None), "path is None; it is the path of a file"),
    ],
)
def test_what_cannot_be_scored_or_saved_is_one_line(model, call, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        call(model)


def test_arrays_are_prompts_as_lists_are(model):
    rows = np.array([[5, 6, 7], [8, 9, 10]])
    several = model.generate(rows.tolist(), max_tokens=3)
    assert model.generate(rows, max_tokens=3) == model.generate(list(rows), max_tokens=3) == several
    assert model.generate(rows[0], max_tokens=3) == several[:1]


@pytest.mark.parametrize("how", [{"dtype": "fp7"}, {"dtype": "bf61"}, {"dtype": ["bf16"]}])
def test_a_dtype_that_is_none_is_one_line(model, tmp_path, how):
    for call in (lambda: mw.load(GOLDEN, on="cpu:1", **how), lambda: model.save(tmp_path / "out", **how)):
        with pytest.raises(mw.MeshwrightError, match=r"dtype is .* it is one of bf16, (f16, )?f32"):
            call()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("directory", [None, 3, "", "tiny", GOLDEN / "config.json"])
def test_what_is_no_directory_is_one_line(directory):
    with pytest.raises(mw.MeshwrightError, match=r"there is no directory|no config\.json"):
        mw.load(directory, on="cpu:1")


def test_a_run_is_loaded_in_the_dtype_that_is_said(tmp_path):
    plan = mw.plan("tiny", on="cpu:8", batch=16, seq_len=32, mesh="fsdp=8", dtype="bf16")
    config = RunConfig(workload=plan.workload, mesh=plan.mesh, hardware=plan.hardware, optimizer=Optimizer(), steps=1)
    assert math.isfinite(run_steps(config, tmp_path).record.step_seconds)
    kept, narrow = mw.load(tmp_path), mw.load(tmp_path, dtype="bf16")
    assert (kept.dtype, kept.params["final_norm"].dtype) == ("bf16", jnp.float32)
    assert (narrow.dtype, narrow.params["final_norm"].dtype) == ("bf16", jnp.bfloat16)


@pytest.fixture(scope="module")
def chatting(model):
    """The model with bytes as tokens and a template, which writes characters below its vocabulary of 96."""
    template = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[0].content }}"
    return replace(model, tokenizer=replace(byte_tokenizer(), config={"chat_template": template}))


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"rol": "user"}, "a message is {'rol': 'user'}; it has a role and a content"),
        ({"role": "user"}, "it has a role"),
    ],
)
def test_a_message_without_a_role_or_a_content_is_refused(chatting, message, said):
    with pytest.raises(mw.MeshwrightError) as error:
        chatting.generate([message])
    assert said in str(error.value)


def test_messages_have_tools_and_content_in_parts(chatting):
    tools = [{"type": "function", "function": {"name": "TIME"}}]
    parts = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    found = prompt_of({"messages": [{"role": "user", "content": parts}], "tools": tools})
    assert bytes(chatting.encode(found).tolist()) == b"TIME;AB"
    assert bytes(chatting.encode(as_message(found)).tolist()) == b"TIME;AB"
    assert bytes(chatting.encode(prompt_of({"messages": [{"role": "user", "content": "A"}]})).tolist()) == b"A"
    for wrong in ({"prompt": "A", "tools": tools}, {"messages": "A"}, {"prompt": "A", "messages": [{}]}, {}):
        with pytest.raises(mw.MeshwrightError):
            prompt_of(wrong)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"stride": 0}, "stride is 0; it is from 1"), ({"seq_len": 0}, "seq_len is 0; it is 1 or more")],
)
def test_windows_of_no_tokens_are_refused(model, options, said):
    with pytest.raises(mw.MeshwrightError, match=said):
        model.score([[1, 2, 3]], **options)


def test_a_text_of_one_token_and_no_text_are_not_scored(model):
    with pytest.raises(mw.MeshwrightError, match="a text has 1 token; its second is the first that is predicted"):
        model.score([[1]])
    with pytest.raises(mw.MeshwrightError, match="there is no text"):
        model.score([])


def test_choices_that_are_the_same_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"query": "q", "choices": ["x", "x"], "gold": 0}\n')
    with pytest.raises(mw.MeshwrightError, match=r"choices is \['x', 'x'\]; it is a list of texts that differ"):
        read_task(tmp_path / "a.jsonl")
