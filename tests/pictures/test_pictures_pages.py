"""A page about a step: whole HTML that says the figures and fetches nothing."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "compiled"))
import toy_programs as toys

from meshwright.description.families.load import load_model
from meshwright.description.hardware.system import parse_system
from meshwright.description.hlo.parser import parse_hlo
from meshwright.description.hlo.records import read_hlo
from meshwright.description.hlo.shapes import Shape
from meshwright.description.step.workload import Workload
from meshwright.mesh import MeshShape
from meshwright.pictures.document import Section, html_table, render
from meshwright.pictures.pages import findings_section, inspection_page, verify_page
from meshwright.pictures.sections import collectives_section, memory_section, timeline_section
from meshwright.planning.plan import make_plan
from meshwright.proof.compiler.program import CompiledProgram, MeshMethod
from meshwright.proof.inspection.checks.duplicate_gathers import GatheredTwice
from meshwright.proof.inspection.dumps import inspect_text
from meshwright.proof.simulate.schedule import simulate
from meshwright.proof.verification.comparison import Row
from meshwright.proof.verification.plans import Verification
from meshwright.record import Record
from meshwright.units import show_bytes, show_seconds

MESH = MeshShape(fsdp=2, tp=4)
FINDING = GatheredTwice(
    tensor="w <is>",
    shape=Shape("f32", (8, 4)),
    axes=("tp",),
    phase="forward",
    num_gathers=2,
    iterations=1,
    bytes=2_000_000,
    cost_seconds=0.25,
    source="a.py:3",
)
FETCHES = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")


class Reader(HTMLParser):
    """Every tag balanced, every attribute and text kept."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def found() -> Verification:
    """A plan beside a program and its schedule, with words in it that HTML would read as its own."""
    workload = Workload(model=load_model("tiny"), batch=8, seq_len=64, compute_dtype="f32")
    plan = make_plan(workload, MESH, parse_system("cpu:8"))
    text = toys.train_step(toys.cpu_mesh(fsdp=2, tp=4)).compile().as_text()
    schedule = simulate(parse_hlo(text), MESH.layout, plan.system)
    program = CompiledProgram(
        hlo=text,
        memory_bytes={},
        messages="",
        compile_seconds=1.0,
        compiler="<b>xla & co</b>",
        mesh_method=MeshMethod.MAKE_MESH,
    )
    compiled = read_hlo(text, MESH.layout, hardware="cpu:8")
    compiled = Record(**(vars(compiled) | {"memory_bytes": {"arguments": 10, "temporaries": 30, "peak": 40}}))
    rows = (Row(quantity="flops", unit="flop", predicted=2e9, compiled=3e9, note='"<script>alert(1)</script>"'),)
    return Verification(plan=plan, program=program, compiled=compiled, rows=rows, schedule=schedule)


def test_a_page_is_whole_html_that_fetches_and_runs_nothing(found):
    page = verify_page(found)
    read = Reader(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(read.tags)
    assert not [name for name, _ in read.attributes if name in FETCHES or name.startswith("on")]
    assert not re.search(r"url\(|@import|https?://", page)
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes


def test_a_page_says_the_figures_and_escapes_the_words(found):
    text = Reader(verify_page(found)).text
    for figure in ("2.00 Gflop", "3.00 Gflop", "+50.0%", show_seconds(found.schedule.step_seconds), show_bytes(40)):
        assert figure in text
    assert "<b>xla & co</b>" in text
    assert '"<script>alert(1)</script>"' in text
    for move in found.compiled.collectives:
        assert "*".join(move.axes) in text
        assert move.kind in text


def test_the_timeline_has_a_lane_for_the_ops_and_one_for_each_set_of_links(found):
    text = Reader(timeline_section(found.schedule).body).text
    assert all(event.lane in text for event in found.schedule.events)
    assert len(re.findall("<rect", timeline_section(found.schedule).body)) > 20


def test_the_page_of_an_inspection_begins_with_what_is_wrong(found):
    inspection = inspect_text(found.program.hlo, mesh=MESH.layout, name="<dump>")
    page = inspection_page(replace(inspection, findings=(FINDING,)))
    read = Reader(page)
    assert read.text.index("Findings") < read.text.index("Collectives by mesh axes") < read.text.index("Flops by scope")
    assert "<dump> · fsdp=2,tp=4" in read.text
    assert "gathered twice" in read.text
    assert "layers/mlp" in read.text
    assert not [name for name, _ in read.attributes if name in FETCHES]


def test_the_page_of_an_inspection_has_the_buffers_at_the_peak_and_leads_to_the_trace(found):
    inspection = inspect_text(found.program.hlo, mesh=MESH.layout, name="dump")
    inspection = replace(inspection, schedule=found.schedule)
    read = Reader(inspection_page(inspection, "my steps/a&b.json.gz"))
    largest = inspection.buffers[0]
    for text in (read.text, Reader(verify_page(found)).text):
        assert "Largest buffers at the peak" in text
        assert str(replace(largest.shape, layout="")) in text
    assert "Largest buffers" not in Reader(verify_page(replace(found, schedule=None))).text
    assert ("href", "my%20steps/a%26b.json.gz") in read.attributes
    assert "my steps/a&b.json.gz" in read.text
    assert "href" not in dict(Reader(inspection_page(inspection)).attributes)


def test_rows_alike_are_merged_and_columns_without_a_figure_left_out(found):
    move = next(move for move in found.compiled.collectives if move.axes)
    twice = replace(found.compiled, collectives=(replace(move, array="a"), replace(move, array="b")))
    body = collectives_section(twice).body
    text = Reader(body).text
    assert body.count("<tr>") == 2  # the head and a row
    assert show_bytes(2 * move.bytes) in text
    assert "a and 1 more" in text
    assert "seconds" not in text


def test_memory_is_said_to_fit_or_not(found):
    for limit, words in ((50, "40.0 B fits in the 50.0 B"), (30, "40.0 B does not fit in the 30.0 B")):
        section = memory_section({"compiled": found.compiled}, limit)
        assert words in Reader(section.body).text
        assert f"usable {show_bytes(limit)}" in Reader(section.body).text


def test_rows_that_differ_are_marked(found):
    assert 'class="differs"' in verify_page(found)
    assert 'class="differs"' not in verify_page(replace(found, rows=(replace(found.rows[0], compiled=2e9),)))


def test_a_section_with_nothing_to_say_is_left_out():
    assert timeline_section(None).body == ""
    assert "<h2>" not in render("t", (), (Section("empty", ""), Section("none", html_table(("a",), ()))))


def test_a_finding_is_said_with_its_cost_its_place_and_its_cure():
    text = Reader(findings_section((FINDING,)).body).text
    for words in (
        "1. gathered twice",
        "costs 250 ms a step, 2.00 MB",
        "w <is> f32[8,4] is gathered",
        "a.py:3",
        "fix: gather",
    ):
        assert words in text
