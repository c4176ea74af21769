"""Calls of new users, each with the exit code and the word that it has to end with, in one process."""

import json
import os
import shlex

import battery_configs
import battery_others
import battery_plan
import pytest

from meshwright.cli.main import main
from meshwright.description.hardware.load import DATA

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip


def rows(table):
    """The calls of a table: exit code, words, what is said."""
    for line in table.strip("\n").splitlines():
        code, _, rest = line.partition(" | ")
        call, _, said = rest.rpartition(" |")
        yield int(code), call.strip(), said.strip()


CALLS = [*rows(battery_plan.CALLS), *rows(battery_others.CALLS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with good and broken files."""
    folder = tmp_path_factory.mktemp("battery")
    assert main(["plan", "tiny", "--on", "cpu:8", "--batch", "16", "--json", "-o", str(folder / "plan.yaml")]) == 0
    mine = (DATA / "h100.toml").read_text().replace('name = "h100"', 'name = "mine"')
    assert main(["plan", "tiny", "--on", "cpu:8", "--serve", "decode", "--json", "-o", str(folder / "serve.yaml")]) == 0
    shadow = mine.replace('"mine"', '"h100"').replace("9.89e14", "8e14")
    texts = {
        "good/config.json": json.dumps(CONFIG), "short.json": json.dumps(CONFIG | {"max_position_embeddings": 64}),
        "empty": "", "list.json": "[1]", "list.yaml": "[1]",
        "null.json": "null",
        "cut.json": json.dumps(CONFIG)[:40], "deep.json": "[" * 100_000, "bad.toml": "name = 3", "mine.toml": mine,
        "shadow.toml": shadow,
        "cut.yaml": (folder / "plan.yaml").read_text()[:300], "run/config.json": "{}", "run/metrics.jsonl": "[1]\n",
    }  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("bytes", "bytes.yaml"):
        (folder / name).write_bytes(bytes(range(128, 256)))
    (folder / "dir").mkdir()
    return folder


def check(words, code, said, capsys):
    """Run a call and hold it to its row."""
    found = main(words)
    out, error = capsys.readouterr()
    assert found == code, error
    assert said in out + error, out[-500:] + error
    if code == 2 and words:
        lines = [line for line in error.splitlines() if not line.startswith("note: ")]
        assert lines[0].startswith("error: ")
        assert len(lines) == 1 or lines[-1].strip() == "^", error  # A caret shows the place in a text of the notation.


@pytest.mark.parametrize(("code", "call", "said"), CALLS, ids=[call for _, call, _ in CALLS])
def test_a_call_ends_as_it_must(code, call, said, files, capsys, monkeypatch):
    monkeypatch.chdir(files)
    monkeypatch.setenv("HOME", str(files))
    before = sorted(os.listdir(files))
    check([word.replace("LONG", "x" * 300) for word in shlex.split(call)], code, said, capsys)
    if code == 2:
        assert sorted(os.listdir(files)) == before


@pytest.mark.parametrize(
    ("code", "fields", "said"), battery_configs.ROWS, ids=[str(row[1]) for row in battery_configs.ROWS]
)
def test_a_field_of_a_config_json_is_honoured_refused_or_known_to_change_nothing(
    code, fields, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    data = {name: value for name, value in (CONFIG | fields).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(data))
    check(["plan", "config.json", "--on", "cpu:1", "--batch", "16", "--seq-len", "64"], code, said, capsys)


def test_the_battery_is_large():
    assert len(CALLS) + len(battery_configs.ROWS) >= 400
