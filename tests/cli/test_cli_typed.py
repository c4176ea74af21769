"""Nothing that is typed is ignored: every pair of options of every command is read, or one of them is refused by name.

A command runs up to its expensive work, which `Reached` stands for here.
"""

import functools
import itertools as it

import pytest

from meshwright.cli import main as cli
from meshwright.cli.main import COMMANDS, command_module, main
from meshwright.cli.plan.args import Args, ServeArgs
from meshwright.cli.train.args import Args as TrainArgs
from meshwright.cli.typed import check_all_read, watch
from meshwright.cli.verify.serving import ServeArgs as VerifyServeArgs
from meshwright.cli.words.options import declared_options
from meshwright.description.families.registry import PRESETS
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.text_files import check_text
from meshwright.execution.training.run_directory.run import RunConfig, begin_run
from meshwright.execution.training.update.optimizer import Optimizer
from meshwright.mesh import MeshShape
from meshwright.options.declare import given_options
from meshwright.options.plan import WorkloadArgs
from meshwright.planning.prediction import predict


class ReachedError(Exception):
    """The command has read its options and would begin."""


def reach(*args, **options):
    raise ReachedError


WORK = {
    "plan": [
        "meshwright.cli.plan.command.find_meshes",
        "meshwright.cli.plan.command.plan_one_mesh",
        "meshwright.cli.plan.command.plan_systems",
        "meshwright.cli.plan.sweep.run_sweep",
        "meshwright.cli.plan.serving.rank_serving",
    ],
    "verify": [
        "meshwright.proof.verification.plans.verify_plan",
        "meshwright.proof.verification.serving.verify_serving",
    ],
    "tokenize": ["meshwright.cli.tokenize.tokenize"],
    "train": ["meshwright.cli.train.on_devices.TrainScreen"],
    "launch": ["meshwright.execution.processes.launch.supervisor.supervise"],
    "report": ["meshwright.pictures.report.report"],
    "generate": ["meshwright.execution.loading.library.Found.load"],
    "serve": [
        "meshwright.execution.loading.library.Found.load",
        "meshwright.serving.front.replicas.Replicas",
    ],
    "export": ["meshwright.execution.loading.library.Found.load"],
    "eval": ["meshwright.execution.loading.library.Found.load"],
    "bench-serve": ["meshwright.serving.load.drive.find_model", "meshwright.serving.load.drive.drive"],
    "inspect": ["meshwright.proof.inspection.functions.inspect"],
    "fix": ["meshwright.cli.fix.take_call"],
    "matmul": ["meshwright.cli.matmul.matmul"],
    "collective": ["meshwright.cli.collective.collective"],
    "completion": ["meshwright.cli.completion._place"],
}
"""Where the expensive work of a command begins; the others have none and are run to their end."""

TRAINING = ["tiny", "--on", "cpu:8", "--batch", "16", "--seq-len", "64"]

CALLS = {
    "plan": (Args, ["plan", *TRAINING]),
    "plan serve": (ServeArgs, ["plan", "tiny", "--on", "cpu:8", "--serve", "decode"]),
    "verify": (None, ["verify", *TRAINING, "--mesh", "fsdp=2,tp=4"]),
    "verify serve": (VerifyServeArgs, ["verify", "tiny", "--on", "cpu:8", "--serve", "decode"]),
    "tokenize": (None, ["tokenize", "runs/begun/records.jsonl", "-o", "tokens"]),
    "train": (None, ["train", *TRAINING, "--mesh", "fsdp=2,tp=4"]),
    "train resume": (TrainArgs, ["train", "runs/begun", "--resume"]),
    "launch": (None, ["launch", "-n", "4", "--", "train", *TRAINING]),
    "report": (None, ["report", "runs/begun"]),
    "generate": (None, ["generate", "runs/begun"]),
    "serve": (None, ["serve", "runs/begun"]),
    "export": (None, ["export", "runs/begun", "exported"]),
    "eval": (None, ["eval", "runs/begun", "--data", "runs/begun/metrics.txt"]),
    "bench-serve": (None, ["bench-serve", "http://127.0.0.1:9"]),
    "inspect": (None, ["inspect", "program:make", "--mesh", "dp=2"]),
    "fix": (None, ["fix", "program:build", "--on", "cpu:8"]),
    "matmul": (None, ["matmul", "A[I_X, J] @ B[J, K]", "--mesh", "X=4", "--dims", "I=8,J=8,K=8", "--on", "v5e:2x2"]),
    "collective": (None, ["collective", "all-gather", "--mesh", "X=4", "--axis", "X", "--on", "v5e:2x2",
                          "--bytes", "1M"]),
    "show": (None, ["show", "A[I_X]", "--mesh", "X=4", "--dims", "I=8"]),
    "show pipeline": (None, ["show", "pipeline", "--stages", "2", "--microbatches", "4"]),
    "chips": (None, ["chips"]),
    "learn": (None, ["learn"]),
    "devices": (None, ["devices"]),
    "completion": (None, ["completion", "bash"]),
}  # fmt: skip
"""The arguments of each command, where they are not those of its file, and the shortest call that works."""

VALUES = {
    "--cache": "heads", "--attention": "flash", "--axis": "X", "--batch": "32", "--batch-tokens": "4096",
    "--bytes": "2M", "--compare": "dp=8", "--compare-systems": "v5e:2x4", "--framework": "maxtext",
    "--dims": "I=16,J=16,K=16", "--dropout": "0.1", "--dtype": "bf16",
    "--gradient-dtype": "bf16", "--kv-dtype": "int8", "--latency": "1s", "--layers": "4",
    "--matmul-dtype": "int8", "--mesh": "dp=8", "--microbatches": "8", "--moment-dtype": "bf16", "--num-layers": "1",
    "--num-microbatches": "2", "--on": "cpu:4",
    "--optimizer": "lion", "--output-len": "8", "--param-dtype": "bf16", "--prompt-len": "8", "--remat": "none",
    "--run": "runs/none", "--schedule": "gpipe", "--seq-len": "128", "--serve": "prefill", "--sp-method": "ring",
    "--stages": "4", "--sweep": "chips=4,8", "--tolerance": "0.5", "--top": "3", "--tp-stream": "whole",
    "--virtual-stages": "2", "--weight-dtype": "int8", "--zero-stage": "2", "--effort": "default",
    "--export": "maxtext x.yml",
    "--axes": "auto", "--coordinator": "localhost:1", "--data": "none.txt", "--learning-rate": "0.01",
    "--stuck-seconds": "60", "--restarts": "1", "--elastic": "2", "--name": "long", "--image": "none",
    "--claim": "runs",
    "--num-processes": "2", "--num-samples": "2", "--num-tokens": "8", "--process-id": "1", "--start-seconds": "60",
    "--prompt": "x", "--beta": "0.2", "--label-smoothing": "0.1", "--preference-loss": "ipo",
    "--allow": "dtype", "--grace-seconds": "9", "--keep": "3", "--keep-every": "4",
    "--save-every": "2", "--seed": "3", "--steps": "9", "--temperature": "0",
    "--trace": "t.json", "--prompts": "none.jsonl", "--top-k": "5", "--top-p": "0.9", "--min-p": "0.1",
    "--repetition-penalty": "1.2", "--wandb": "curves", "--profile": "3:5", "--eval-every": "2",
    "--eval-batches": "2", "--eval-data": "none.txt", "--eval-tasks": "none.jsonl",
    "--stop": "x", "--stop-tokens": "3", "--memory-headroom": "0.2", "--tokens": "1T", "--price": "4.2",
    "--lora-rank": "4", "--lora-alpha": "8", "--lora-targets": "q_proj", "--lora-dropout": "0.1",
    "--quantize-base": "nf4", "--adapter": "none",
    "--adapter-slots": "2", "--adapter-rank": "4", "--adapter-folder": "runs",
    "--compile-cache": "off", "--allowed-host": "m.test", "--freeze": "embedding",
    "--z-loss": "1e-4", "--objective": "dpo", "--reference": "precomputed", "--reference-mesh": "fsdp=8",
    "--rows": "packed", "--held-out": "0.1",
    "--tokenizer": "none", "--fields": "text", "--bad-data": "skip", "--processes": "2",
    "--weights": "none", "--max-file-size": "1M", "--stride": "8", "--task": "none.jsonl",
    "--lr-schedule": "linear", "--warmup-steps": "2", "--decay-share": "0.5", "--final-rate": "0", "--rate": "query=2",
    "--weight-decay": "0", "--no-decay": "layers", "--b1": "0.8", "--b2": "0.99", "--eps": "1e-6", "--momentum": "0.9",
    "--config": "none.yaml", "--first-rate": "0", "--decay-steps": "8", "--clip-norm": "0", "--on-bad-step": "skip",
    "--spike-factor": "5", "--max-bad-steps": "4",
    "--concurrency": "4", "--num-requests": "20", "--model": "small", "--max-len": "512", "--slo": "ttft=1",
    "--plan": "none.yaml", "--to": "lessons", "--check": "none.ipynb",
    "--state": "params", "--ignore": "not-donated:lib/*", "--baseline": "b.json", "--write-baseline": "w.json",
    "--sarif": "s.sarif", "--compiled": "2",
    "--host": "::1", "--port": "0", "--context": "64", "--cache-tokens": "4096", "--page-size": "8", "--chunk": "32",
    "--drafts": "3", "--draft-model": "runs/begun", "--max-queue": "9", "--timeout": "5", "--grace": "5",
    "--api-keys": "runs/begun/metrics.txt",
    "--cors": "*", "--replicas": "2",
    "--hardware": "none.toml", "--output": "o.yaml", "--plot": "p.svg", "--html": "h.html", "--svg": "s.svg",
    "--device": "1",
}  # fmt: skip


OTHER_VALUES = {
    ("show", "--dims"): "I=16",
    ("bench-serve", "--rate"): "2",
    ("serve", "--limit"): "requests=2",
    ("serve", "--batch"): "8",
    ("generate", "--batch"): "8",
} | {(name, "--mesh"): "X=2" for name in ("matmul", "collective", "show")}


def options_of(name):
    """The first name of every option of a command."""
    args = CALLS[name][0] or command_module(name).Args
    return sorted({option.name: option for option in declared_options(args).values()}.values(), key=lambda o: o.name)


def typed(option, name):
    value = OTHER_VALUES.get((name, option.name)) or VALUES.get(option.name)
    if option.takes == "many":
        return [option.name, *value.split()]
    return [option.name] if option.takes == "none" else [option.name, value]


def call(name, options):
    """The words of a call with some options more, each in the place of the same one of the shortest call."""
    words = list(CALLS[name][1])
    for option in options:
        if option.name in words:
            at = words.index(option.name)
            del words[at : at + 2]
        # Behind -- stand the words of another command.
        at = words.index("--") if "--" in words else len(words)
        words[at:at] = typed(option, name)
    return words


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """Every command ends where its work begins, in an empty folder."""
    for place in it.chain(*WORK.values()):
        monkeypatch.setattr(place, reach)
    # The calls predict the same few steps, and check the same text.
    monkeypatch.setattr("meshwright.planning.plan.predict", functools.cache(predict))
    checked = functools.cache(check_text)
    monkeypatch.setattr("meshwright.execution.training.data.run_data.check_text", lambda files: checked(tuple(files)))
    monkeypatch.chdir(tmp_path)
    workload = Workload(model=PRESETS["tiny"], batch=16, seq_len=64)
    settings = {"mesh": MeshShape(fsdp=2, tp=4), "hardware": "cpu:8", "optimizer": Optimizer(), "steps": 5}
    (tmp_path / "runs" / "begun").mkdir(parents=True)
    (tmp_path / "runs" / "begun" / "metrics.txt").write_text("a text")
    (tmp_path / "runs" / "begun" / "records.jsonl").write_text('{"text": "a text"}')
    begin_run(tmp_path / "runs" / "begun", RunConfig(workload=workload, **settings), 0)
    watched = []

    def record(args, words):
        watched.append(watch(args, words))
        return watched[-1]

    monkeypatch.setattr("meshwright.cli.typed.watch", record)
    return watched


# Their options are those of plan and more, so many that the pairs of each take up to half a minute.
LONG = ("verify", "train", "launch")
PAIRS = [pytest.param(name, marks=pytest.mark.matrix if name in LONG else ()) for name in CALLS]


@pytest.mark.parametrize("name", PAIRS)
def test_every_pair_of_options_is_read_or_refused_by_name(name, stubbed, capsys):
    for pair in it.combinations(options_of(name), 2):
        words = call(name, pair)
        try:
            code = main(words)
        except ReachedError:
            check_all_read(stubbed[-1])
            capsys.readouterr()
            continue
        # Notes on what is changed may come before an error.
        lines = capsys.readouterr().err.splitlines(keepends=True)
        error = "".join(line for line in lines if not line.startswith("note: "))
        if code == 0:  # `main` has seen that all was read.
            continue
        assert code == 2, words
        assert error.startswith("error: "), (words, error)
        assert error.count("\n") == 1, (words, error)
        said = error.replace("_", "-")
        named = [o.name for o in pair if o.name.lstrip("-") in said or VALUES.get(o.name, "\n") in error]
        assert named, (words, error)


def test_every_command_is_tried_here_or_with_its_files():
    assert {*CALLS} - {"plan serve", "verify serve", "train resume"} | {"demo"} == {*COMMANDS}


def test_an_option_that_is_not_read_is_refused_before_any_work():
    args = watch(WorkloadArgs(batch="8", remat="none"), {"batch": "--batch", "remat": "--remat"})
    assert args.batch == "8"
    with pytest.raises(MeshwrightError, match="--remat has no effect with --sweep; leave it out"):
        check_all_read(args, "with --sweep")
    given_options(args)
    check_all_read(args)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch", "16", "--batch", "16"], "--batch is given twice"),
        (["--json", "--json"], "--json is given twice"),
        (["-o", "a.yaml", "--output=b.yaml"], "--output is given twice"),
        (["--mesh", ""], "--mesh needs a value"),
        (["--compare"], "--compare needs a value"),
        (["--sweep", "chips=4,8", "--mesh", "dp=8"], "--mesh has no effect with --sweep"),
        (["--sweep", "chips=4,8", "--compare", "dp=8"], "--compare has no effect with --sweep"),
        (["--sweep", "batch=8,16", "--batch", "16"], "--batch has no effect with --sweep"),
        (["--sweep", "chips=4,8", "-o", "a.yaml"], "--output has no effect with --sweep"),
        (["--compare", "dp=8", "--mesh", "dp=8"], "--mesh has no effect with --compare"),
        (["--compare", "dp=8", "8,1,1,1"], "compare has dp=8 twice"),
        (["--top", "-3"], "--top is '-3'"),
        (["--top", "0"], "--top is '0'"),
        (["--seq-len", "0"], "seq_len is '0'"),
        (["extra"], "there is no place for 'extra'"),
        (["--batch", "1e23"], "batch is '1e23'"),
        (["--batch", "1" * 23], "batch is"),
        (["--on", "h100:" + "9" * 18], "is too much"),
        (["--seq-len", "1" + "0" * 14], "the most is"),
        (["--num-layers", "100000000"], "the most is"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_plan_refuses_what_would_change_nothing_or_never_end(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = ["tiny"]
    for option, value in (("--on", "cpu:8"), ("--batch", "16")):
        if words.count(option) != 1 and not (option == "--batch" and words[1:2] == ["batch=8,16"]):
            base += [option, value]
    if words.count("--batch") == 2:
        base = ["tiny", "--on", "cpu:8"]
    assert main(["plan", *base, *words]) == 2
    error = capsys.readouterr().err
    assert said in error, error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_is_one_line_and_code_130(name, monkeypatch, capsys):
    def interrupt(module, name, words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupt)
    assert main(name.split()) == 130
    assert capsys.readouterr().err == "interrupted; the same command begins again\n"
