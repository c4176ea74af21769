"""Random command lines, values and files: every call ends with an exit code that is documented, and never a traceback.

What takes long (compiling, training, searches over more than 16 devices) is left out: `Reached` stands where it begins.
"""

import json
import os
import sys

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, seed, settings

from meshwright.cli.main import EXIT_CODES, SEVERAL_KINDS, command_module, main
from meshwright.cli.words.options import declared_options


class ReachedError(Exception):
    """The long part of a command would begin."""


def reach(*args, **options):
    raise ReachedError


LONG = [
    "meshwright.proof.verification.plans.verify_plan",
    "meshwright.proof.verification.serving.verify_serving",
    "meshwright.execution.training.loop.run_steps",
    "meshwright.execution.loading.library.Found.load",
    "meshwright.proof.inspection.functions.inspect",
    "meshwright.execution.runtime.devices.claim_devices",
    "meshwright.cli.demo._story",
    "meshwright.cli.completion._place",
    "meshwright.cli.plan.sweep.plot_plan",
]

WEIRD = [
    "", " ", "0", "-1", "1.5", "1e3", "nan", "inf", "1" * 30, "64k", "4Mi", "None", "auto", "[]", "{}", "=",
    "a=b", "é×",
    "\x00", "../..", "/dev/null", "/", ".", "x" * 300, "--json", "-h5", "8:8", "true", "dp=8", "X=4", "I=8", "1,2,4,1",
    "dp=2,dp=2", "fsdp=-1", "dp=99999999999999999999", "tp=3", "pp=2,dp=4", "sp=8", "X=2,Y=2", "I=8,J=8", "Q=7", "X",
    "X,Y", "X,X", "30ms", "0s", "bf16", "int8", "fp8", "f64", "chips=4..8", "batch=8,16", "seq-len=64..128", "chips=",
    "chips=8..4", "all=3", "batch=1..99999999",
]  # fmt: skip

CHIPS = [
    *["cpu:8"] * 12,  "cpu:4", "v5e:2x2", "v5e:4x4", "h100:8", "2*v5e:2x2", "v5p-16", "v4-8", "v5litepod-4",
    "v6e-4", "h100", ":8",
    "cpu:0", "cpu:-1", "v5e:3x3", "v5p:2x2", "v9:8", "0*v5e:2x2", "cpu:99999999999", "h100:13", "v5p-7", "v5p-0",
    "2xv5e:2x2", "mine:8", "cpu:8:8", "V5E:2X2", " cpu : 8 ", "cpu:8x8", "v5e:2x2x2", "99999999*v5e:2x2",
]  # fmt: skip

GOOD = {
    "--on": CHIPS, "--batch": ["16", "8", "32"], "--seq-len": ["64", "128"], "--mesh": ["dp=8", "fsdp=2,tp=4", "X=4"],
    "--dims": ["I=8,J=8,K=8", "I=8"], "--axis": ["X"], "--bytes": ["64M"], "--top": ["3"], "--stages": ["2", "4"],
    "--microbatches": ["4"], "--num-layers": ["1"], "--compare": ["dp=8"], "--sweep": ["chips=4,8"],
    "--hardware": ["mine.toml", "bad.toml", "empty"], "--output": ["o.yaml", "o.json", "dir", "none/x"],
    "--html": ["h.html"], "--svg": ["s.svg"], "--plot": ["p.svg", "p.txt"], "--run": ["run", "dir"],
    "--latency": ["30ms"], "--data": ["empty", "mine.toml"], "--steps": ["3"], "--prompt": ["x"],
    "--prompts": ["empty", "cut.json", "none"], "--stop-tokens": ["3"], "--max-file-size": ["1M"],
    "--fields": ["text", "[a],b"],
    "--task": ["empty", "list.json", "none"], "--stride": ["8"],
    "--prompt-len": ["64"], "--output-len": ["8"], "--weight-dtype": ["int8", "fp8", "bf16"],
    "--kv-dtype": ["int8", "bf16"], "--tolerance": ["0.1"], "--num-microbatches": ["2"], "--virtual-stages": ["2"],
}  # fmt: skip

MODELS = [
    "tiny", "tiny-moe", "tiny-gpt2", "good", "good/config.json", "empty", "list.json", "cut.json", "bytes",
    "dir", "plan.yaml", "cut.yaml", "none.yaml", "run", "TINY", "llama", "fuzzed.json", "",
]  # fmt: skip

ARRAYS = [
    "A[I_X]", "A[I_X, J]", "A[I_X, J] @ B[J, K]", "A[I, J_X] @ B[J_X, K] -> C[I, K]", "A[", "A[I_Z]", "A[I] @",
    "@", "->",
    "A[I_X, J_X]", "A[I] -> A[I_X]", "I_X J @ J K", "A[I_XX]", "é[I]", "A" * 300,
]  # fmt: skip

FIRST = {
    "plan": [*MODELS, *["fuzzed.json"] * 10],
    "verify": MODELS,
    "train": MODELS,
    "tokenize": ["empty", "list.json", "cut.json", "bytes", "dir", "none"],
    "report": ["run", "run run", "dir", "empty", "none"],
    "generate": ["run", "dir", "empty", "none", "good"],
    "serve": ["dir", "empty", "none"],
    "eval": ["run", "dir", "good", "none"],
    "export": ["run out", "good out", "dir none/out", "none out", "good dir"],
    "inspect": [":f", "f:", "os:path", "none:f", "empty", "bytes", "list.json", "sys:exit", "json:loads"],
    "matmul": ARRAYS,
    "collective": ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute", "gather"],
    "chips": ["v5e", "H100", "x", ""],
    "show": ARRAYS,
    "show pipeline": [],
    "completion": ["bash", "zsh", "fish", "csh"],
}

CONFIG = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
}  # fmt: skip

FIELDS = [
    *CONFIG, "rope_scaling", "rope_parameters", "head_dim", "tie_word_embeddings", "hidden_act", "quantization_config",
    "sliding_window", "layer_types", "attention_bias", "num_local_experts", "partial_rotary_factor", "unknown",
]  # fmt: skip

JSON = st.recursive(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2, 3, 128, 10**9, 10**30, 0.0, -1.5, 1e308, float("nan"), float("inf"), "", "x",
         "silu", "llama3", "linear", "yarn", "default", "mistral", "gpt2", "qwen2", "gemma2"]
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def options_of(command):
    """Every option of a command, of all its kinds, by its first name."""
    module = command_module(command)
    kinds = module.KINDS.values() if command in SEVERAL_KINDS else ()
    found = {}
    for args in kinds or (module.Args,):
        found |= {option.name: option for option in declared_options(args).values()}
    return sorted(found.values(), key=lambda option: option.name)


@st.composite
def calls(draw):
    """The words of a call that is nearly right, and the fields of `fuzzed.json`."""
    command = draw(st.sampled_from(list(FIRST)))
    words = command.split()
    if FIRST[command] and not rarely(draw):
        first = draw(st.sampled_from(FIRST[command]))
        words += first.split() if command == "export" else [first]
    options = options_of(command)
    chosen = {o.name: o for o in options if (o.is_needed or o.name in ("--on", "--batch")) and not rarely(draw)}
    if options:
        chosen |= {o.name: o for o in draw(st.lists(st.sampled_from(options), max_size=4))}
    for option in chosen.values():
        words.append(option.name)
        if option.takes != "none":
            pool = [*option.choices, *GOOD.get(option.name, [])] or ["1", "4", "0.5"]
            words.append(draw(st.sampled_from(WEIRD if draw(st.integers(0, 7)) == 0 else pool)))
    if rarely(draw):
        words.append(draw(st.sampled_from(WEIRD)))
    return words, draw(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))


def rarely(draw):
    """True once in twenty calls."""
    return draw(st.integers(0, 19)) == 7


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with good and broken files, where whatever takes long is not begun."""
    from meshwright.description.hardware.load import DATA
    from meshwright.planning import search
    from meshwright.planning.serving import search as serving

    assert main(["plan", "tiny", "--on", "cpu:8", "--batch", "16", "-o", str(tmp_path / "plan.yaml")]) == 0
    for place in LONG:
        monkeypatch.setattr(place, reach)
    for module, name in ((search, "rank_space"), (serving, "rank_serving")):
        real = getattr(module, name)

        def small(space, *args, real=real, **options):
            system = getattr(space, "system", None) or args[0]
            return real(space, *args, **options) if system.num_devices <= 16 else reach()

        for place in list(sys.modules.values()):  # Wherever it was imported.
            if place.__name__.startswith("meshwright.") and getattr(place, name, None) is real:
                monkeypatch.setattr(place, name, small)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    files = {
        "good/config.json": json.dumps(CONFIG),
        "empty": "",
        "list.json": "[1]",
        "cut.json": json.dumps(CONFIG)[:40],
        "cut.yaml": (tmp_path / "plan.yaml").read_text()[:300],
        "mine.toml": (DATA / "h100.toml").read_text().replace('name = "h100"', 'name = "mine"'),
        "bad.toml": "name = 3",
        "run/config.json": "{}",
        "run/metrics.jsonl": "[1]\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "bytes").write_bytes(os.urandom(200))
    (tmp_path / "dir").mkdir()
    return tmp_path


def check(words, fields, folder, capsys):
    """Run a call and hold it to the rules."""
    (folder / "fuzzed.json").write_text(json.dumps(CONFIG | fields))
    try:
        code = main(words)
    except ReachedError:
        code = None
    error = capsys.readouterr().err
    assert code is None or code in EXIT_CODES, words
    assert "Traceback" not in error, (words, error)
    if code == 2 and words:
        lines = [line for line in error.splitlines() if not line.startswith("note: ")]
        assert lines[0].startswith("error: "), (words, error)
        # One line, or three where a caret shows the place in a text of the notation.
        assert len(lines) == 1 or (len(lines) == 3 and lines[2].strip() == "^"), (words, error)
    for left in folder.rglob("*.partial"):
        raise AssertionError(f"{words} left {left}")


QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@given(call=calls())
@QUICK
def test_random_calls_end_with_a_code_that_is_documented(call, folder, capsys):
    check(*call, folder, capsys)


@pytest.mark.matrix
@given(call=calls())
@settings(QUICK, max_examples=1000, derandomize=False)
@seed(7)
def test_1000_random_calls(call, folder, capsys):
    check(*call, folder, capsys)


@pytest.mark.exhaustive
@given(call=calls())
@settings(QUICK, max_examples=5000, derandomize=False)
@seed(8)
def test_5000_random_calls(call, folder, capsys):
    check(*call, folder, capsys)
