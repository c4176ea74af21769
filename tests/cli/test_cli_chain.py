"""What `plan` writes, `verify` compiles and `train` runs: the commands that each screen names next."""

import pytest

from meshwright.cli.main import main

PLANNED = [
    *((model, "cpu:8", ["--batch", "16", "--seq-len", "64"]) for model in ("tiny-moe", "tiny-gemma3")),
    ("mixtral-8x7b", "h100:16", ["--num-layers", "2", "--batch", "32", "--seq-len", "2048"]),
    ("llama3-8b", "v5e:2x4", ["--num-layers", "2", "--batch", "16", "--seq-len", "2048"]),
]


@pytest.mark.matrix  # `test_cli.py` goes from train to verify to generate, and has what plan writes verified.
@pytest.mark.parametrize(
    ("model", "hardware", "more"), PLANNED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_the_best_plan_is_verified_and_trained(model, hardware, more, tmp_path, capsys):
    plan, run = str(tmp_path / "plan.yaml"), str(tmp_path / "run")
    assert main(["plan", model, "--on", hardware, *more, "-o", plan]) == 0
    assert f"meshwright verify {plan}" in capsys.readouterr().out
    assert main(["verify", plan]) == 0
    assert "not the program that was planned" not in " ".join(capsys.readouterr().out.split())
    if hardware.startswith("cpu"):
        assert main(["train", plan, "--steps", "2", "--out", run]) == 0
        assert main(["generate", run, "--num-tokens", "4"]) == 0
