# ruff: noqa: E501 - HLO prints an instruction in a line

import pytest

from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.shapes import Shape, ShapeReader, dtype_bits
from meshwright.errors import MeshwrightError

HEADER = """HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[8,4]{1,0})->(f32[], f32[4]{0})}, num_partitions=8

FileNames
1 "train/step.py"
2 "model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=0 end_column=0}
2 {file_name_id=2 function_name_id=1 line=88 end_line=88 column=4 end_column=9}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""

BODY = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}, execution_thread="main"

ENTRY %main (a: f32[8,4]) -> (f32[], f32[4]) {
  %a = f32[8,4]{1,0:T(8,128)(2,1)S(1)} parameter(0), sharding={devices=[2,4]<=[8]}, metadata={op_name="state['w']"}
  %table = s32[3]{0} constant({1, 2, 3})
  %zero = f32[] constant(0)
  %kernel = (f32[8,4]{1,0}, u32[]{:S(2)}, /*index=2*/token[]) custom-call(%a, f32[] %zero), custom_call_target="k(,)", frontend_attributes={meta={
 "xprof":"{\\"block\\": 512, ("
}}, backend_config={"body":"a}b\\"c"}
  %all-reduce.1 = f32[8,4]{1,0} all-reduce(%a), channel_id=1, replica_groups=mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}, use_global_device_ids=true, to_apply=%add, metadata={op_name="jit(step)/mlp/sum" stack_frame_id=2}
  %cut = f32[2,4]{1,0} slice(%all-reduce.1), slice={[0:2], [0:4]}, control-predecessors={%kernel}, metadata={op_name="cut" source_file="old.py" source_line=7}
  %total = f32[] reduce(%cut, %zero), dimensions={0,1}, to_apply=%add
  %vector = f32[4]{0} reduce(%cut, %zero), dimensions={0}, to_apply=%add
  ROOT %out = (f32[], f32[4]{0}) tuple(%total, %vector)
}
"""

MODULE = HEADER + BODY


def test_an_element_of_a_tuple_may_be_named_where_it_is_taken():
    """jaxlib 0.11 writes `%p#1` for what a get-tuple-element of %p is."""
    module = parse_hlo(
        "HloModule m\n\nENTRY %main (p: (f32[4], s32[])) -> f32[4] {\n"
        "  %p = (f32[4]{0}, s32[]) parameter(0)\n  %q = s32[] negate(%p#1)\n  ROOT %r = f32[4]{0} sine(%p#0)\n}\n"
    )
    main = module.computations["main"]
    found = main.instructions["p#1"]
    assert (found.opcode, found.index, str(found.shape), found.operands) == ("get-tuple-element", 1, "s32[]", ("p",))
    assert [user.name for user in main.users["p"]] == ["p#1", "p#0"]
    for text in ("p#2", "p#x", "r#0"):
        with pytest.raises(MeshwrightError, match=f"takes {text}, which no line above it makes"):
            parse_hlo(
                f"HloModule m\n\nENTRY %main (p: (f32[4])) -> f32[4] {{\n  %p = (f32[4]{{0}}) parameter(0)\n"
                f"  ROOT %r = f32[4]{{0}} sine(%{text})\n}}\n"
            )


def test_a_module_is_read_with_its_header_its_computations_and_their_roots():
    module = parse_hlo(MODULE)
    assert (module.name, module.entry, module.num_devices) == ("jit_step", "main", 8)
    assert {name: computation.root for name, computation in module.computations.items()} == {
        "add": "sum",
        "main": "out",
    }
    assert module.attributes["is_scheduled"] == "true"


def test_an_instruction_has_its_shape_operands_attributes_and_place_in_the_source():
    reduced = parse_hlo(MODULE).computations["main"].instructions["all-reduce.1"]
    assert (reduced.opcode, reduced.operands, reduced.shape) == ("all-reduce", ("a",), Shape("f32", (8, 4), "1,0"))
    assert reduced.attributes["replica_groups"] == "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}"
    assert reduced.attributes["use_global_device_ids"] == "true"
    assert reduced.called("to_apply") == ("add",)
    assert (reduced.op_name, reduced.source) == ("jit(step)/mlp/sum", "model.py:88")


def test_brackets_and_line_ends_inside_strings_and_braces_belong_to_the_value():
    kernel = parse_hlo(MODULE).computations["main"].instructions["kernel"]
    assert kernel.operands == ("a", "zero")
    assert kernel.attributes["custom_call_target"] == '"k(,)"'
    assert kernel.attributes["backend_config"] == '{"body":"a}b\\"c"}'
    assert [str(shape) for shape in kernel.shape.arrays()] == ["f32[8,4]", "u32[]", "token[]"]


def test_a_source_printed_in_place_is_read_too():
    assert parse_hlo(MODULE).computations["main"].instructions["cut"].source == "old.py:7"


def test_users_callers_and_parameters_are_found():
    module = parse_hlo(MODULE)
    main = module.computations["main"]
    assert [user.name for user in main.users["cut"]] == ["total", "vector"]
    assert [caller.name for caller in module.callers["add"]] == ["all-reduce.1", "total", "vector"]
    assert {number: i.name for number, i in module.computations["add"].parameters.items()} == {0: "x", 1: "y"}


def test_a_dump_without_percent_signs_reads_the_same():
    plain = """HloModule m

ENTRY main {
  a = f32[2,3]{1,0} parameter(0)
  b = f32[2,3]{1,0} add(f32[2,3]{1,0} a, f32[2,3]{1,0} a)
  ROOT t = (f32[2,3]{1,0}) tuple((f32[2]{0}, s32[]) b)
}
"""
    main = parse_hlo(plain).computations["main"]
    assert main.instructions["b"].operands == ("a", "a")
    assert main.instructions["t"].operands == ("b",)


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [
        ("f32[]", 4, "f32[]"),
        ("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", 2048, "bf16[8,128]"),
        ("(s32[], (pred[4]{0}, token[]), /*index=2*/f8e4m3fn[3]{0})", 11, "(s32[], (pred[4], token[]), f8e4m3fn[3])"),
        ("s4[3]{0:E(4)}", 2, "s4[3]"),
        ("()", 0, "()"),
        ("c64[2]{0}", 16, "c64[2]"),
        ("f32[<=8,2]{1,0}", 64, "f32[8,2]"),
    ],
)
def test_shapes_are_read_with_their_bytes(text, size, shown):
    shape, end = ShapeReader(text)(0)
    assert (shape.bytes, str(shape), end) == (size, shown, len(text))


def test_dtypes_that_hlo_has_not_are_an_error():
    assert [dtype_bits(name) for name in ("bf16", "u8", "f8e5m2", "s2", "pred", "c128")] == [16, 8, 8, 2, 8, 128]
    with pytest.raises(MeshwrightError, match="'float32'"):
        dtype_bits("float32")


BROKEN = [
    ("", "not HLO"),
    ("PK\x03\x04 \x00", "not HLO"),
    ("module @jit_f attributes {} {}", "StableHLO"),
    ("HloModule m\n", "no ENTRY"),
    ("HloModule m\n\ngarbage\nmore\n", "line 3"),
    (MODULE[: MODULE.index("%vector")], "cut short"),
    (MODULE[: MODULE.index("channel_id")], "cut short"),
    (MODULE.replace('b\\"c"}', 'b\\"c}'), "cut short"),
    (MODULE.replace("reduce(%cut,", "reduce(%cat,"), "takes cat"),
    (MODULE.replace("to_apply=%add,", "to_apply=%sub,"), "calls sub"),
    (MODULE.replace("f32[8,4]{1,0:T", "f32[8,]4]{1,0:T"), "line"),
    (MODULE.replace(" f32[2,4]{1,0} slice", " float32[2,4] slice"), "float32"),
    (MODULE.replace("%total = f32[] reduce", "%total = f32[] "), "no opcode"),
    (MODULE.replace("}, execution_thread", ", execution_thread"), "neither an instruction"),
    ("HloModule m\n\nENTRY %main () -> () {\n}\n", "no instruction"),
    (MODULE.replace("f32[8,4]", "f32[" + "9" * 5000 + "]"), "shape"),
]


@pytest.mark.parametrize(("text", "reason"), BROKEN)
def test_text_that_is_no_whole_module_is_one_clear_error(text, reason):
    with pytest.raises(MeshwrightError, match=reason) as raised:
        parse_hlo(text)
    assert "\n" not in str(raised.value)


def test_every_prefix_of_a_module_is_an_error():
    for length in range(len(MODULE) - 2):
        with pytest.raises(MeshwrightError):
            parse_hlo(MODULE[:length])


OPEN_LINE = "HloModule m\n\nENTRY %main () -> f32[] {\n  %a = "
HOSTILE = [
    OPEN_LINE + "(" * 1_000_000,
    OPEN_LINE + "f32[] constant(" + '"\\' * 500_000,
    OPEN_LINE + "f32[] constant(" + '\\"' * 500_000,
    OPEN_LINE + "f32[] add(" + "(" * 1_000_000,
    OPEN_LINE + "f32[] constant(0), metadata={" + "{" * 1_000_000,
    OPEN_LINE + "f32[] constant(0)" + ", a=[" * 200_000,
    OPEN_LINE + "f32[" + "1," * 500_000,
    OPEN_LINE + "f32[] constant(0)" + "\n" * 1_000_000,
    "HloModule m" + ", a=b" * 200_000,
    "HloModule m\n" + "FileNames\n" * 100_000,
    "HloModule m\n" + "\n\t" * 500_000,
    "%" * 1_000_000,
]


@pytest.mark.usefixtures("no_hang")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_of_a_megabyte_is_refused(text):
    with pytest.raises(MeshwrightError):
        parse_hlo(text)


@pytest.mark.slow
@pytest.mark.usefixtures("no_hang")
def test_twenty_megabytes_are_read():
    lines = BODY.index("  %all-reduce.1"), BODY.index("  ROOT %out")
    block = BODY[lines[0] : lines[1]]
    start, end = BODY[: lines[0]], BODY[lines[1] :]
    # Every copy has names of its own, as real programs have.
    names = ("all-reduce.1", "cut", "total", "vector")
    copies = []
    for number in range(20_000_000 // len(block)):
        copy = block
        for name in names:
            copy = copy.replace(f"%{name}", f"%{name}.{number}")
        copies.append(copy)
    ending = end.replace("%total", "%total.0").replace("%vector", "%vector.0")
    text = HEADER + start + "".join(copies) + ending
    assert len(text) > 19_000_000
    module = parse_hlo(text)
    assert len(module.computations["main"].instructions) == 5 + 4 * len(copies)
