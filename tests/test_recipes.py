"""The recorded runs of `runs/*.sh`: their options are the command's, and one reaches what it says."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from meshwright.cli.main import main
from meshwright.cli.train.args import Args
from meshwright.cli.words.read import canonical, read_words
from meshwright.execution.training.run_directory.run import read_metrics

ROOT = Path(__file__).parents[1]
RECIPES = sorted(path.relative_to(ROOT) for path in (ROOT / "runs").glob("*.sh"))


def train_words(recipe, folder):
    """What a recipe gives `meshwright train`, run with a command that only writes down what it is given."""
    (folder / "bin").mkdir()
    (folder / "bin" / "meshwright").write_text('#!/bin/sh\nprintf "%s\\n" "$*" >> calls\n')
    (folder / "bin" / "meshwright").chmod(0o755)
    (folder / "runs").mkdir()
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin"}
    subprocess.run(["sh", ROOT / recipe, "--dry-run"], cwd=folder, env=environment, check=True)
    calls = [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]
    return next(words[1:] for words in calls if words[0] == "train")


def test_there_are_recipes_of_pretraining_fine_tuning_and_preferences():
    assert {path.name for path in RECIPES} == {"pretrain.sh", "finetune.sh", "dpo.sh"}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_the_options_of_a_recipe_are_those_of_train(recipe, tmp_path):
    args, typed = read_words(canonical(train_words(recipe, tmp_path)), Args, kinds={}, hints={})
    assert args.run.dry_run
    assert str(args.run.output) == f"runs/{recipe.stem}"
    assert {"on", "mesh", "batch", "seq_len", "steps"} <= {*typed}


@pytest.mark.parametrize(
    "taken", [pytest.param(50, marks=pytest.mark.matrix), pytest.param(300, marks=pytest.mark.exhaustive)]
)
def test_pretraining_reaches_what_its_recipe_says(taken, tmp_path, monkeypatch, capsys):
    """To 2%: the sources of another Python are another text, of which a batch is another sample."""
    words = train_words(RECIPES[[path.name for path in RECIPES].index("pretrain.sh")], tmp_path)
    words.remove("--dry-run")
    place = words.index("--steps") + 1
    # A run that is cut short keeps the schedule of all steps.
    words += [] if words[place] == str(taken) else ["--decay-steps", words[place], "--warmup-steps", "30"]
    words[place] = str(taken)
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 0
    text = (ROOT / "runs" / "pretrain.sh").read_text()
    table = [line.split()[2:] for line in re.findall(r"^#   (?:step|loss) .*$", text, re.MULTILINE)]
    rows = read_metrics(tmp_path / "runs" / "pretrain")
    for step, loss in zip(*table, strict=True):
        if int(step) > taken:
            break
        assert rows[int(step) - 1]["loss"] == pytest.approx(float(loss), rel=0.02), step
