"""Files of prompts through the engine: each answered once, with what its prompt alone gets, whatever interrupts it."""

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace

import pytest
from serving_cases import alone, drawn_model, small_engine

from meshwright.description.families.registry import PRESETS
from meshwright.errors import MeshwrightError
from meshwright.execution.models.generation.sampling import Sampling
from meshwright.serving.engine.request import Request
from meshwright.serving.offline import PromptFile, answer_file

ASKED = Request(prompt=(), max_tokens=9, sampling=Sampling(temperature=0.8, seed=3), num_completions=2)
LINES = [
    {"prompt": "def "},
    {"prompt": [7, 9, 200], "max_tokens": 3},
    {"prompt": "import os", "temperature": 0.0},
    *({"prompt": [number, 2 * number], "seed": number} for number in range(1, 12)),
]


@pytest.fixture(scope="module")
def engine():
    found = small_engine()
    found.start()
    yield found
    found.close()


def prompts_in(tmp_path, engine, lines=LINES, request=ASKED):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(line + "\n" if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return PromptFile(path, engine.model, request, engine.layout.context)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class StoppedError(Exception):
    """Ends a call as a signal would."""


def stop_after(count):
    def on_answer(progress):
        if progress.answered == count:
            raise StoppedError

    return on_answer


def test_every_line_is_answered_once_though_calls_end_in_between(engine, tmp_path):
    prompts, out = prompts_in(tmp_path, engine), tmp_path / "answers.jsonl"
    for count in (3, 4):
        with pytest.raises(StoppedError):
            answer_file(engine, prompts, out, on_answer=stop_after(count))
    with out.open("a") as file:
        file.write('{"line": 1, "te')  # As a machine that lost its power leaves it.
    done = answer_file(engine, prompts, out)
    assert (done.before, done.answered, done.prompts) == (7, len(LINES) - 7, len(LINES))
    assert Counter(answer["line"] for answer in read(out)) == Counter(range(1, len(LINES) + 1))
    for answer in read(out):
        line = LINES[answer["line"] - 1]
        own = {name: line[name] for name in ("temperature", "seed") if name in line}
        request = replace(
            ASKED,
            prompt=engine.model.encode(line["prompt"]).tolist(),
            max_tokens=line.get("max_tokens", 9),
            sampling=replace(ASKED.sampling, **own),
        )
        for number, text in enumerate(answer["texts"]):
            wanted = alone(engine.model, request, number)
            assert (text["tokens"], text["text"]) == ([*wanted.tokens], wanted.text)
            assert text["stopped_by"] == wanted.stopped_by
    assert answer_file(engine, prompts, out, on_start=pytest.fail).answered == 0


def test_other_prompts_options_and_files_are_refused(engine, tmp_path):
    prompts, out = prompts_in(tmp_path, engine), tmp_path / "answers.jsonl"
    with pytest.raises(StoppedError):
        answer_file(engine, prompts, out, on_answer=stop_after(2))
    before = out.read_bytes()
    hotter = replace(ASKED, sampling=replace(ASKED.sampling, temperature=1.0), max_tokens=5)
    with pytest.raises(MeshwrightError, match="another value of: max_tokens, temperature;"):
        answer_file(engine, replace(prompts, request=hotter), out)
    with pytest.raises(MeshwrightError, match="another value of: weights;"):
        answer_file(engine, replace(prompts, weights="/runs/other"), out)
    with pytest.raises(MeshwrightError, match="another value of: the file of prompts;"):
        answer_file(engine, prompts_in(tmp_path, engine, LINES[:-1]), out)
    assert out.read_bytes() == before
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("{}\n")
    with pytest.raises(MeshwrightError, match="not of this command"):
        answer_file(engine, prompts_in(tmp_path, engine), foreign)
    prompts = prompts_in(tmp_path, engine)
    out.write_bytes(before + before.splitlines(keepends=True)[0])
    with pytest.raises(MeshwrightError, match="line 3 is not an answer to these prompts"):
        answer_file(engine, prompts, out)


BAD = {
    "{": ("this is not JSON", "broken"),
    '{"text": "a"}': ("the object has text; it has prompt, or messages", "missing_field"),
    '{"prompt": [256]}': ("token 256 is not one of", "over_vocab"),
    '{"prompt": "a", "max_tokens": 0}': ("max_tokens is 0", "missing_field"),
    '{"prompt": "a", "top_p": 2}': ("top_p is 2", "missing_field"),
    '{"prompt": "\\ud800"}': ("half a character", "invalid_utf8"),
    '{"messages": [{"role": "user", "content": "a"}]}': ("no chat template", "chat"),
    json.dumps({"prompt": "a" * 64}): ("65 tokens with the first generated one; a sequence has 64", "too_long"),
}


def test_bad_lines_stop_before_the_first_answer_or_are_counted(engine, tmp_path):
    out = tmp_path / "answers.jsonl"
    for line, (why, _) in BAD.items():
        with pytest.raises(MeshwrightError, match=rf"prompts.jsonl, line 2: .*{why}.*--bad-data skip"):
            answer_file(engine, prompts_in(tmp_path, engine, [LINES[0], line]), out, on_start=pytest.fail)
    assert not out.exists()
    done = answer_file(engine, prompts_in(tmp_path, engine, [*BAD, "", LINES[0]]), out, rule="skip")
    assert done.skipped == Counter([*(kind for _, kind in BAD.values()), "empty"])
    assert [answer["line"] for answer in read(out)] == [len(BAD) + 2]
    with pytest.raises(MeshwrightError, match="has no prompt"):
        answer_file(engine, prompts_in(tmp_path, engine, [""]), out)


@pytest.mark.matrix
def test_generate_that_is_killed_goes_on_where_it_was(tmp_path):
    model = drawn_model(config=replace(PRESETS["tiny"], num_layers=1))
    model.save(tmp_path / "model")
    lines = [{"prompt": [number % 250 + 1, number // 250 + 1]} for number in range(300)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = "generate model --on cpu:2 --mesh tp=2 --data prompts.jsonl -o answers.jsonl --temperature 0"
    call = [sys.executable, "-m", "meshwright", *words.split(), "--num-tokens", "12", "--context", "32"]
    out = tmp_path / "answers.jsonl"
    process = subprocess.Popen(call, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 20):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, said
    before = out.read_bytes()
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"300 of 300 prompts answered, {len(before.splitlines())} by calls before" in done.stdout
    assert out.read_bytes().startswith(before)
    answers = {answer["line"]: answer["texts"][0]["tokens"] for answer in read(out)}
    assert len(read(out)) == len(answers) == 300
    for number in range(0, 300, 97):
        assert answers[number + 1] == [*model.generate([lines[number]["prompt"]], max_tokens=12)[0].tokens]
