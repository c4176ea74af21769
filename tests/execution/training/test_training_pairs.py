"""Pairs as rows: where answers have loss, what is cut and left out, and what is refused of them and of their plans."""

import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from meshwright import plan
from meshwright.description.families.registry import PRESETS
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.strategy import DEFAULT, Strategy
from meshwright.description.step.workload import Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.training.data.pairs import load_pairs
from meshwright.execution.training.preference.loss import Preference
from meshwright.mesh import MeshShape
from meshwright.planning.cost.comm_volume import reference_collectives
from meshwright.planning.cost.flops import step_flops
from meshwright.planning.cost.memory import step_memory
from meshwright.planning.plan import make_plan

WORKLOAD = Workload(model=PRESETS["tiny"], batch=2, seq_len=16, compute_dtype="f32", objective="dpo")


def written(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)


def pair(prompt, chosen="yes", rejected="no"):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def said(row, weights):
    """The text of a row, and of it what has loss."""
    return bytes(row[row > 0].tolist()), bytes(row[1:][weights > 0].tolist())


def test_the_rows_of_a_pair_are_prompt_and_answer_with_loss_on_the_answer_alone(tmp_path):
    found = load_pairs(written(tmp_path / "p.jsonl", pair("ab: "), pair("cd: ")), None, WORKLOAD)
    assert (found.tokens.shape, found.has_loss.shape, len(found)) == ((2, 2, 17), (2, 2, 16), 2)
    assert said(found.tokens[0, 0], found.has_loss[0, 0]) == (b"ab: yes\n", b"yes\n")
    assert said(found.tokens[0, 1], found.has_loss[0, 1]) == (b"ab: no\n", b"no\n")
    assert found.describe() == ""


def test_a_long_prompt_loses_its_beginning_in_both_rows_and_a_long_answer_its_pair(tmp_path):
    records = pair("0123456789abcde"), pair("short", chosen="x" * 40), pair("ok")
    found = load_pairs(written(tmp_path / "p.jsonl", *records), None, WORKLOAD)
    assert said(found.tokens[0, 0], found.has_loss[0, 0]) == (b"23456789abcdeyes\n"[-17:], b"yes\n")
    assert said(found.tokens[0, 1], found.has_loss[0, 1]) == (b"23456789abcdeno\n", b"no\n")
    assert (found.counts["prompt_cut"], found.counts["answer_too_long"], len(found)) == (1, 1, 2)
    assert found.describe() == (
        "of 2 pairs: 1 prompts cut at their beginning, 1 pairs left out for an answer longer than a row"
    )


def test_memory_does_not_grow_with_the_pairs(tmp_path):
    """2,000 pairs of rows of 2,048 tokens are 41 MB; before, each process had 66 MB of them in memory."""
    sources = written(tmp_path / "p.jsonl", *(pair(f"{number}: ") for number in range(2000)))
    tracemalloc.start()
    found = load_pairs(sources, None, replace(WORKLOAD, seq_len=2048))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.tokens.nbytes + found.has_loss.nbytes > 40e6
    assert peak < 4e6
    tokens, weights = found.rows(np.array([1999, 3]))
    assert said(tokens[0], weights[0]) == (b"1999: yes\n", b"yes\n")
    assert said(tokens[3], weights[3]) == (b"3: no\n", b"no\n")


def test_the_fingerprint_is_of_the_rows_and_their_loss(tmp_path):
    one = load_pairs(written(tmp_path / "p.jsonl", pair("a"), pair("b")), None, WORKLOAD)
    again = load_pairs(written(tmp_path / "q.jsonl", pair("a"), pair("b")), None, WORKLOAD)
    other = load_pairs(written(tmp_path / "r.jsonl", pair("a"), pair("b", chosen="yea")), None, WORKLOAD)
    assert one.fingerprint == again.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([pair("a"), {"prompt": "b", "chosen": "c"}], "line 2"),
        ([pair("a")], r"has 1 pairs that fit rows of 16 tokens; a batch has 2"),
    ],
)
def test_what_is_no_pair_or_too_little_is_one_line(records, message, tmp_path):
    with pytest.raises(MeshwrightError, match=message):
        load_pairs(written(tmp_path / "p.jsonl", *records), None, WORKLOAD)


def test_bad_records_are_left_out_and_counted_where_asked(tmp_path):
    sources = written(tmp_path / "p.jsonl", pair("a"), {"prompt": "b", "chosen": "c"}, pair("", "", ""), pair("d"))
    found = load_pairs(sources, None, WORKLOAD, "skip")
    assert len(found) == 2
    assert {name: found.counts[name] for name in ("missing_field", "empty")} == {"missing_field": 1, "empty": 1}
    assert "1 records without a field" in found.describe()


def test_pairs_have_no_text_that_is_taken_where_none_is_given():
    with pytest.raises(MeshwrightError, match="needs --data"):
        load_pairs((), None, WORKLOAD)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.0}, "beta is 0.0; it is a number above 0"),
        ({"label_smoothing": 0.5}, "label_smoothing is 0.5; it is a share from 0 to below 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "is for dpo; ipo has none"),
        ({"loss": "kto"}, "loss is 'kto'"),
    ],
)
def test_a_loss_of_pairs_that_cannot_be_is_refused(settings, message):
    with pytest.raises(MeshwrightError, match=message):
        Preference(**settings)


EIGHT = replace(WORKLOAD, batch=8)


@pytest.mark.parametrize(
    ("workload", "mesh", "strategy", "message"),
    [
        (EIGHT, MeshShape(pp=2, fsdp=4), DEFAULT, "has pp=2; the loss of dpo is of pairs of whole sequences"),
        (EIGHT, MeshShape(fsdp=8), Strategy(reference_mesh=MeshShape(fsdp=4)), "has 4 devices; the reference shares"),
        (EIGHT, MeshShape(fsdp=8), Strategy(reference_mesh=MeshShape(sp=3, tp=1)), "has 3 devices"),
        (WORKLOAD, MeshShape(tp=8), Strategy(reference_mesh=MeshShape(fsdp=8)), "the reference: batch 2 is not"),
        (EIGHT, MeshShape(fsdp=8), Strategy(num_microbatches=2), "num_microbatches=2 cannot cut"),
        (replace(EIGHT, batch=4), MeshShape(fsdp=8), DEFAULT, "batch 4 is not a multiple"),
        (
            replace(EIGHT, reference="precomputed"),
            MeshShape(fsdp=8),
            Strategy(reference_mesh=MeshShape(tp=8)),
            "no step runs a reference",
        ),
    ],
)
def test_a_mesh_that_pairs_or_their_reference_cannot_have_is_refused_before_anything_is_compiled(
    workload, mesh, strategy, message
):
    with pytest.raises(MeshwrightError, match=message):
        make_plan(workload, mesh, parse_system("cpu:8"), strategy)


def test_a_reference_is_of_preferences_alone():
    with pytest.raises(MeshwrightError, match="reference='precomputed' is for objective='dpo'"):
        Workload(model=PRESETS["tiny"], batch=8, seq_len=16, reference="precomputed")
    with pytest.raises(MeshwrightError, match="reference_mesh is of the frozen model"):
        plan("tiny", on="cpu:8", batch=8, seq_len=16, reference_mesh="tp=8")


def test_a_step_of_pairs_is_one_of_twice_as_many_sequences_with_a_forward_pass_beside_it():
    text = replace(EIGHT, objective="next-token", batch=16)
    mesh, elsewhere = MeshShape(fsdp=8), Strategy(reference_mesh=MeshShape(fsdp=2, tp=4))
    pairs, plain = step_flops(EIGHT, mesh), step_flops(text, mesh)
    assert (pairs.forward, pairs.backward) == (plain.forward, plain.backward)
    assert pairs.reference == plain.forward
    assert {move.axes for move in reference_collectives(EIGHT, mesh, elsewhere)} == {("fsdp",), ("tp",)}
    assert {move.phase for move in reference_collectives(EIGHT, mesh, elsewhere)} == {"reference"}
    before = replace(EIGHT, reference="precomputed")
    assert step_flops(before, mesh) == replace(pairs, reference=0.0)
    assert step_memory(before, mesh)["peak"] < step_memory(EIGHT, mesh)["peak"]


def test_the_planner_searches_meshes_without_stages_and_prices_the_reference():
    found = plan("tiny", on="cpu:8", batch=16, seq_len=64, objective="dpo", reference_mesh="fsdp=2,tp=4")
    assert found.mesh.pp == 1
    assert found.planned_only == ""
    record = found.predicted
    assert record.breakdown_seconds["reference"] > 0
    assert record.memory_bytes["reference"] > 0
    assert sum(record.breakdown_seconds.values()) == pytest.approx(record.step_seconds)
    assert not [move for move in record.own_collectives if move.phase == "reference"]
    assert np.isfinite(record.mfu or np.nan)
