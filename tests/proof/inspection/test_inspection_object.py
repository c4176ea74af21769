"""An inspection as an object: its screen, its page, its trace, its buffers."""

import gzip
import json

import jax.numpy as jnp
import planted
import pytest
from jax.sharding import AbstractMesh, AxisType

import meshwright
from meshwright.description.hlo.parser import parse_hlo
from meshwright.errors import DoesNotFitError, MeshwrightError
from meshwright.pictures.screens.inspection import print_buffers, print_screen
from meshwright.proof.simulate.buffers import read_buffers


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def found():
    mesh = AbstractMesh((2, 4), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)
    function, args = planted.transformer(mesh, applied=False)
    return meshwright.inspect(function, *args)


def test_printed_it_is_the_screen_and_its_repr_is_a_line(found, capsys):
    print_screen(found)
    assert str(found) == capsys.readouterr().out.rstrip()
    assert "1 finding" in str(found)
    assert repr(found).count("\n") == 0
    assert len(repr(found)) < 200


def test_its_page_is_returned_and_written(found, tmp_path):
    file = tmp_path / "report.html"
    assert found.html(file) == file.read_text() == found.html()
    assert "repeated work" in found.html()
    assert "repeated work" in found._repr_html_()


def test_without_a_simulated_step_there_is_no_trace(found, tmp_path):
    with pytest.raises(MeshwrightError, match="no simulated step to trace"):
        found.trace(tmp_path / "trace.json")
    assert not list(tmp_path.iterdir())


def test_its_buffers_are_those_of_the_peak_with_their_lines(found, capsys):
    first = found.buffers[0]
    assert first.num_bytes == max(one.num_bytes for one in found.buffers)
    held = sum(one.num_bytes for one in found.buffers)
    assert 0.8 * found.memory["peak"] < held <= found.memory["peak"]
    assert {"argument", "temporary"} <= {one.kind for one in found.buffers}
    print_buffers(found.buffers)
    shown = capsys.readouterr().out
    assert "params['w_in']" in shown
    assert "planted.py:" in shown


@pytest.mark.slow
def test_on_a_tpu_a_step_is_traced_and_what_does_not_fit_tells_its_buffers(tmp_path):
    pytest.importorskip("libtpu")
    mesh = AbstractMesh((8,), ("dp",), axis_types=(AxisType.Auto,))

    def forward(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w).sum()

    def inspected(size):
        args = planted.array(mesh, (size, size)), planted.array(mesh, (16 * size, size), "dp")
        return meshwright.inspect(forward, *args, on="v5e:2x4")

    inspected(256).trace(tmp_path / "trace.json.gz")
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    with pytest.raises(DoesNotFitError, match=r"forward on v5e:2x4 does not fit: it needs .* of the 15\.75G") as raised:
        inspected(49152)
    largest = read_buffers(parse_hlo(raised.value.hlo)).live[0]
    assert "f32[98304,49152]" in str(largest.shape)
    assert largest.num_bytes == 98304 * 49152 * 4
