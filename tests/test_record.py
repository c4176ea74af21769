import json
from dataclasses import replace

from meshwright.record import Collective, LoweredAs, Lowering, Record, merge, record_from_json, wire_bytes

GATHER = Collective(kind="all-gather", axes=("fsdp",), phase="forward", bytes=100, seconds=1.0, exposed_seconds=0.5)


def test_a_record_survives_json():
    record = Record(
        origin="predicted",
        mesh={"dp": 1, "fsdp": 8},
        hardware="cpu:8",
        step_seconds=0.5,
        memory_bytes={"parameters": 1, "peak": 2},
        collectives=(GATHER,),
        notes=("split",),
    )
    assert record_from_json(json.loads(json.dumps(record.to_json()))) == record


def test_a_lowering_survives_json():
    """Its form is an enum or None; it was once read back as neither."""
    lowered = replace(GATHER, lowerings=(Lowering(form=LoweredAs.SLICED_ALL_REDUCE), Lowering(promoted_from="bf16")))
    record = Record(origin="compiled", mesh={"fsdp": 8}, hardware="cpu:8", collectives=(lowered,))
    assert record_from_json(json.loads(json.dumps(record.to_json()))) == record


def test_merging_adds_what_has_the_same_kind_axes_and_phase():
    other = Collective(kind="all-reduce", axes=("dp",), phase="backward", bytes=7)
    merged = merge([other, GATHER, GATHER])
    assert [(c.kind, c.bytes, c.count, c.seconds, c.exposed_seconds) for c in merged] == [
        ("all-gather", 200, 2, 2.0, 1.0),
        ("all-reduce", 7, 1, None, None),
    ]


def test_merging_keeps_each_note_once():
    noted = Collective(kind="all-gather", axes=("fsdp",), phase="forward", bytes=1, note="promoted")
    assert merge([noted, noted])[0].note == "promoted"


def test_an_all_reduce_sends_twice_what_a_gather_does_and_a_permute_all_of_it():
    assert wire_bytes("all-gather", 800, 8) == 700
    assert wire_bytes("reduce-scatter", 800, 8) == 700
    assert wire_bytes("all-reduce", 800, 8) == 1400
    assert wire_bytes("collective-permute", 800, 8) == 800
