"""The best plan on each of several systems, side by side."""

import json

import pytest

from meshwright import MeshwrightError, plan
from meshwright.cli.main import main

WORDS = ["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--seq-len", "8192"]


def test_each_system_has_the_plan_that_it_has_alone():
    options = {"batch": 512, "seq_len": 8192}
    found = plan("llama3-8b", on="v5p:4x4x4", compare_systems=["h100:64"], **options)
    alone = [plan("llama3-8b", on=on, top=1, **options) for on in ("v5p:4x4x4", "h100:64")]
    assert [(one.hardware, one.mesh, one.strategy) for one in found] == [
        (one.hardware, one.mesh, one.strategy) for one in alone
    ]


def test_the_screen_has_a_column_a_system_and_each_chips_price(capsys):
    more = ["--compare-systems", "h100:64", "--tokens", "1T", "--price", "v5p=4,h100=2"]
    assert main([*WORDS, *more]) == 0
    said = capsys.readouterr().out
    assert "v5p:4x4x4" in said
    assert "h100:64" in said
    for name in ("best mesh", "range", "tokens a second", "chip hours", "cost"):
        assert f"\n{name} " in said or f"\n {name} " in said, said
    assert main([*WORDS, *more, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["systems"]
    assert first["training_run"]["cost"] == pytest.approx(4 * first["training_run"]["chip_hours"])
    assert second["training_run"]["cost"] == pytest.approx(2 * second["training_run"]["chip_hours"])


def test_what_cannot_be_compared_is_refused(capsys):
    with pytest.raises(MeshwrightError, match="compare_systems has v5p:4x4x4 twice"):
        plan("llama3-8b", on="v5p:4x4x4", compare_systems=["v5p:4x4x4"], batch=512)
    more = ["--compare-systems", "h100:64", "--tokens", "1T", "--price", "v5p=4"]
    assert main([*WORDS, *more]) == 2
    assert "price 'v5p=4' has none for h100; add h100=AMOUNT" in capsys.readouterr().err
