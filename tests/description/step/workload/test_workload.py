import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from meshwright.description.families.load import load_model
from meshwright.description.families.registry import PRESETS, workload_from_data
from meshwright.description.hardware.system import parse_system
from meshwright.description.step.legality import check_mesh, check_runnable
from meshwright.description.step.parameter_tree import (
    Parameter,
    leaves,
    map_leaves,
    num_active_parameters,
    num_parameters,
    parameters,
)
from meshwright.description.step.rules import RULES, local_parameter_shape, spec, stream_rules, token_axes
from meshwright.description.step.sequence import halves_queries
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Workload, can_halve_queries, num_query_chunks
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.search import rank

# Published counts: model cards, and the index files of the weights on Hugging Face. GPT-3: the sizes of table 2.1 of
# arXiv:2005.14165 make 174.6B, as arXiv:2104.04473 has it. PaLM: arXiv:2204.02311, table 1, 540.35B. DeepSeek-V3:
# arXiv:2412.19437, 671B, 37B of them active. BLOOM: arXiv:2211.05100, table 3.
COUNTS = [
    ("llama2-7b", 6_738_415_616),
    ("llama2-13b", 13_015_864_320),
    ("llama2-70b", 68_976_648_192),
    ("llama3-8b", 8_030_261_248),
    ("llama3-70b", 70_553_706_496),
    ("llama3-405b", 405_853_388_800),
    ("gpt2-xl", 1_557_611_200),
    ("gpt3-175b", 174_615_846_912),
    ("palm-540b", 540_358_649_856),
    ("bloom-176b", 176_247_271_424),
    ("mixtral-8x7b", 46_702_792_704),
    ("deepseek-v3", 671_026_419_200),
    ("qwen3-8b", 8_190_735_360),
    ("phi3-mini", 3_821_079_552),
    ("gemma-7b", 8_537_680_896),
    ("gpt2", 124_439_808),
    ("gpt-neox-20b", 20_554_567_680),
    ("mistral-7b", 7_241_732_096),
    ("deepseek-v2", 235_741_434_880),
    ("qwen2-7b", 7_615_616_512),
    ("qwen3-30b-a3b", 30_532_122_624),
    ("gemma2-9b", 9_241_705_984),
]

LLAMA_3_2_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
}

REFUSED = [
    ({"model_type": "bert"}, "model_type 'bert'"),
    ({"hidden_act": "tanh"}, "hidden_act='tanh'"),
    ({"rope_scaling": {"rope_type": "proportional"}}, "rope_scaling of type 'proportional'"),
    ({"num_key_value_heads": 5}, "num_key_value_heads=5; "),
    ({"vocab_size": 0}, "vocab_size=0"),
]


@pytest.mark.parametrize(("name", "count"), COUNTS)
def test_a_preset_has_as_many_parameters_as_were_published(name, count):
    assert num_parameters(PRESETS[name]) == count


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("deepseek-v3", 37.6), ("llama3-8b", 8.03)])
def test_active_parameters_leave_out_idle_experts(name, billions):
    """Mixtral: 12.9B active (arXiv:2401.04088). DeepSeek-V3: 37B, which leaves out the table that is looked up in."""
    assert num_active_parameters(PRESETS[name]) == pytest.approx(billions * 1e9, rel=3e-3)


def test_a_hugging_face_config_is_read(tmp_path):
    """Llama-3.2-1B: 1,235,814,400 parameters, embeddings tied (its model card)."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    for path in (tmp_path, tmp_path / "config.json"):
        model = load_model(str(path))
        assert num_parameters(model) == 1_235_814_400
        assert model.positions.frequencies[0].scaling.factor == 32.0
        assert model.num_groups == 4


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_a_config_that_is_not_known_is_refused_by_name(changes, said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B | changes))
    with pytest.raises(MeshwrightError) as error:
        load_model(str(tmp_path))
    assert said in str(error.value)


def test_a_config_without_a_size_names_it(tmp_path):
    data = {key: value for key, value in LLAMA_3_2_1B.items() if key != "hidden_size"}
    (tmp_path / "config.json").write_text(json.dumps(data))
    with pytest.raises(MeshwrightError, match="no 'hidden_size'"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_config_is_told(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MeshwrightError):
        load_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("name", ["mine/config.json", "mine.json"])
def test_a_model_has_the_name_of_its_file_or_of_its_folder(name, tmp_path):
    """Once a file of another name than config.json had that of its folder, unless it was in the current one."""
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text((Path(__file__).parents[3] / "references/llama/config.json").read_text())
    assert load_model(str(path)).name == "mine"


def test_an_unknown_model_is_told_with_the_nearest():
    with pytest.raises(MeshwrightError, match="did you mean llama3-8b"):
        load_model("llama3-8bb")


def test_every_logical_axis_of_every_model_has_a_rule():
    for model in PRESETS.values():
        for _, parameter in leaves(parameters(model)):
            assert set(parameter.axes) <= set(RULES)


def test_the_spec_of_a_weight_follows_from_the_rules():
    mesh = MeshShape(dp=2, fsdp=4, tp=2)
    assert spec(("embed", "mlp"), mesh=mesh) == (("fsdp",), ("tp",))
    assert spec(("batch", "residual_sequence", "activation"), mesh=mesh) == (("dp", "fsdp"), ("tp",), ())
    assert token_axes() == ("dp", "fsdp", "ep", "sp")


def test_a_dim_without_a_rule_an_unknown_axis_and_an_axis_used_twice_are_errors():
    mesh = MeshShape(fsdp=2)
    with pytest.raises(MeshwrightError, match="dim 'colour', for which there is no rule"):
        spec(("colour",), mesh=mesh)
    with pytest.raises(MeshwrightError, match="rule for 'embed' names axis 'model'"):
        spec(("embed",), mesh=mesh, rules={"embed": ("model",)})
    with pytest.raises(MeshwrightError, match="needs axis fsdp=2 on dims embed and mlp"):
        spec(("embed", "mlp"), mesh=mesh, rules={"embed": ("fsdp",), "mlp": ("fsdp",)})


def test_a_local_shape_divides_each_dim_by_its_axes_or_says_why_not():
    query = Parameter(shape=(2, 64, 8, 2, 16), axes=("layers", "embed", "kv_heads", "group", "head_dim"))
    assert local_parameter_shape(query, mesh=MeshShape(fsdp=4, tp=2)) == (2, 16, 4, 2, 16)
    with pytest.raises(MeshwrightError, match=r"tp=3 cannot split kv_heads=8 of layers.query"):
        local_parameter_shape(query, mesh=MeshShape(tp=3), what="layers.query")


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        (MeshShape(pp=4), "pp=4 stages for the 2 layers of tiny, so that some would split nothing; use pp in 1 to 2"),
        (MeshShape(ep=2), "ep=2, which would split nothing"),
        (MeshShape(dp=3), "batch 16 is not a multiple of dp*fsdp = 3*1 = 3; use 15 or 18"),
        (MeshShape(tp=16), "tp=16 cannot split kv_heads=8 of layers.query"),
        (MeshShape(sp=7), "sequence length 64 is not a multiple of sp = 7"),
    ],
    ids=str,
)
def test_a_mesh_that_cannot_split_the_workload_is_told_with_the_numbers(mesh, said):
    workload = Workload(model=replace(PRESETS["tiny"], vocab=257), batch=16, seq_len=64)
    with pytest.raises(MeshwrightError) as error:
        check_mesh(workload, mesh)
    assert said in str(error.value)


def test_tp_splits_a_sequence_only_with_the_stream():
    workload = Workload(model=PRESETS["tiny"], batch=4, seq_len=30)
    with pytest.raises(MeshwrightError, match="cannot split sequence length=30"):
        check_mesh(workload, MeshShape(tp=4))
    check_mesh(workload, MeshShape(tp=4), stream_rules("whole"))
    meshes = {
        stream: {str(plan.mesh) for plan in rank(workload, parse_system("cpu:4"), tp_stream=stream, top=20).plans}
        for stream in ("split", "whole")
    }
    assert meshes["whole"] - meshes["split"] == {"tp=4", "tp=2,sp=2"}


def test_a_workload_survives_plain_data():
    workload = Workload(model=PRESETS["llama3-8b"], batch=8, seq_len=128, remat="none")
    assert workload_from_data(json.loads(json.dumps(asdict(workload)))) == workload


def test_a_workload_of_nothing_or_of_an_unknown_policy_is_refused():
    for changes in ({"batch": 0}, {"seq_len": 0}, {"remat": "some"}):
        with pytest.raises(MeshwrightError):
            Workload(**({"model": PRESETS["tiny"], "batch": 1, "seq_len": 1} | changes))


def test_trees_are_mapped_by_path():
    tree = {"a": 1, "b": {"c": 2}}
    assert list(leaves(tree)) == [("a", 1), ("b.c", 2)]
    assert map_leaves(lambda path, leaf: f"{path}{leaf}", tree) == {"a": "a1", "b": {"c": "b.c2"}}


def test_long_sequences_are_cut_into_whole_chunks():
    assert [num_query_chunks(s) for s in (256, 1024, 2048, 8192, 1500)] == [1, 1, 2, 8, 1]


def test_sequences_are_halved_that_a_device_has_whole_and_in_no_chunks():
    workload = Workload(model=PRESETS["tiny"], batch=8, seq_len=256)
    assert halves_queries(workload, MeshShape(dp=2, tp=2))
    assert not halves_queries(workload, MeshShape(sp=2))
    assert [can_halve_queries(s) for s in (256, 1024, 2048, 255)] == [True, True, False, False]


@pytest.mark.parametrize(("name", "what"), [("bloom-176b", "positions='alibi'")])
def test_a_model_with_ops_that_nothing_runs_is_planned_and_not_run(name, what):
    with pytest.raises(MeshwrightError, match=f"has {what}; it can be planned, and does not run yet"):
        check_runnable(PRESETS[name], MeshShape())


@pytest.mark.parametrize(("model", "strategy"), [("gemma2-9b", "attention='scores'"), ("gemma3-1b", "sp=1 or pp=1")])
def test_attention_that_a_kernel_does_not_have_is_refused_in_one_line(model, strategy):
    with pytest.raises(MeshwrightError, match=strategy):
        check_runnable(PRESETS[model], MeshShape(sp=2, pp=2), Strategy(attention="flash", num_microbatches=2))


def test_what_latent_attention_does_not_have_is_refused_in_one_line():
    latent = PRESETS["deepseek-v3"]
    check_runnable(latent, MeshShape(fsdp=2, tp=2), Strategy(attention="cudnn"))
    with pytest.raises(MeshwrightError, match="collective_matmul with the latent attention of deepseek-v3"):
        check_runnable(latent, MeshShape(fsdp=2, tp=2), Strategy(collective_matmul=True))
    wide = replace(
        latent, attention=replace(latent.attention, latent=replace(latent.attention.latent, value_head_dim=256))
    )
    with pytest.raises(MeshwrightError, match="'cudnn' takes no values wider than queries"):
        check_runnable(wide, MeshShape(fsdp=2), Strategy(attention="cudnn"))


def test_chunks_run_with_every_attention_but_cudnns():
    for attention in ("scores", "flash"):
        check_runnable(PRESETS["llama4-scout-17b-16e"], MeshShape(fsdp=2, ep=4), Strategy(attention=attention))
    with pytest.raises(MeshwrightError, match="attends within chunks of a sequence, which attention='cudnn' does not"):
        check_runnable(PRESETS["llama4-scout-17b-16e"], MeshShape(fsdp=2), Strategy(attention="cudnn"))


@pytest.mark.parametrize("name", ["tiny", "llama2-7b", "llama3-405b"])
def test_llama_style_models_run(name):
    check_runnable(PRESETS[name], MeshShape(dp=2, fsdp=2, tp=2, sp=2, pp=2))


def test_experts_run_over_ep_and_in_stages():
    model = PRESETS["mixtral-8x7b"]
    check_runnable(model, MeshShape(dp=2, fsdp=2, tp=2, sp=2, ep=4, pp=2))
    assert model.experts is not None
    mixed = replace(model, experts=replace(model.experts, num_dense_layers=1))
    check_runnable(mixed, MeshShape(pp=16))
    with pytest.raises(MeshwrightError, match=r"on pp=32 cut the 31 layers of mixtral-8x7b .* use pp up to 31"):
        check_runnable(mixed, MeshShape(pp=32))
    sparse = replace(model, experts=replace(model.experts, layers=(False, True)))
    check_mesh(Workload(model=sparse, batch=16, seq_len=64), MeshShape(pp=16))
    with pytest.raises(MeshwrightError, match=r"pp=32 stages for the 16 cycles of 2 layers of .*; use pp in 1 to 16"):
        check_mesh(Workload(model=sparse, batch=16, seq_len=64), MeshShape(pp=32))
    with pytest.raises(MeshwrightError, match=r"on pp=8 cut the 16 cycles of 2 layers .* use virtual_stages 1 to 2"):
        check_runnable(sparse, MeshShape(pp=8), Strategy(virtual_stages=3, num_microbatches=8))
    irregular = replace(model, experts=replace(model.experts, layers=(True, False, True, True, True)))
    with pytest.raises(MeshwrightError, match=r"pp=2 stages for the 1 cycle of 32 layers of .*; use pp=1"):
        check_mesh(Workload(model=irregular, batch=16, seq_len=64), MeshShape(pp=2))
    small = PRESETS["gemma4-e2b"]
    with pytest.raises(MeshwrightError, match="pp=5; layers of gemma4-e2b read keys and values of earlier layers, or"):
        check_mesh(Workload(model=small, batch=10, seq_len=64), MeshShape(pp=5))
    with pytest.raises(MeshwrightError, match="several layers of gemma4-e2b attend to the same keys, which"):
        check_runnable(small, MeshShape(sp=2), Strategy(attention="flash"))
    with pytest.raises(MeshwrightError, match="with tp_stream='whole' can be planned"):
        check_runnable(model, MeshShape(ep=2, tp=2), Strategy(tp_stream="whole"))
    with pytest.raises(MeshwrightError, match="splits experts, of which llama3-8b has none; use ep=1"):
        check_runnable(PRESETS["llama3-8b"], MeshShape(ep=2))
