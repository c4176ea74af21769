"""`meshwright matmul` and `meshwright collective`: the answers of the notation as users get them."""

import json

import pytest

from meshwright.cli.main import main

MAXTEXT = ["matmul", "B M_x @ M_x E = B E -> RS over x -> B E_x", "--mesh", "x=4", "--dims", "B=1024,M=32768,E=8192",
           "--on", "v6e:4x4"]  # fmt: skip
FSDP = ["matmul", "A[B_X, D] @ W[D_X, F] -> C[B_X, F]", "--mesh", "X=8", "--dims", "B=65536,D=8192,F=32768",
        "--on", "v5p:2x2x2"]  # fmt: skip
GATHER = ["collective", "all-gather", "--mesh", "X=4", "--axis", "X", "--on", "v5e:4x4", "--bytes", "64M"]

MISTAKES = [
    ([*FSDP[:1], "A[B_X, D @ W", *FSDP[2:]], ["error: ", "^"]),
    ([*FSDP[:1], "A[B_Z, D] @ W[D, F]", *FSDP[2:]], ["Z"]),
    ([*FSDP[:5], "B=65536,D=8191,F=32768", *FSDP[6:]], ["8191"]),
    ([*FSDP[:7], "v5p:2x2x1"], ["8", "4"]),
    ([*GATHER[:5], "Z", *GATHER[6:]], ["'Z' is not on the mesh", "X"]),
    ([*GATHER[:9], "64Q"], ["--bytes is '64Q'"]),
    (
        ["matmul", "BM_x @ M_xE = BE -> Reduce-Scatter (RS) over x", "--mesh", "x=4"],
        ["the dim that x will split is missing; write the result after ->"],
    ),
]


def test_maxtexts_product_has_its_intensity_the_hardwares_and_the_verdict(capsys):
    """v6e: 918 TFLOP/s over 180 GB/s are 5100 flops a byte (MaxText's sharding guide)."""
    assert main(MAXTEXT) == 0
    printed = capsys.readouterr().out
    assert "network intensity M_x = 8192 flops a byte; hardware intensity 5100" in printed
    assert "compute bound; compute bound when M_x > 5100" in printed


def test_matmul_answers_in_its_schema(capsys):
    assert main([*FSDP, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    wanted = [
        "product",
        "mesh",
        "dims",
        "on",
        "dtype",
        "case",
        "cases",
        "result",
        "collectives",
        "local_shapes",
        "flops_per_device",
        "intensity",
        "bound",
        "threshold",
    ]
    assert list(answer) == [*wanted, "alternatives"]
    assert answer["case"] == 2
    assert answer["result"] == "C[B_X, F]"
    (gather,) = answer["collectives"]
    assert set(gather) == {"kind", "axes", "array", "bytes", "seconds"}
    assert (gather["kind"], gather["axes"], gather["array"]) == ("all-gather", ["X"], "W")
    assert gather["bytes"] == 8192 * 32768 * 2
    assert answer["flops_per_device"] == 2 * 65536 * 8192 * 32768 // 8
    assert answer["local_shapes"]["W[D_X, F]"] == [1024, 32768]
    assert len(answer["alternatives"]) >= 2


@pytest.mark.slow
def test_matmul_runs_in_every_mode_with_the_collectives_inferred(capsys):
    assert main(["matmul", "A[I_X, J_Y] @ B[J_Y, K]", "--mesh", "X=2,Y=4", "--dims", "I=64,J=64,K=64", "--on", "cpu:8",
                 "--run"]) == 0  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    for mode in ("auto", "explicit", "manual"):
        (line,) = [line for line in lines if line.startswith(mode)]
        assert "all-reduce Y" in line
        assert "as inferred" in line


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"])
def test_every_collective_is_priced_and_timed_on_the_devices_that_are_there(kind, capsys):
    words = ["collective", kind, "--mesh", "X=4,Y=2", "--axis", "X", "--on", "cpu:8", "--bytes", "64k"]
    assert main([*words, "--bench", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["degree"] == 4
    assert answer["seconds"] == max(answer["bandwidth_seconds"], answer["latency_seconds"]) or kind == "permute"
    assert answer["measured_seconds"] > 0


def test_a_collective_says_where_it_runs_and_what_decides(capsys):
    assert main(GATHER) == 0
    printed = capsys.readouterr().out
    assert "1.07 ms, decided by ICI x: line of 4" in printed
    assert "64.0 MB, the gathered array; in a ring each device sends 48.0 MB" in printed


def test_a_collective_is_shown_on_real_numbers(capsys):
    """MinText's tutorial 1: the sums of [3,1,4,1], [5,9,2,6], [5,3,5,8], [9,7,1,2] over 4 devices."""
    assert main(["collective", "reduce-scatter", "--mesh", "X=4", "--axis", "X", "--on", "cpu:8", "--bytes", "64",
                 "--run"]) == 0  # fmt: skip
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("22", "20", "12", "17"))
    assert "hop 3 of 3" in printed


@pytest.mark.parametrize("degree", [2, 3, 8])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "permute"])
def test_every_collective_is_shown_on_any_number_of_devices(kind, degree, capsys):
    words = ["--mesh", f"X={degree}", "--axis", "X", "--on", f"cpu:{degree}", "--bytes", "64k", "--run"]
    assert main(["collective", kind, *words]) == 0
    printed = capsys.readouterr().out
    assert kind == "permute" or f"of {degree - 1 if kind != 'all-reduce' else 2 * (degree - 1)}" in printed


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=lambda v: " ".join(v)[:60])
def test_a_mistake_is_one_clear_error(words, said, capsys):
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert all(word in printed for word in said), printed
