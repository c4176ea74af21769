"""Runs on records: packed documents of a mixture continue bit-equal, chats are learned, metrics say what was read."""

import json

import numpy as np
import pytest
from data_files import write_lines

import meshwright as mw
from meshwright.execution.training.run_directory.run import read_metrics

SMALL = {"on": "cpu:8", "batch": 8, "seq_len": 32, "num_layers": 1}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    sums = [{"text": f"{n}+{n}."} for n in range(200)]
    asked = [{"q": f"{n}?", "a": f"{n}."} for n in range(150)]
    write_lines(folder / "sums.jsonl", sums)
    write_lines(folder / "asked.jsonl", asked)
    from meshwright.execution.data.encoding import find_encoder
    from meshwright.execution.data.sources import find_files
    from meshwright.execution.data.tokenizing import Tokenizing, tokenize

    source = find_files((str(folder / "asked.jsonl"),))
    tokenize(Tokenizing(source, find_encoder(source, "[q],a", None), "error", "bytes"), folder / "asked")
    return (f"{folder / 'sums.jsonl'}=0.6", f"{folder / 'asked'}=0.4")


def train(directory, mixture, *, mesh="fsdp=8", **options):
    mw.train("tiny", directory, mesh=mesh, data=mixture, **SMALL | options)
    return [row["loss"] for row in read_metrics(directory)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:held_out leaves")
def test_a_run_of_a_packed_mixture_goes_on_bit_equal(mixture, tmp_path):
    options = {"decay_steps": 4, "warmup_steps": 1, "held_out": 0.1}
    straight, run = train(tmp_path / "straight", mixture, steps=4, **options), tmp_path / "run"
    train(run, mixture, steps=2, **options)
    mw.train(run, resume=True, steps=4)
    assert [row["loss"] for row in read_metrics(run)] == straight
    rows = read_metrics(run)
    names = {name.rpartition("=")[0] for name in mixture}
    assert {name for row in rows for name in row["sources"]} == names
    for row in rows:
        tokens = sum(size["tokens"] for size in row["sources"].values())
        assert 0 < row["loss_tokens"] <= tokens <= 8 * 32
        assert all(size["documents"] > 0 for size in row["sources"].values())


@pytest.fixture(scope="module")
def on_fsdp(mixture, tmp_path_factory):
    """The losses over fsdp alone."""
    return train(tmp_path_factory.mktemp("fsdp") / "run", mixture, steps=3, num_layers=2)


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["2,2,2,1", "1,2,2,2", "fsdp=2,pp=2,tp=2"])
def test_a_packed_mixture_has_the_same_losses_on_every_mesh(mixture, on_fsdp, tmp_path, mesh):
    options = {"attention": "flash"} if mesh == "1,2,2,2" else {}
    losses = train(tmp_path / "run", mixture, mesh=mesh, steps=3, num_layers=2, **options)
    np.testing.assert_allclose(losses, on_fsdp, rtol=1e-4)


def test_the_config_of_a_run_says_what_its_rows_are(mixture, tmp_path):
    from meshwright.execution.training.library import new_run
    from meshwright.planning.library import plan_to_run

    plan = plan_to_run("tiny", {"mesh": "fsdp=8", **SMALL})
    config = new_run("tiny", plan, tmp_path / "run", steps=3, settings={"data": mixture})
    assert (config.data.rows, config.workload.packed) == ("packed", True)
    text = tmp_path / "a.txt"
    text.write_text("some text " * 200)
    config = new_run("tiny", plan, tmp_path / "run", steps=3, settings={"data": (str(text),)})
    assert (config.data.rows, config.workload.packed) == ("windows", False)
    assert json.loads(json.dumps(config.to_json()))["data"]["rows"] == "windows"
