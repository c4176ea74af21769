"""`meshwright.plan` has what the command has: each option as a keyword, with the same answer."""

import inspect
import json

import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.cli.plan.args import Args
from meshwright.cli.words.options import declared_options
from meshwright.options.keywords import SearchOptions

ON_THE_TERMINAL = {"output", "plot", "explain", "evidence", "export", "ops", "json"}
"""Options that say where an answer goes, or how it is printed."""

TINY = {"on": "cpu:8", "batch": 16, "seq_len": 64}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """The directory of adapters as PEFT writes them, as far as a plan reads it."""
    directory = tmp_path_factory.mktemp("adapter")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def command(capsys, *words):
    """What the command prints with --json."""
    capsys.readouterr()
    main(["plan", "tiny", "--on", "cpu:8", *map(str, words), "--json"])
    return json.loads(capsys.readouterr().out)


def test_every_option_of_the_command_is_a_keyword():
    keywords = set(inspect.signature(mw.plan).parameters) | set(SearchOptions.__annotations__)
    options = {option.field for option in declared_options(Args).values()}
    assert options - ON_THE_TERMINAL <= keywords
    assert not ON_THE_TERMINAL & keywords


KEYWORDS = {
    "lora_rank": {"lora_rank": 4, "lora_targets": "query,value"},
    "freeze": {"freeze": "embedding"},
    "packed": {"packed": True},
    "z_loss": {"z_loss": 1e-4},
}


@pytest.mark.parametrize("said", KEYWORDS.values(), ids=KEYWORDS)
def test_a_keyword_does_what_the_option_does(said, capsys):
    words = [word for name, value in said.items() for word in (f"--{name.replace('_', '-')}", value)]
    words = [word for word in words if word is not True]
    compared = command(capsys, "--batch", 16, "--seq-len", 64, *words, "--compare", "fsdp=8", "tp=8")["compared"]
    plans = mw.plan("tiny", **TINY, **said, compare=["fsdp=8", {"tp": 8}])
    assert [str(plan.mesh) for plan in plans] == ["fsdp=8", "tp=8"]
    for plan, data in zip(plans, compared, strict=True):
        assert data == data | plan.predicted.to_json()
    assert plans[0].workload != mw.plan("tiny", **TINY, mesh="fsdp=8").workload


def test_adapters_of_a_directory_are_planned(adapter, capsys):
    words = ("--batch", 16, "--seq-len", 64, "--adapter", adapter, "--compare", "fsdp=8")
    (plan,) = mw.plan("tiny", **TINY, adapter=adapter, compare=["fsdp=8"])
    assert plan.workload.config.lora.rank == 4
    assert plan.workload.frozen_paths
    (data,) = command(capsys, *words)["compared"]
    assert data == data | plan.predicted.to_json()


def test_a_sweep_returns_the_points_that_the_command_prints(capsys):
    points = mw.plan("tiny", on="cpu:8", batch=16, sweep="seq-len=64,128")
    printed = command(capsys, "--batch", 16, "--sweep", "seq-len=64,128")["points"]
    assert [point.value for point in points] == [64, 128]
    assert [point.record.to_json() for point in points] == [point["record"] for point in printed]
    workload = mw.plan("tiny", **TINY, mesh="fsdp=8", remat="none").workload
    assert [point.system for point in mw.plan(workload, on="cpu:8", sweep="chips=4,8")] == ["cpu:4", "cpu:8"]


def test_tokens_and_their_price_are_in_the_plan(capsys):
    plan = mw.plan("tiny", **TINY, tokens="1T", price="4.2", top=1)
    printed = command(capsys, "--batch", 16, "--seq-len", 64, "--tokens", "1T", "--price", 4.2)["training_run"]
    run = plan.training_run
    assert (run.tokens, run.cost) == (printed["tokens"], printed["cost"])
    assert run.cost == pytest.approx(4.2 * run.chip_hours)
    assert mw.plan("tiny", **TINY, mesh="fsdp=8").training_run is None


def test_the_file_of_a_plan_is_the_plan(tmp_path):
    plan = mw.plan("tiny", **TINY, mesh="fsdp=8")
    plan.write(tmp_path / "plan.yaml")
    assert mw.plan(tmp_path / "plan.yaml") == plan
    with pytest.raises(mw.MeshwrightError, match="which sets on=… itself"):
        mw.plan(tmp_path / "plan.yaml", on="cpu:8")


def test_of_a_run_the_call_that_has_its_plan_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(mw.MeshwrightError, match=r"is the directory of a run; mw.verify\('.*'\).plan is its plan"):
        mw.plan(tmp_path)


WRONG = {
    "a mesh beside compare": (
        lambda: mw.plan("tiny", **TINY, compare=["tp=8"], mesh="tp=8"),
        "mesh has no effect with compare",
    ),
    "compare beside sweep": (
        lambda: mw.plan("tiny", **TINY, compare=["tp=8"], sweep="chips=4,8"),
        "compare has no effect with sweep",
    ),
    "what is swept": (
        lambda: mw.plan("tiny", **TINY, sweep="seq_len=64,128"),
        "seq_len has no effect with sweep",
    ),
    "tokens beside sweep": (
        lambda: mw.plan("tiny", **TINY, sweep="chips=4,8", tokens="1T"),
        "tokens has no effect with sweep",
    ),
    "a price alone": (lambda: mw.plan("tiny", **TINY, price=4.2), "price has no effect without tokens"),
    "a mesh twice": (lambda: mw.plan("tiny", **TINY, compare=["tp=8", "1,1,8,1"]), "compare has tp=8 twice"),
    "meshes as text": (lambda: mw.plan("tiny", **TINY, compare="tp=8"), "compare is 'tp=8'; it is a list of meshes"),
    "tokens of a server": (
        lambda: mw.plan("tiny", "cpu:8", serve="decode", tokens="1T"),
        "tokens has no effect with serve='decode'",
    ),
    "a server's phase": (
        lambda: mw.plan("tiny", "cpu:8", serve="decod"),
        "phase is 'decod'; it is one of prefill, decode",
    ),
    "lengths without a batch": (
        lambda: mw.plan("tiny", on="cpu:8", sweep="seq_len=64,128"),
        "--sweep seq-len needs --batch",
    ),
}  # fmt: skip


def test_a_server_is_planned_as_verify_plans_it():
    found = mw.plan("tiny", "cpu:8", serve="decode", batch=8, prompt_len=48, output_len=16, mesh="tp=8")
    assert (str(found.mesh), found.batch) == ("tp=8", 8)
    assert str(found).startswith("tiny · decode · 8 × 48 + 16 tokens · cpu:8\ntp=8   ")
    assert str(found) in found._repr_html_().replace("</div><div><b>", "\n")


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_a_keyword_that_changes_nothing_is_refused(call, said):
    with pytest.raises(mw.MeshwrightError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)
