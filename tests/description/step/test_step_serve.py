"""The step of a server as ops: which collectives each layout has, and that folds over its products give its weights."""

import math
from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.padding import padded
from meshwright.description.step.serve import model_step, serve_step
from meshwright.description.step.serving import CACHE_SPLITS, SERVING_RULES, Serving, ServingLayout
from meshwright.mesh import MeshShape


def moves(model, phase, layout):
    """The kind, axes and name of each collective of a layer, in order."""
    serving = Serving(model=PRESETS[model], phase=phase, prompt_len=512, output_len=64)
    found = serve_step(serving, layout, 8 * layout.num_groups).communication
    return [(op.kind, "*".join(op.axes), op.name) for op in found if op.region.name == "layers"]


def test_tensor_parallelism_alone_has_megatrons_collectives():
    layout = ServingLayout(MeshShape(tp=8))
    blocks = ("attention", "mlp")
    assert moves("llama3-70b", "decode", layout) == [("all-reduce", "tp", f"{name} output") for name in blocks]
    assert moves("llama3-70b", "prefill", layout) == [
        (kind, "tp", f"{name} {side}")
        for name in blocks
        for kind, side in (("all-gather", "input"), ("reduce-scatter", "output"))
    ]


@pytest.mark.parametrize(("model", "axes"), [("llama3-70b", "sp"), ("deepseek-v3", "tp")])
def test_a_split_cache_is_reached_over_the_axes_that_do_not_split_its_heads(model, axes):
    mesh = MeshShape(sp=2, tp=8) if axes == "sp" else MeshShape(tp=8)
    found = {split: moves(model, "decode", ServingLayout(mesh, split)) for split in CACHE_SPLITS}
    of_cache = {split: [move for move in moves if move not in found["heads"]] for split, moves in found.items()}
    assert of_cache["batch"] == [("all-to-all", axes, "queries"), ("all-to-all", axes, "heads")]
    assert of_cache["sequence"] == [
        ("all-gather", axes, "queries"),
        ("all-reduce", axes, "maxima"),
        ("reduce-scatter", axes, "heads and sums"),
    ]


def test_a_device_alone_has_no_collectives():
    serving = Serving(model=PRESETS["mixtral-8x7b"], prompt_len=512, output_len=64)
    assert serve_step(serving, ServingLayout(MeshShape()), 8).communication == ()


OF_WHOLE_STREAM = (
    *("router", "shared_expert_gate", "layer_projection", "layer_gate", "layer_output"),
    *("laurel_left", "laurel_right"),
    *(f"altup_{name}_{number}" for name in ("projection", "unembedding") for number in (1, 2, 3)),
)


@pytest.mark.parametrize("model", [name for name, model in PRESETS.items() if not model.attention.latent])
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_devices_share_out_what_the_model_needs(model, phase):
    """The products of all devices, with one sequence for each of two groups, are those of the model for both."""
    serving = Serving(model=PRESETS[model], phase=phase, prompt_len=512, output_len=64)

    def flops(step):
        local = step.extents.local_dims
        return sum(
            step.repeats[op.region.name].mean * 2 * math.prod(map(local, (op.rows, op.inner, op.columns, op.experts)))
            for op in step.ops.matmuls
            # Each device of tp has all of the former; each of fsdp the states of linear attention, for all rows.
            if not op.name.endswith(OF_WHOLE_STREAM) and op.target != "linear_heads"
        )

    mesh = MeshShape(dp=2, fsdp=2, tp=2)
    stored = replace(serving, model=padded(serving.model, mesh, SERVING_RULES))
    assert mesh.num_devices * flops(serve_step(serving, ServingLayout(mesh), 2)) == pytest.approx(
        flops(model_step(stored, 2))
    )
