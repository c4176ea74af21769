"""Answers as objects: what the command prints, fields, a notebook's HTML, and the defaults of what is left out."""

import json
import subprocess
import sys
from html import unescape

import jax
import pytest

import meshwright as mw
from meshwright.cli.main import main

CASE_4 = "A[I_X, J] @ B[J, K_X] -> C[I_X, K]"


@pytest.fixture(autouse=True)
def eight_devices():
    """JAX started with the devices of the tests."""
    assert len(jax.devices()) == 8


ANSWERS = {
    "matmul": (
        lambda: mw.matmul(CASE_4, mesh="X=4", dims="I=8k,J=8k,K=4k", on="v5e:4x4"),
        ["matmul", CASE_4, "--mesh", "X=4", "--dims", "I=8k,J=8k,K=4k", "--on", "v5e:4x4"],
    ),
    "resharding": (
        lambda: mw.matmul("A[I_X, J] -> A[I, J_X]", mesh="X=4", on="v5e:2x2"),
        ["matmul", "A[I_X, J] -> A[I, J_X]", "--mesh", "X=4", "--on", "v5e:2x2"],
    ),
    "collective": (
        lambda: mw.collective("all-reduce", bytes="1G", mesh="X=4,Y=2", axis="X,Y", on="v5e:2x4"),
        ["collective", "all-reduce", "--mesh", "X=4,Y=2", "--axis", "X,Y", "--on", "v5e:2x4", "--bytes", "1G"],
    ),
    "pipeline": (
        lambda: mw.pipeline(2, 4, virtual_stages=2, layers=6),
        ["show", "pipeline", *["--stages", "2", "--microbatches", "4", "--virtual-stages", "2", "--layers", "6"]],
    ),
    "chips": (mw.chips, ["chips"]),
    "devices": (mw.devices, ["devices"]),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_screen_of_its_command_everywhere(name, capsys):
    make, words = ANSWERS[name]
    assert main(words) == 0
    screen, _, after = capsys.readouterr().out.rpartition("\n\n next ")
    assert after
    answer = make()
    assert str(answer) == repr(answer) == screen.rstrip()
    if name != "pipeline":  # It is its picture.
        assert screen.rstrip() in unescape(answer._repr_html_())
        assert screen.rstrip().partition("\n")[2] in unescape(answer.html())


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_in_a_notebook_has_no_codes_of_a_terminal(name, monkeypatch):
    """Jupyter's kernel sets FORCE_COLOR: a page showed `[1m` around the bold lines."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    answer = ANSWERS[name][0]()
    assert "\x1b" not in str(answer) + answer._repr_html_()


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_as_data_is_the_commands_json(name, capsys):
    make, words = ANSWERS[name]
    assert main([*words, "--json"]) == 0
    assert json.loads(json.dumps(make().to_json())) == json.loads(capsys.readouterr().out)


def test_degrees_and_sizes_are_keywords():
    answer = mw.matmul("A[I, J_X] @ B[J_X, K]", X=4, I=4096, J="8Ki", K=1024, on="v5e:2x4")
    assert (answer.mesh, answer.dims) == ({"X": 4}, {"I": 4096, "J": 8192, "K": 1024})
    assert (answer.case, answer.result, answer.notes) == (3, "C[I, K]", ())
    overlapped, serial = answer.seconds
    way = answer.ways[0]
    assert overlapped == max(way.flops_seconds, way.memory_seconds, way.communication_seconds)
    assert serial == pytest.approx(max(way.flops_seconds, way.memory_seconds) + way.communication_seconds)


def test_what_is_left_out_is_said():
    answer = mw.matmul("A[I_X, J_Y] @ B[J_Y, K]", K=30, on="v5e:2x4")
    assert (answer.mesh, answer.dims) == ({"X": 4, "Y": 2}, {"I": 8192, "J": 8192, "K": 30})
    assert answer.notes == (
        "X=4, Y=2: all devices, because no degree is given",
        "I=8,192, J=8,192: the size of a dim that is left out",
    )
    assert all(note in str(answer) for note in answer.notes)


def test_an_axis_without_a_degree_takes_what_the_others_leave():
    assert mw.matmul("A[I_X, J_Y] @ B[J_Y, K]", X=2, on="v5e:4x4").mesh == {"X": 2, "Y": 8}
    with pytest.raises(mw.MeshwrightError, match="Y of the mesh has no degree, and 8 devices cannot be divided by 3"):
        mw.matmul("A[I_X, J_Y] @ B[J_Y, K]", X=3, on="v5e:2x4")


def test_a_default_size_can_be_divided_by_any_mesh():
    assert set(mw.matmul("A[I_X, J] @ B[J, K]", X=6, on="cpu:6").dims.values()) == {8190}


def test_without_hardware_it_is_this_machines():
    assert str(mw.matmul("A[I_X, J] @ B[J, K]").system) == "cpu:8"
    assert str(mw.matmul("A[I_X, J] @ B[J, K]", X=4).system) == "cpu:4"
    answer = mw.collective("all-gather")
    assert (str(answer.system), answer.mesh, answer.bytes) == ("cpu:8", {"X": 8}, 64e6)
    assert "on is left out: cpu:8, simulated devices" in str(answer)


def test_a_price_does_not_start_jax_so_that_a_run_can():
    code = (
        "import os, sys, meshwright as mw\n"
        "os.environ.pop('XLA_FLAGS', None)\n"
        "answer = mw.matmul('A[I_X, J] @ B[J, K]', I=64, J=64, K=64)\n"
        "print(answer.system)\n"
        "assert 'jax' not in sys.modules\n"
        "import jax\n"
        "assert mw.collective('all-gather').degree == 8\n"
        "assert all(check.is_as_inferred for check in answer.run().checks.values())\n"
        "assert len(jax.devices()) == 8\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "cpu:8"


def test_a_keyword_that_names_nothing_is_refused():
    with pytest.raises(mw.MeshwrightError, match="Q is neither a dim nor a mesh axis of A"):
        mw.matmul("A[I_X, J] @ B[J, K]", X=4, Q=7, on="v5e:2x2")
    with pytest.raises(mw.MeshwrightError, match="'gather' is not a collective"):
        mw.collective("gather", X=4, on="v5e:2x2")
    with pytest.raises(mw.MeshwrightError, match=r"X=0; it is a whole number from 1"):
        mw.collective("all-gather", X=0, on="v5e:2x2")


def test_axes_of_several_letters_are_told_apart_by_their_keywords():
    assert mw.matmul("A[I_dpfsdp, J] @ B[J, K]", dp=2, fsdp=4, on="v5e:2x4").mesh == {"dp": 2, "fsdp": 4}


def test_a_product_is_run_as_it_was_inferred():
    run = mw.matmul("A[I_X, J] @ B[J, K_X] -> C[I_X, K]", X=4, I=64, J=64, K=64, on="v5e:2x2").run()
    assert all(check.is_as_inferred for check in run.checks.values())
    assert "as inferred" in str(run)


def test_a_collective_is_measured_on_devices_that_are_there():
    answer = mw.collective("all-gather", X=4, on="cpu:4", bytes="64k")
    measured = answer.measure()
    assert answer.measured_seconds is None
    assert measured.measured_seconds
    assert "x predicted" in str(measured)


def test_what_goes_through_a_ring_is_the_product_of_the_numbers_beside_it():
    """128 MB and not 2 x 56: with both directions at once the last of n // 2 hops is as full as the others."""
    text = str(mw.collective("all-reduce", on="v5e:2x4"))
    assert "128 MB at 90.0 GB/s = 1.42 ms" in text
    assert "B = 90.0 GB/s (2 links of 45.0 GB/s" in text


def test_devices_are_those_that_jax_has():
    found = mw.devices()
    assert (found.platform, found.processes, str(found.system)) == ("cpu", 1, "cpu:8")
    assert [device.id for device in found.devices] == [device.id for device in jax.devices()]
    assert "8 devices · simulated on this machine's CPU · 1 process   on='cpu:8'" in str(found)
    assert found.to_json()["devices"][0]["coordinates"] is None


def test_a_tpus_devices_have_coordinates_and_memory(monkeypatch):
    class Tpu:
        platform, device_kind, process_index, slice_index, core_on_chip = "tpu", "TPU v5 lite", 0, 0, 0

        def __init__(self, number):
            self.id, self.coords = number, (number % 2, number // 2, 0)

        def memory_stats(self):
            return {"bytes_limit": 16_000_000_000, "bytes_in_use": 2_000_000_000}

    monkeypatch.setattr(jax, "devices", lambda: [Tpu(number) for number in range(4)])
    text = str(mw.devices())
    assert "4 devices · TPU v5 lite · 1 process   on='v5e:2x2'" in text
    assert "3        0        1,1,0      0  2.00 GB  16.0 GB" in text
    Tpu.device_kind = "TPU v99"
    assert mw.devices().system is None
    with pytest.raises(mw.MeshwrightError, match="this machine's TPU v99 is not known"):
        mw.matmul("A[I_X, J] @ B[J, K]")


def test_chips_are_all_or_one():
    assert len(mw.chips().chips) > 10
    assert "source: " in str(mw.chips("v5e"))
    with pytest.raises(mw.MeshwrightError, match="leave 'v5e' out"):
        mw.chips("v5e", hardware="mine.toml")


def test_an_answer_that_cannot_be_drawn_is_shown_without_its_picture():
    answer = mw.collective("all-gather", X=16, on="h100:16")
    assert "<svg" not in answer._repr_html_() + answer.html()
    assert "all-gather over X = 16" in answer._repr_html_()
    assert "<svg" in mw.collective("all-gather", X=8, on="h100:8")._repr_html_()
