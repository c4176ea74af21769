"""`import meshwright as mw`: what the commands take as text the functions take too, with the same one-line errors."""

import json
import subprocess
import sys
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.cli.main import main
from meshwright.description.families.load import load_model
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.parameter_tree import map_leaves, parameters

TINY = {"on": "cpu:8", "batch": 16, "seq_len": 256}


def tiny(**options):
    return mw.plan("tiny", **(TINY | options))


def shapes(model):
    return map_leaves(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), parameters(model))


def test_importing_is_instant_and_planning_needs_neither_jax_nor_numpy():
    code = (
        "import sys, meshwright as mw; before = set(sys.modules)\n"
        "assert not {'meshwright.planning', 'meshwright.description.hardware', 'rich', 'yaml'} & before\n"
        "plan = mw.plan('llama3-8b', on='v5p:4x4x4', batch=512); plan.rules; plan.to_json(); plan._repr_html_()\n"
        "print({'jax', 'jaxlib', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_every_public_name_is_there():
    for name in mw.__all__:
        assert getattr(mw, name) is not None
    assert set(mw.__all__) <= set(dir(mw))
    with pytest.raises(AttributeError):
        mw.plann  # noqa: B018


def test_text_and_objects_mean_the_same_plan():
    text = mw.plan("llama3-8b", on="h100:64", batch="64", seq_len="8192", mesh="fsdp=-1,tp=2", remat="block")
    objects = mw.plan(
        load_model("llama3-8b"),
        on=parse_system("h100:64"),
        batch=64,
        seq_len=8192,
        mesh=mw.MeshShape(fsdp=32, tp=2),
        remat="block",
    )
    assert text == objects
    assert mw.plan(text.workload, on="h100:64", mesh={"fsdp": 32, "tp": 2}, strategy=text.strategy) == text


def test_the_function_and_the_command_plan_the_same(capsys):
    plan = mw.plan("llama3-8b", on="v5p:4x4x4", batch=512, seq_len=8192, top=3)
    assert main(["plan", "llama3-8b", "--on", "v5p:4x4x4", "--batch", "512", "--top", "3", "--json"]) == 0
    candidates = json.loads(capsys.readouterr().out)["candidates"]
    assert [plan.predicted.to_json()["mesh"] for plan in (plan, *plan.alternatives)] == [c["mesh"] for c in candidates]
    assert plan.planned_only == ""


def test_what_a_search_chooses_can_be_fixed_on_a_mesh():
    plan = mw.plan("llama3-8b", on="h100:64", batch=64, mesh="fsdp=16,pp=4", schedule="gpipe", num_microbatches=4)
    assert (plan.strategy.schedule, plan.strategy.num_microbatches) == ("gpipe", 4)
    plan = mw.plan("llama3-8b", on="h100:64", batch=64, mesh="fsdp=16,sp=4", sp_method="ring")
    assert plan.strategy.sp_method == "ring"


MISTAKES = [
    (lambda: mw.plan("llama3-8b", on=64), "on is 64; it is a chip and a slice shape"),
    (lambda: mw.plan("llama3-8b", on="v9:8", batch=8), "chip 'v9' is not known; did you mean"),
    (lambda: mw.plan("lama3-8b", on="v5p:4x4x4", batch=512), "did you mean llama3-8b"),
    (lambda: mw.plan(7, on="v5p:4x4x4", batch=512), "model is 7; it is a preset's name"),
    (lambda: tiny(batch="x"), "batch is 'x'; it is a whole number from 1"),
    (lambda: tiny(batch=2.5), "batch is 2.5; it is a whole number from 1"),
    (lambda: tiny(batch=True), "batch is True; it is a whole number from 1"),
    (lambda: tiny(seq_len=0), "seq_len is 0; it is a whole number from 1"),
    (lambda: tiny(batch=None), "tiny needs one of --batch (batch=…) and --batch-tokens"),
    (lambda: tiny(batch=None, batch_tokens="4k"), "use 3840 or 4096"),
    (lambda: tiny(mesh=8), "mesh is 8; it is text, as 'fsdp=-1,tp=4'"),
    (lambda: tiny(mesh="fsdp=3"), "mesh 'fsdp=3' needs 3 devices; there are 8"),
    (lambda: tiny(mesh={"model": 8}), "names axis 'model'; here that is tp; the axes are dp, fsdp"),
    (lambda: tiny(mesh=mw.MeshShape(tp=4)), "mesh tp=4 has 4 devices; the hardware has 8"),
    (lambda: tiny(remat="blok"), "remat is 'blok'; did you mean block?"),
    (lambda: tiny(attention="flsh"), "attention is 'flsh'; did you mean flash?"),
    (lambda: tiny(atention="flash"), "there is no option 'atention'; did you mean attention?"),
    (lambda: tiny(num_microbatches=0), "num_microbatches is 0; it is a whole number from 1"),
    (lambda: tiny(mesh="tp=8", tp_stream="hole"), "tp_stream is 'hole'; did you mean whole?"),
    (lambda: tiny(schedule="gpipe"), "goes with --mesh"),
    (lambda: tiny(sp_method="ring"), "--sp-method (sp_method=…) goes with --mesh"),
    (lambda: tiny(strategy=mw.Strategy()), "give mesh too"),
    (lambda: tiny(memory_headroom="x"), "memory_headroom is 'x'; it is a share"),
    (lambda: tiny(top=0), "top is 0"),
    (lambda: mw.plan("resnet50", on="cpu:8", batch=8), "resnet50 is a program of images"),
    (lambda: mw.Plan.read("none.yaml"), "no plan 'none.yaml'"),
    (lambda: tiny(mesh="tp=8").write("/none/plan.yaml"), "there is no directory /none"),
    (lambda: mw.verify("tiny", on="cpu:8", batch=16, mesh="tp=3"), "needs 3 devices"),
    (lambda: mw.verify("none.yaml"), "no plan 'none.yaml'"),
    (lambda: mw.verify(tiny(mesh="tp=8", remat="block"), batch=8), "a plan sets --batch (batch=…) itself"),
    (lambda: mw.train("tiny", on="cpu:8"), "needs one of --batch"),
    (lambda: mw.train("tiny", **TINY, mesh="tp=8", zz=1), "there is no option 'zz'; options are batch, "),
    (lambda: mw.train("nowhere", resume=True), "no run in 'nowhere'"),
    (lambda: mw.train("tiny", **TINY, mesh="tp=8", learning_rte=1.0), "'learning_rte'; did you mean learning_rate?"),
    (lambda: mw.inspect(42), "42 is not a function"),
    (lambda: mw.inspect("nowhere:f"), "needs a mesh"),
    (lambda: mw.inspect("nowhere", mesh="dp=8"), "neither a file nor module:function"),
    (lambda: mw.inspect(jnp.sin, 1.0, mesh="dp"), "mesh 'dp' is not a list of axes"),
    (lambda: mw.inspect(jnp.sin, 1.0, on=8), "on is 8; it is a chip"),
    (lambda: mw.show("A[I_X]", mesh=2, dims="I=8"), "2 is not numbers by name"),
    (lambda: mw.show("A[I_X]", mesh="X=2", dims={"I": "8"}), "I='8'; it is a whole number"),
    (lambda: mw.show("A[I_X]", mesh="X=2", dims="I=8", on=2), "on is 2; it is a chip"),
]


@pytest.mark.parametrize(("call", "said"), MISTAKES, ids=[said[:40] for _, said in MISTAKES])
def test_a_mistake_is_a_meshwright_error_of_one_line(call, said):
    with pytest.raises(mw.MeshwrightError) as error:
        call()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_a_plan_is_written_and_read(name, tmp_path):
    plan = tiny(mesh="fsdp=2,tp=4")
    plan.write(tmp_path / name)
    assert mw.Plan.read(tmp_path / name) == plan
    assert plan.to_json()["mesh"] == plan.mesh.degrees
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_plan_is_not_renamed_over_a_device(tmp_path):
    fifo = tmp_path / "plan.yaml"
    fifo.symlink_to("/dev/null")
    tiny(mesh="tp=8").write(fifo)
    assert fifo.is_symlink()


def test_the_mesh_of_a_plan_is_a_jax_mesh():
    mesh = tiny(mesh="fsdp=2,tp=4").mesh()
    assert dict(mesh.shape) == {"pp": 1, "dp": 1, "fsdp": 2, "ep": 1, "sp": 1, "tp": 4}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Explicit}
    assert set(mw.MeshShape(fsdp=4)(jax.devices()[:4], types="auto").axis_types) == {jax.sharding.AxisType.Auto}


def test_the_parameters_of_a_planned_model_have_shardings_by_path():
    plan = tiny(mesh="fsdp=2,tp=4")
    tree = shapes(plan.workload.model)
    found = plan.shardings(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert found["layers"]["query"].spec == jax.P(None, "fsdp", "tp", None, None)
    jax.device_put(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), tree), found)


def test_stages_split_the_layers_of_a_planned_model():
    plan = tiny(mesh="fsdp=4,pp=2")
    found = plan.shardings(shapes(plan.workload.model))
    assert found["layers"]["query"].spec[0] == "pp"


FOREIGN = {"params": {"dense": {"kernel": jnp.zeros((8, 16)), "bias": jnp.zeros(16)}}}


def test_a_foreign_tree_has_shardings_by_regular_expressions():
    plan = tiny(mesh="fsdp=2,tp=4")
    found = plan.shardings(FOREIGN, {r".*kernel": ("embed", "mlp"), r".*bias": (None,)})
    assert found["params"]["dense"]["kernel"].spec == jax.P("fsdp", "tp")
    assert found["params"]["dense"]["bias"].spec == jax.P(None)


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (None, "tiny has no parameter 'params.dense.bias'"),
        ({r".*kernel": ("embed", "mlp")}, "no expression matches 'params.dense.bias' (16,)"),
        ({r".*": ("embed", "mlp")}, "gives 2 logical axes, embed, mlp, to params.dense.bias, which has 1 dims"),
        ({r".*bias": (None,), r".*kernel": ("embd", "mlp")}, "logical axis 'embd'; did you mean embed?"),
        ({r".*bias": (None,), r".*kernel": ("mlp", "heads")}, "needs axis tp=4 on dims mlp and heads"),
        ({r".*bias": (None,), r".*kernel": ("embed", "mlp"), "gate": ()}, "'gate' matches no leaf"),
        ({r"+": ()}, "'+' is not a regular expression"),
    ],
)
def test_a_tree_that_the_rules_do_not_fit_is_refused(axes, said):
    with pytest.raises(mw.MeshwrightError) as error:
        tiny(mesh="fsdp=2,tp=4").shardings(FOREIGN, axes)
    assert said in str(error.value)


class Mlp(nn.Module):
    """A block written for Flax's logical axes, with no word of any mesh."""

    @nn.compact
    def __call__(self, x):
        x = nn.with_logical_constraint(x, ("batch", "activation"))
        up = self.param("up", nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp")), (8, 16))
        return nn.with_logical_constraint(x @ up, ("batch", "mlp"))


def test_the_rules_of_a_plan_are_those_of_flax():
    plan = tiny(mesh="fsdp=2,tp=4")
    mesh, model = plan.mesh(types="auto"), Mlp()
    x = jnp.ones((4, 8))
    with jax.set_mesh(mesh), nn.logical_axis_rules(plan.rules):
        abstract = jax.eval_shape(model.init, jax.random.key(0), x)
        specs = nn.get_partition_spec(abstract)
        lies = nn.logical_to_mesh_sharding(specs, mesh, plan.rules)
        params = jax.jit(model.init, out_shardings=lies)(jax.random.key(0), x)
        out = jax.jit(model.apply)(params, x)
    assert nn.unbox(params)["params"]["up"].sharding.spec == jax.P("fsdp", "tp")
    assert out.sharding.spec == jax.P("fsdp", "tp")
    assert float(out[0, 0]) == 8.0


def test_pages_of_a_notebook_are_short_self_contained_and_escaped():
    plan = tiny(mesh="fsdp=2,tp=4")
    evil = replace(plan, workload=replace(plan.workload, model=replace(plan.workload.model, name="<script>")))
    report = mw.inspect(lambda x: x @ x, jnp.ones((8, 8)))
    for html in (plan._repr_html_(), evil._repr_html_(), plan.predicted._repr_html_(), report._repr_html_()):
        assert len(html) < 20_000
        assert "<script" not in html
        assert "http" not in html
        assert html.count("<table") == html.count("</table>") >= 1
    assert "&lt;script&gt;" in evil._repr_html_()


def test_a_report_prints_in_a_line():
    report = mw.inspect(lambda x: x @ x, jnp.ones((8, 8)))
    assert len(repr(report)) < 200
    assert "no finding" in repr(report)


def test_train_takes_text_and_its_run_is_verified(tmp_path):
    rows = []
    record = mw.train("tiny", tmp_path / "run", **TINY, mesh="1,2,4,1", steps=2, num_layers=1, on_step=rows.append)
    assert record.origin == "measured"
    assert len(rows) == 2
    with pytest.raises(mw.MeshwrightError, match=r"learning_rate is 0.1; .* was begun with 0.003: --change"):
        mw.train(tmp_path / "run", resume=True, learning_rate=0.1)
    found = mw.verify(tmp_path / "run")
    assert str(found).splitlines()[0].startswith("tiny · train · ")
    assert any(row.measured is not None for row in found.rows)


def test_shardings_are_on_the_mesh_that_is_given_and_all_else_is_whole():
    plan = tiny(mesh="fsdp=2,tp=4")
    mesh = plan.mesh(types="auto")
    tree = {"layer": {"kernel": {"value": jnp.zeros((8, 16))}, "count": jnp.zeros(()), "scale": jnp.zeros(8)}}
    found = plan.shardings(tree, {r".*kernel": ("embed", "mlp"), "*": "replicated"}, mesh)["layer"]
    assert found["kernel"]["value"] == jax.NamedSharding(mesh, jax.P("fsdp", "tp"))
    assert found["scale"].is_fully_replicated
    assert plan.shardings({"count": jnp.zeros(())}, {})["count"].spec == jax.P()
    with pytest.raises(mw.MeshwrightError, match=r"or \{'\*': 'replicated'\} for all that none matches"):
        plan.shardings(tree, {r".*kernel": ("embed", "mlp")}, mesh)
    with pytest.raises(mw.MeshwrightError, match=r"it is what plan.mesh\(\) or plan.mesh\(types='auto'\) returns"):
        plan.shardings(tree, {"*": "replicated"}, jax.make_mesh((8,), ("fsdp",)))
    with pytest.raises(mw.MeshwrightError, match="for the logical axis of each dim, or 'replicated'"):
        plan.shardings(tree, {"*": "whole"}, mesh)


def test_of_flaxs_rules_the_batch_has_its_axes_first():
    rules = tiny(mesh="fsdp=2,tp=4").rules
    assert nn.logical_to_mesh_axes(("batch", "sequence", "embed"), rules) == jax.P("fsdp", None, None)
    assert nn.logical_to_mesh_axes(("embed", "mlp"), rules) == jax.P("fsdp", "tp")


WRONG = {
    "a function to plan": (lambda: mw.plan(lambda x: x, 1), "is planned with on='v5e:4x4', the hardware"),
    "a module to plan": (lambda: mw.plan(Mlp(), on="cpu:1"), "Mlp is planned with its arguments"),
    "no hardware": (lambda: mw.plan("tiny", batch=4), r"tiny needs hardware: --on \(on=…\), as v5p:4x4x4"),
    "no plan's path": (lambda: mw.Plan.read(None), "path is None; it is the path of a file"),
    "no path to write": (lambda: tiny(mesh="tp=8").write(None), "path is None; it is the path of a file"),
    "a plan to show on a torus": (lambda: mw.show(tiny(mesh="tp=8"), on="v5e:2x4"), "on='v5e:2x4' goes with one array"),
    "a sharding to show": (
        lambda: mw.show(jax.NamedSharding(tiny(mesh="tp=8").mesh(), jax.P())),
        "a sharding has no shape to show; give mw.show",
    ),
}


@pytest.mark.parametrize(("call", "said"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_is_one_line(call, said):
    with pytest.raises(mw.MeshwrightError, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_the_hardware_may_be_given_by_its_place():
    assert mw.plan("tiny", "cpu:2", batch=4, seq_len=64).system.num_devices == 2
