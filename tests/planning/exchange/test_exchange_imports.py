"""Settings of other frameworks mean here what they mean there, and what cannot be planned is refused by name."""

import contextlib
import json
import tomllib
from pathlib import Path

import pytest

from meshwright import MeshwrightError
from meshwright.cli.main import main
from meshwright.description.hardware.system import System
from meshwright.description.step.model import rotary
from meshwright.planning.exchange.files import read_values
from meshwright.planning.exchange.imports import import_settings
from meshwright.planning.exchange.reading import read_options
from meshwright.planning.plan import read_plan

MAXTEXT = {"model_name": "llama3-8b", "per_device_batch_size": 2, "max_target_length": 4096}

LWM = r"""
export LIBTPU_INIT_ARGS="--xla_enable_async_all_gather=true"
# mesh_dim: dp, fsdp, tp, sp
python3 -u -m lwm.train \
    --modality='text' \
    --mesh_dim='!1,-1,4,2' \
    --dtype='bf16' \
    --load_llama_config='7b' \
    --update_llama_config="dict(theta=1000000,scan_attention=True,remat_block='nothing_saveable')" \
    --tokenizer="$llama_tokenizer_path" \
    --optimizer.type='adamw' \
    --optimizer.accumulate_gradient_steps=2 \
    --train_dataset.json_dataset.path="$dataset_path" \
    --train_dataset.json_dataset.seq_length=32768 \
    --train_dataset.json_dataset.batch_size=16 \
    --logger.output_dir="$output_dir"
read
"""

TITAN = """
[job]
description = "Llama 3 8B training"
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
dataset = "c4"
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
context_parallel_degree = 4
context_parallel_rotate_method = "alltoall"
[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"
"""

MEGATRON = """
GPT_MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --rotary-base 500000
    --normalization RMSNorm
    --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --vocab-size 128256
    --make-vocab-size-divisible-by 128
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --bf16
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --lr 6.0e-5
    --data-path $DATA_PATH
    --recompute-activations
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --num-layers-per-virtual-pipeline-stage 4
    --sequence-parallel
    --use-distributed-optimizer
)
"""


@pytest.fixture
def read(tmp_path):
    """Import a text, or options of MaxText."""

    def read_text(what, on, **options):
        path = tmp_path / "settings"
        path.write_text(json.dumps(what) if isinstance(what, dict) else what)
        return import_settings(path, on, **options)

    return read_text


def means(imported, option):
    """What an option of an import means."""
    return next(meaning.ours for meaning in imported.meanings if meaning.option == option)


def test_lwm_flags_in_a_script(read):
    found = read(LWM, "v4:4x4x4")
    workload, mesh = found.plan.workload, found.plan.mesh
    assert found.title == "LWM"
    assert mesh.degrees == {"dp": 1, "fsdp": 8, "tp": 4, "sp": 2, "ep": 1, "pp": 1}
    assert (workload.batch, workload.seq_len, workload.compute_dtype, workload.remat) == (32, 32768, "bf16", "block")
    assert (workload.model.embed, workload.model.positions, workload.model.vocab) == (4096, rotary(1e6), 32000)
    assert found.plan.strategy.num_microbatches == 2
    assert found.plan.strategy.sp_method == "ring"
    assert means(found, "--mesh_dim") == "dp=1, fsdp=8, tp=4, sp=2"
    assert "--logger.output_dir" in found.nothing["names, checkpoints and logging"]


def test_easylm_has_three_degrees_and_its_own_remat_policy(read):
    data = "--train_dataset.json_dataset."
    text = f"--mesh_dim='mp:2,dp:-1,fsdp:8' --load_llama_config=13b {data}seq_length=2048 {data}batch_size=64"
    found = read(text, "v4:4x4x4")
    assert found.title == "EasyLM"
    assert (found.plan.mesh.dp, found.plan.mesh.fsdp, found.plan.mesh.tp) == (4, 8, 2)
    assert found.plan.workload.remat == "block"


def test_degrees_of_maxtext_are_multiplied_within_and_across_slices(read):
    degrees = {"ici_fsdp_parallelism": -1, "ici_fsdp_transpose_parallelism": 2, "ici_tensor_parallelism": 4}
    found = read(MAXTEXT | degrees, "2*v5p:4x4x4")
    assert (found.plan.mesh.dp, found.plan.mesh.fsdp, found.plan.mesh.tp) == (2, 16, 4)
    assert found.plan.workload.batch == 256
    assert found.plan.strategy.tp_stream == "split"
    assert "MaxText splits them along the mlp too" in means(found, "ici_fsdp_transpose_parallelism")
    sequence = read(MAXTEXT | {"ici_tensor_sequence_parallelism": 4}, "v5p:4x4x4")
    assert means(sequence, "ici_tensor_sequence_parallelism") == "tp=4"


def test_policies_of_maxtext_by_the_values_that_they_save(read):
    custom = {"remat_policy": "custom", "query_proj": "device", "mlpwo": "device", "key_proj": "remat"}
    found = read(MAXTEXT | custom, "v5p:4x4x4")
    assert found.plan.workload.remat == "named"
    assert found.plan.strategy.profile.saved_values == ("query", "down")
    named = read(MAXTEXT | {"remat_policy": "save_qkv_proj"}, "v5p:4x4x4")
    assert named.plan.strategy.profile.saved_values == ("query", "key", "value")
    assert named.plan.planned_only
    offloaded = read(MAXTEXT | {"remat_policy": "custom", "decoder_layer_input": "offload"}, "v5p:4x4x4")
    assert offloaded.plan.workload.remat == "offload"


def test_dropout_of_maxtext_that_is_switched_off(read):
    options = {"dropout_rate": 0.1}
    assert read(MAXTEXT | options, "v5p:4x4x4").plan.strategy.dropout == 0.1
    assert read(MAXTEXT | options | {"enable_dropout": False}, "v5p:4x4x4").plan.strategy.dropout == 0


def test_a_model_of_maxtext_by_its_sizes(read):
    sizes = {"base_num_decoder_layers": 4, "base_emb_dim": 1024, "base_mlp_dim": 4096, "base_num_query_heads": 8}
    rest = {"base_num_kv_heads": 8, "head_dim": 128, "vocab_size": 32000, "normalization_layer_epsilon": 1e-6}
    found = read({"per_device_batch_size": 0.5, "ici_tensor_parallelism": 2} | sizes | rest, "v5e:2x2")
    model = found.plan.workload.model
    assert (model.num_layers, model.embed, model.norms.epsilon, found.plan.workload.batch) == (4, 1024, 1e-6, 2)
    whole = read({"per_device_batch_size": 1, "model_name": "llama2-7b", "base_num_decoder_layers": 4}, "v5e:2x2")
    assert (whole.plan.workload.model.num_layers, whole.plan.workload.model.name) == (4, "llama2-7b")


def test_torchtitan_toml(read):
    found = read(TITAN, "h100:64")
    workload, mesh, strategy = found.plan.workload, found.plan.mesh, found.plan.strategy
    assert (mesh.dp, mesh.fsdp, mesh.sp) == (2, 8, 4)
    assert (workload.batch, workload.remat, workload.model.name) == (16, "alternate", "llama3-8b")
    assert (strategy.sp_method, strategy.gradient_dtype, strategy.zero_stage) == ("ring", "f32", 3)


def test_megatron_arguments_in_a_script(read):
    found = read(MEGATRON, "h100:64")
    workload, mesh, strategy = found.plan.workload, found.plan.mesh, found.plan.strategy
    assert (mesh.fsdp, mesh.tp, mesh.pp, workload.batch) == (8, 2, 4, 256)
    assert (strategy.num_microbatches, strategy.virtual_stages, strategy.zero_stage) == (32, 2, 1)
    assert (workload.param_dtype, strategy.master_weights, strategy.moment_dtype) == ("bf16", True, "f32")
    assert (strategy.gradient_dtype, strategy.tp_stream, workload.remat) == ("f32", "split", "attention")
    assert workload.model.name == "llama3-8b"
    assert strategy.attention == "cudnn"
    flash = read(MEGATRON.replace("--bf16", "--bf16 --use-flash-attn"), "h100:64")
    assert flash.plan.strategy.attention == "flash"
    wide = read(MEGATRON.replace("parallel-size 2", "parallel-size 8"), "h100:64")
    assert wide.plan.workload.model.vocab == 129_024  # Megatron pads the vocabulary to a multiple of 128 * tp.


def test_levanter_takes_the_vocabulary_from_the_model_that_is_named(read):
    text = (
        "trainer: {mp: 'p=f32,c=bfloat16', train_batch_size: 256, replica_ici_axis_size: 2, per_device_parallelism: 2}"
    )
    found = read(text, "v5p:4x4x4", model="llama3-8b")
    assert (found.plan.mesh.dp, found.plan.mesh.fsdp) == (2, 32)
    assert (found.plan.strategy.num_microbatches, found.plan.workload.seq_len) == (2, 2048)
    with pytest.raises(
        MeshwrightError, match=r"num_layers, embed, .*vocab of the model are not in the file; name a MODEL"
    ):
        read(text, "v5p:4x4x4")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ici_autoregressive_parallelism": 4}, "autoregressive_parallelism is 4: .*tp of plan --serve decode"),
        ({"ici_fsdp_paralelism": 4}, "ici_fsdp_paralelism is not read"),
        ({"base_emb_dimm": 4}, "base_emb_dimm is not read; did you mean base_emb_dim"),
        ({"ici_fsdp_parallelism": 4}, "the ici degrees multiply to 4; v5p:4x4x4 has 64 devices of a slice"),
        ({"ici_data_parallelism": -1}, "is -1, and ici_fsdp_parallelism too; only one can be inferred"),
        ({"ici_tensor_parallelism": 5}, "64 does not divide by 5"),
        ({"remat_policy": "minimal_offloaded"}, "remat_policy is 'minimal_offloaded', which has no counterpart here"),
        ({"opt_type": "adam_pax"}, "opt_type is 'adam_pax'"),
        ({"base_emb_dim": 2048}, "embed is 2048 in the file; llama3-8b has 4096"),
        ({"per_device_batch_size": 0.3}, "per_device_batch_size is 0.3, 19.2 sequences on 64 devices"),
        ({"per_device_batch_size": "many"}, "per_device_batch_size is 'many'; it takes a number"),
        ({"model_name": "llama9-1b"}, "model llama9-1b is not one of llama2-7b"),
        ({"sliding_window_size": 4096}, "sliding_window_size is 4096: give a MODEL that has windows"),
        ({"mtp_num_layers": 1}, "mtp_num_layers is 1: there is no multi-token prediction here"),
        ({"dcn_fsdp_parallelism": 2}, "multiply to|divide"),
    ],
)
def test_options_of_maxtext_that_are_refused(options, why, read):
    with pytest.raises(MeshwrightError, match=why):
        read(MAXTEXT | options, "v5p:4x4x4")


def test_an_inner_axis_does_not_cross_slices(read):
    degrees = {"ici_data_parallelism": 2, "dcn_data_parallelism": 1, "dcn_fsdp_parallelism": 2}
    with pytest.raises(MeshwrightError, match="dp crosses 1 slices; here the outermost of pp, dp"):
        read(MAXTEXT | degrees, "2*v5p:4x4x4")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            MEGATRON.replace("parallel-size 2", "parallel-size $TP"),
            "size is \\$TP, a variable of a shell; write its value",
        ),
        (MEGATRON.replace("--bf16", "--fp16"), "--fp16 is True: there is no loss scaling here"),
        (MEGATRON.replace("--swiglu ", ""), "--swiglu is False; a model is read from sizes where it is True"),
        (MEGATRON.replace("--bf16", "--bf16 --bf16"), "has --bf16 twice"),
        (MEGATRON.replace("batch-size 256", "batch-size 250"), "250 does not divide by 8"),
        (
            MEGATRON.replace("--recompute-activations", "--recompute-granularity full"),
            "is None of 1 layers; uniform of 1",
        ),
        (MEGATRON.replace("--bf16", "--bf16 --hybrid-attention-ratio 0.5"), "--hybrid-attention-ratio is not read"),
        (LWM.replace("!1,-1,4,2", "!1,-1,-1,2"), "only one degree may be -1"),
        (LWM.replace("!1,-1,4,2", "!1,2,4,2"), "64 does not divide|has 64 devices"),
        (
            LWM.replace("--modality='text'", "--modality='vision,text'"),
            "--modality is vision,text: the plan is of a model",
        ),
        (LWM.replace("--train_dataset.json_dataset.seq_length=32768", ""), "seq_length is missing"),
        (LWM.replace("dict(theta", "open(theta"), "it is read as dict"),
        (
            TITAN.replace('selective_ac_option = "op"', 'selective_ac_option = "2"'),
            "of every layer 2; none, full and selective",
        ),
        (
            TITAN.replace("shard_degree = -1", "shard_degree = 4"),
            "shard_degree is 4; with the other degrees h100:64 has 8",
        ),
        (TITAN.replace("dataset", "datasets"), "training.datasets is not read"),
        ("[1, 2]", "has no settings: it is neither YAML, nor TOML, nor a list of --flags"),
        ("colour: blue", "has no option of Levanter, MaxText"),
        ("meshwright_plan: 1", "is a plan of meshwright"),
        ("a: [", "is not YAML"),
    ],
)
def test_files_that_are_refused(text, why, read):
    with pytest.raises(MeshwrightError, match=why):
        read(text, "h100:64")


def run(words):
    return main(words.split())


def test_the_command_writes_reads_and_compares(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = "plan llama3-8b --on v5p:4x4x4 --batch 128 --seq-len 4096 --mesh fsdp=64 --remat block --zero-stage 3"
    assert main([*words.split(), "-o", "plan.yaml", "--export", "maxtext", "llama.yml"]) == 0
    assert "wrote llama.yml" in capsys.readouterr().out
    assert run("plan --import llama.yml --on v5p:4x4x4 -o again.yaml") == 0
    screen = capsys.readouterr().out
    assert "ici_fsdp_parallelism = 64" in screen
    assert "fsdp=64" in screen
    assert (
        read_plan(tmp_path / "again.yaml").predicted.to_json() == read_plan(tmp_path / "plan.yaml").predicted.to_json()
    )
    assert run("plan plan.yaml --export torchtitan job.toml") == 2
    assert "torchtitan has no gradient_dtype=bf16" in capsys.readouterr().err
    assert run("plan plan.yaml --export levanter --json") == 2
    assert "takes a framework and a file" in capsys.readouterr().err
    assert run("plan --import llama.yml --on v5p:4x4x4 --json --framework maxtext") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["framework"] == "maxtext"
    assert {"option": "remat_policy", "value": "full", "means": "remat=block"} in data["options"]
    assert data["plan"]["strategy"]["profile"]["name"] == "maxtext"
    assert run("plan --import llama.yml") == 2
    assert "needs hardware: --on" in capsys.readouterr().err
    assert run("plan --import nothing.yml --on cpu:8") == 2
    assert "cannot read nothing.yml" in capsys.readouterr().err


WHOLE = [("maxtext", MAXTEXT, "v5p:4x4x4"), ("torchtitan", TITAN, "h100:64"), ("megatron", MEGATRON, "h100:64")]


@pytest.mark.parametrize(("name", "text", "on"), [*WHOLE, ("lwm", LWM, "v4:4x4x4")])
def test_wrong_values_of_any_option_end_in_one_line(name, text, on, tmp_path):
    path = tmp_path / "settings"
    path.write_text(json.dumps(text) if isinstance(text, dict) else text)
    _, values = read_values(path)
    system = System.parse(on)
    documented = tomllib.loads((Path(__file__).parent / "documented.toml").read_text())[name]["names"].split()
    for option in documented:
        for wrong in ([], [1], "", "x", -5, 0, 10**30, 1.5, True, None):
            with contextlib.suppress(MeshwrightError):
                read_options(name, values | {option: wrong}, system)


def test_an_export_is_refused_before_the_search(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("plan llama3-8b --on v5p:4x4x4 --batch 128 --export deepspeed x.json") == 2
    assert "no export for 'deepspeed'; a plan is written for levanter" in capsys.readouterr().err
    assert run("plan llama3-8b --on v5p:4x4x4 --batch 128 --sweep chips=64,128 --export maxtext x.yml") == 2
    assert "--export has no effect with --sweep" in capsys.readouterr().err
    assert run("plan llama3-8b --on v5p:4x4x4 --batch 128 --import x.yml") == 2
    assert "--batch" in capsys.readouterr().err
