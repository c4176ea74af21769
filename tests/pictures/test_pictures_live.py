"""Live arrays and trees of them, whatever their sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.description.families.load import load_model
from meshwright.description.step.parameter_tree import num_parameters, parameters
from meshwright.errors import MeshwrightError
from meshwright.execution.runtime.arrays import abstract
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.mesh import MeshShape
from meshwright.pictures.live import live_holdings, plan_rows, program_rows, tree_rows, type_text
from meshwright.pictures.showing import show
from meshwright.units import show_bytes

SPECS = [
    ((8, 8, 6), P("X", ("Y", "Z"))),
    ((4, 8), P(("Z", "X"), "Y")),
    ((16,), P(("Y", "Z", "X"))),
    ((2, 4, 2, 2), P(None, "Y", "X")),
    ((5, 3), P()),
    ((), P()),
]


def abstract_mesh(shape):
    return AbstractMesh(tuple(shape.layout.values()), tuple(shape.layout), axis_types=(AxisType.Explicit,) * 6)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 2, 2), ("X", "Y", "Z"))


@pytest.mark.parametrize(("shape", "spec"), SPECS)
def test_the_blocks_of_a_live_array_are_its_addressable_shards(mesh, shape, spec):
    values = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    array = jax.device_put(values, NamedSharding(mesh, spec))
    holdings = live_holdings(array)
    blocks = {holder.device: holder.block for holder in holdings.holders}
    for shard in array.addressable_shards:
        block = tuple(slice(*span) for span in blocks[shard.device.id])
        np.testing.assert_array_equal(np.asarray(shard.data), values[block])
    assert holdings.bytes_per_device == array.addressable_shards[0].data.nbytes


def test_an_array_on_one_device_has_one_shard_and_no_mesh():
    array = jax.device_put(np.zeros((4, 2), np.float32), jax.devices()[3])
    assert isinstance(array.sharding, SingleDeviceSharding)
    holdings = live_holdings(array)
    assert (holdings.shards, holdings.degrees) == ({((0, 4), (0, 2)): (3,)}, {})
    assert "SingleDeviceSharding" in str(show(array))


def test_coordinates_follow_the_mesh_even_where_devices_are_out_of_order():
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("X", "Y"))
    array = jax.device_put(np.zeros((4, 4), np.int8), NamedSharding(mesh, P("X", "Y")))
    found = {holder.device: holder for holder in live_holdings(array).holders}
    assert found[3].coordinates == {"X": 1, "Y": 0}
    assert found[3].block == ((2, 4), (0, 2))


def test_an_abstract_array_on_an_abstract_mesh_is_shown_too():
    sharding = NamedSharding(AbstractMesh((4, 16), ("fsdp", "tp")), P("fsdp", "tp"))
    holdings = live_holdings(jax.ShapeDtypeStruct((8, 64), jnp.bfloat16, sharding=sharding))
    assert (len(holdings.shards), holdings.local_shape, holdings.bytes_per_device) == (64, (2, 4), 16)


def test_an_abstract_array_that_cannot_be_cut_evenly_is_refused():
    sharding = NamedSharding(AbstractMesh((3,), ("tp",)), P("tp"))
    with pytest.raises(MeshwrightError, match=r"tp=3 leaves 8 % 3 = 2; the degree must be one of \[1, 2, 4, 8\]"):
        live_holdings(jax.ShapeDtypeStruct((8,), jnp.bfloat16, sharding=sharding))


def test_unreduced_values_are_parts_of_a_sum(mesh):
    sharding = NamedSharding(mesh.abstract_mesh, P("X", unreduced={"Y"}))
    holdings = live_holdings(jax.ShapeDtypeStruct((8,), jnp.float32, sharding=sharding))
    assert (holdings.unreduced, holdings.copies, holdings.copied_axes) == (("Y",), 2, ("Z",))


@pytest.mark.parametrize("value", [np.zeros(3), jax.ShapeDtypeStruct((3,), jnp.float32)])
def test_an_array_without_a_sharding_is_refused(value):
    with pytest.raises(MeshwrightError, match="array has no sharding"):
        show(value)


def test_a_value_under_tracing_is_refused():
    with pytest.raises(MeshwrightError, match="array is being traced"):
        jax.jit(lambda x: show(x) and x)(jnp.zeros(3))


def test_a_tree_has_a_row_for_every_array(mesh):
    def place(shape, spec, dtype):
        return jax.device_put(jnp.zeros(shape, dtype), NamedSharding(mesh, spec))

    tree = {
        "layers": [{"w": place((8, 16), P("X", ("Y", "Z")), jnp.bfloat16)}, {"w": place((8, 16), P("X"), jnp.float32)}],
        "scale": place((16,), P(), jnp.float32),
        "seen": np.zeros(4, np.int64),
        "step": 7,
    }
    rows = {row.path: row for row in tree_rows(tree)}
    assert list(rows) == ["layers.0.w", "layers.1.w", "scale", "seen", "step"]
    first, second = rows["layers.0.w"], rows["layers.1.w"]
    assert (first.type, first.spec, first.local_shape) == (
        "bfloat16[8@X,16@(Y,Z)]",
        "P('X', ('Y', 'Z'))",
        (4, 4),
    )
    assert (first.total_bytes, first.bytes_per_device, first.copies) == (256, 32, 1)
    assert (second.spec, second.local_shape, second.bytes_per_device, second.copies) == (
        "P('X', None)",
        (4, 16),
        256,
        4,
    )
    assert (rows["scale"].copies, rows["scale"].bytes_per_device) == (8, 64)
    assert (rows["seen"].spec, rows["seen"].bytes_per_device, rows["step"].type) == ("not placed", 0, "int")
    lines = str(show(tree)).splitlines()
    assert lines[0].startswith("  5 arrays")
    assert lines[3].split() == f"layers.0.w bfloat16[8@X,16@(Y,Z)] [4,4] {show_bytes(32)} 1 {show_bytes(256)}".split()
    assert lines[6].split() == ["seen", "int64[4]", "not", "placed", "-", "-", "-", "32.0", "B"]


@pytest.mark.parametrize("spec", [P("X", None), P(("X", "Z"), "Y"), P(), P("Y", unreduced={"X"})])
def test_types_are_written_as_jax_writes_them(mesh, spec):
    sharding = NamedSharding(mesh.abstract_mesh, spec)
    array = jax.core.ShapedArray((8, 4), jnp.float32, sharding=sharding)
    assert type_text(array, sharding) == str(array)


def test_the_parameters_of_a_model_are_a_table_that_fits_the_screen():
    shape = MeshShape(fsdp=2, tp=2, sp=2)
    tree = abstract(parameters(load_model("tiny")), abstract_mesh(shape), ShardingContext(shape), "bf16")
    text = str(show(tree))
    assert max(map(len, text.splitlines())) <= 100
    placed = sum(row.bytes_per_device * 8 // row.copies for row in tree_rows(tree))
    assert placed == sum(row.total_bytes for row in tree_rows(tree)) == 2 * num_parameters(load_model("tiny"))


def test_a_tree_without_arrays_is_refused():
    with pytest.raises(MeshwrightError, match="dict holds no arrays to show"):
        show({})


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=2,tp=4", "dp=2,sp=4", "fsdp=2,pp=2,tp=2", "fsdp=512"])
def test_of_a_plan_each_device_holds_what_is_predicted(mesh):
    big = mesh == "fsdp=512"
    what = ("llama3-405b", "h100:512", 512, 2048) if big else ("tiny", "cpu:8", 16, 64)
    plan = mw.plan(what[0], on=what[1], batch=what[2], seq_len=what[3], mesh=mesh)
    rows = plan_rows(plan)
    held = {kind: sum(row.bytes_per_device for row in rows if row.path.startswith("batch.") == kind) for kind in (0, 1)}
    predicted = plan.predicted.memory_bytes
    assert [held[0], held[1]] == [predicted["parameters"], predicted["batch"]]
    assert f"{what[0]} on {plan.mesh}, {plan.hardware}   {len(rows)} arrays" in str(show(plan))


def test_the_plan_of_a_function_shows_where_its_arrays_lie():
    def step(params, batch):
        def loss(params):
            return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    params = {"up": jax.ShapeDtypeStruct((64, 256), "float32"), "down": jax.ShapeDtypeStruct((256, 64), "float32")}
    batch = jax.ShapeDtypeStruct((65536, 64), "float32")
    plan = mw.plan(step, params, batch, on="cpu:8", mesh="data=8", num_compiled=0)
    memory, table = show(plan).sketches
    assert memory.title.endswith("that a program can use: fits")
    assert table.panels[0].rows == ("params.down", "params.up", "batch")
    rows = {row.path: row for row in program_rows(plan)}
    (arguments, _) = plan.abstract().shardings
    wanted = {"params.down": arguments[0]["down"], "params.up": arguments[0]["up"], "batch": arguments[1]}
    for path, sharding in wanted.items():
        assert rows[path].local_shape == sharding.shard_shape(rows[path].shape)
    assert rows["batch"].bytes_per_device * 8 == rows["batch"].total_bytes
