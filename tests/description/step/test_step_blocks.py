"""Layers as ops: which kind of layer is where, what declares parameters, and that every op has a lowering."""

from dataclasses import replace

import pytest

from meshwright.description.families.registry import PRESETS
from meshwright.description.step.attention import KeySharing
from meshwright.description.step.blocks import layers, program
from meshwright.description.step.frequencies import Frequencies
from meshwright.description.step.layer import Attention, Combine, Gated, Lookup, Rotary
from meshwright.description.step.lora import LoRA
from meshwright.description.step.model import AttentionConfig, Biases, LearnedPositions, Norms, RotaryPositions
from meshwright.description.step.parameter_tree import leaves, parameters
from meshwright.description.step.serve import layers_by_window, mean_over_layers
from meshwright.errors import MeshwrightError
from meshwright.execution.models.layer import LOWERINGS

TINY = PRESETS["tiny"]


def ops(model, kind):
    return [op for stack in layers(model) for op in stack.ops if isinstance(op, kind)]


def test_every_kind_of_op_has_a_lowering():
    kinds = {type(op) for model in PRESETS.values() for stack in layers(model) for op in stack.ops}
    assert kinds == {*LOWERINGS, Combine}


def test_windows_and_thetas_go_in_cycles_that_start_where_a_stack_does():
    local, everywhere = Frequencies(theta=1e4), Frequencies(theta=1e6)
    model = replace(
        TINY,
        num_layers=6,
        attention=AttentionConfig(windows=(4, 4, None)),
        positions=RotaryPositions(frequencies=(local, local, everywhere)),
    )
    assert [op.windows for op in ops(model, Attention)] == [(4, 4, None)]
    assert [[f.theta for f in op.by_layer] for op in ops(model, Rotary)] == [[1e4, 1e4, 1e6]]
    shifted = replace(model, experts=PRESETS["tiny-moe-shared"].experts)
    assert [(s.name, s.num_layers, s.period) for s in layers(shifted)] == [("dense_layers", 1, 1), ("layers", 5, 3)]
    assert [op.windows for op in ops(shifted, Attention)] == [(4,), (4, None, 4)]
    assert mean_over_layers(model, lambda window: window or 16) == 8


def test_layers_without_keys_attend_to_those_of_the_last_layer_of_their_kind():
    model = PRESETS["gemma4-e2b"]
    stacks = layers(model)
    assert [stack.num_layers for stack in stacks] == [2] * 5 + [1] * 5 + [4] * 5
    assert [stack.name for stack in stacks if stack.is_donor] == ["donor_layers_3", "donor_layers_4"]
    assert {stack.window for stack in stacks if stack.is_donor} == {512, None}
    own = {path.partition(".")[0] for path, _ in leaves(parameters(model)) if path.endswith(".key")}
    assert own == {stack.name for stack in stacks if not stack.is_sharing}
    assert [stack.name for stack in stacks if stack.is_sharing] == [f"sharing_layers_{place}" for place in range(5)]
    # A server has pages for 12 layers with a window and 3 without; its queries are those of all 35 layers.
    assert layers_by_window(model) == {512: 12, None: 3}
    assert layers_by_window(model, have_keys=False) == {512: 28, None: 7}


def test_sparse_layers_are_before_those_whose_keys_are_shared():
    model = PRESETS["gemma3n-e2b"]
    stacks = layers(model)
    assert [stack.num_layers for stack in stacks] == [2] * 5 + [1] * 5 + [1] * 5 + [2] * 5
    names = [stack.name.rpartition("_")[0] for stack in stacks[::5]]
    assert names == ["sparse_layers", "layers", "donor_layers", "sharing_layers"]
    sparse = [op.sparsity for stack in stacks for op in stack.ops if isinstance(op, Gated) and not op.is_on_residual]
    assert sparse == [0.95] * 5 + [0.0] * 15
    # In a model with fewer layers before those, some with shared keys are sparse too.
    assert model.altup is not None
    longer = replace(model, altup=replace(model.altup, num_sparse_layers=17))
    sparse = {stack.name for stack in layers(longer) for op in stack.ops if isinstance(op, Gated) and op.sparsity}
    assert sparse == {*(f"sparse_layers_{place}" for place in range(5)), "donor_layers_0", "donor_layers_1"}
    with pytest.raises(MeshwrightError, match="num_sparse_layers=21; they are among its 20 layers with keys"):
        replace(model, altup=replace(model.altup, num_sparse_layers=21))
    with pytest.raises(
        MeshwrightError, match=r"has altup; it is known of models whose layers have inputs of their own"
    ):
        replace(model, layer_inputs=None)
    with pytest.raises(MeshwrightError, match="lora target 'altup_router' is a router, which has no adapter here"):
        program(replace(model, lora=LoRA(rank=4, alpha=4.0, targets=("altup_router",))))


def test_features_declare_their_parameters():
    plain = dict(leaves(parameters(TINY)))
    features = [
        ({"attention": AttentionConfig(qk_norm="head")}, {"layers.query_norm", "layers.key_norm"}),
        ({"norms": Norms(place="both")}, {"layers.attention_post_norm", "layers.mlp_post_norm"}),
        ({"biases": Biases(qkv=True)}, {f"layers.{name}_bias" for name in ("query", "key", "value")}),
        ({"norms": Norms(after_embedding=True)}, {"embedding_norm"}),
        ({"biases": Biases(mlp=True)}, {f"layers.{name}_bias" for name in ("gate", "up", "down")}),
    ]
    for feature, added in features:
        assert set(dict(leaves(parameters(replace(TINY, **feature))))) - set(plain) == added


def test_learned_positions_are_looked_up_after_tokens():
    tables = [op for op in program(PRESETS["gpt2"]).embedding if isinstance(op, Lookup)]
    assert [(op.name, op.is_positional) for op in tables] == [("embedding", False), ("positions", True)]
    assert not ops(PRESETS["gpt2"], Rotary)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention": AttentionConfig(windows=())}, r"attention.windows=\(\); it takes one for all layers"),
        ({"attention": AttentionConfig(windows=(4, 0))}, "attention.windows=0"),
        ({"positions": RotaryPositions(dims=15), "head_dim": 15}, "positions.dims=15; rotary embedding wants an even"),
        ({"positions": RotaryPositions(dims=32)}, "from 0 to head_dim=16"),
        ({"positions": RotaryPositions(frequencies=())}, r"positions.frequencies=\(\); it takes one for all layers"),
        ({"positions": LearnedPositions(rows=0)}, "positions.rows=0"),
        (
            {"attention": AttentionConfig(sharing=KeySharing(num_layers=9, mlp=64))},
            "an earlier layer with the window of",
        ),
        ({"attention": AttentionConfig(sharing=KeySharing(num_layers=1, mlp=0))}, "attention.sharing.mlp=0"),
        (
            {"attention": AttentionConfig(windows=(8, 4), sharing=KeySharing(num_layers=1, mlp=64)), "num_layers": 4},
            "whose windows are all alike",
        ),
        ({"positions": "alibi", "attention": PRESETS["tiny-deepseek"].attention}, "keys have rotary positions"),
    ],
)
def test_a_model_that_contradicts_itself_is_refused(changes, said):
    with pytest.raises(MeshwrightError, match=said):
        replace(TINY, **changes)
