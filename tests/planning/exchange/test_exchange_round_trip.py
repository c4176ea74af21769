"""Plans written as settings of another framework are read back as the same plans, or refused by name."""

from typing import Any

import pytest

from meshwright import MeshwrightError, plan
from meshwright.planning.exchange.imports import import_settings
from meshwright.planning.exchange.plan_fields import plan_fields
from meshwright.planning.exchange.tables import load_table

SMALL: dict[str, Any] = {"batch": 128, "seq_len": 4096}
NARROW: dict[str, Any] = {"param_dtype": "bf16", "master_weights": True, "moment_dtype": "f32", "gradient_dtype": "f32"}
SUMS: dict[str, Any] = {"gradient_dtype": "f32"}

# Three or more plans for each framework: model, mesh, hardware, options.
PLANS = [
    ("maxtext", "llama3-8b", "fsdp=64", "v5p:4x4x4", {"remat": "block", "zero_stage": 3}),
    ("maxtext", "llama3-70b", "dp=2,fsdp=16,tp=4", "2*v5p:4x4x4", {"remat": "matmuls", "num_microbatches": 2}),
    ("maxtext", "mixtral-8x7b", "fsdp=8,ep=8", "v5p:4x4x4", {"remat": "offload", "z_loss": 1e-4}),
    ("maxtext", "llama3-8b", "fsdp=64", "v5p:4x4x4", {"remat": "block", "zero_stage": 1, "num_layers": 8}),
    ("maxtext", "llama3-8b", "fsdp=8,pp=8", "h100:64", {"remat": "block", "schedule": "gpipe", "matmul_dtype": "fp8"}),
    ("maxtext", "llama2-7b", "fsdp=16,sp=4", "h100:64", {"remat": "block", "sp_method": "ring", "seq_len": 16384}),
    ("torchtitan", "llama3-8b", "fsdp=64", "h100:64", SUMS | {"remat": "none"}),
    ("torchtitan", "llama3-70b", "dp=2,fsdp=4,tp=8", "h100:64", SUMS | {"remat": "block", "num_microbatches": 2}),
    ("torchtitan", "llama3-70b", "fsdp=2,tp=8,pp=4", "h100:64", SUMS | {"remat": "block", "zero_stage": 2}),
    (
        "torchtitan",
        "llama3-8b",
        "fsdp=16,sp=4",
        "h100:64",
        SUMS | {"remat": "block", "sp_method": "gather", "attention": "flash"},
    ),
    ("megatron", "llama3-8b", "fsdp=16,tp=4", "h100:64", NARROW | {"remat": "none", "zero_stage": 1}),
    (
        "megatron",
        "llama3-70b",
        "dp=2,tp=8,pp=4",
        "h100:64",
        NARROW | {"remat": "attention", "tp_stream": "whole", "schedule": "1f1b"},
    ),
    ("megatron", "mixtral-8x7b", "fsdp=8,ep=8", "h100:64", NARROW | {"remat": "block", "zero_stage": 2}),
    ("megatron", "llama2-13b", "dp=2,fsdp=8,sp=4", "h100:64", NARROW | {"remat": "block", "sp_method": "ulysses"}),
    ("levanter", "llama3-8b", "fsdp=64", "v5p:4x4x4", {"remat": "none", "zero_stage": 3}),
    (
        "levanter",
        "llama2-7b",
        "dp=2,fsdp=32",
        "2*v5p:4x4x2",
        {"remat": "block", "num_microbatches": 2, "zero_stage": 3},
    ),
    ("levanter", "llama3-70b", "fsdp=16,tp=4", "v5p:4x4x4", {"remat": "block", "tp_stream": "whole"}),
]


@pytest.mark.parametrize(("framework", "model", "mesh", "on", "options"), PLANS)
def test_a_plan_is_read_back_from_its_settings(framework, model, mesh, on, options, tmp_path):
    made = plan(model, on=on, mesh=mesh, **SMALL | options)
    path = tmp_path / "settings"
    unsaid = made.export(framework, path)
    needs_model = framework == "levanter" or "num_layers" in options
    read = import_settings(path, on, model=model if needs_model else None)
    assert read.framework == framework
    assert read.plan.workload == made.workload
    assert read.plan.mesh == made.mesh
    # Fields that no option of theirs sets are told, and all others are the same.
    theirs, ours = (plan_fields(one.workload, one.mesh, one.strategy) for one in (read.plan, made))
    assert (
        {field for field in ours if ours[field] != theirs[field]}
        <= unsaid.keys()
        <= load_table(framework).unsaid.keys()
    )
    assert all(meaning.ours for meaning in read.meanings)


def test_settings_are_in_the_form_of_the_framework(tmp_path):
    made = plan("llama3-8b", on="h100:64", mesh="fsdp=16,tp=4", zero_stage=1, remat="block", **SMALL, **NARROW)
    made.export("megatron", tmp_path / "args")
    lines = (tmp_path / "args").read_text().splitlines()
    assert {"--tensor-model-parallel-size 4", "--use-distributed-optimizer", "--micro-batch-size 8"} <= {*lines}
    assert {"--bf16", "--rotary-base 500000", "--recompute-granularity full"} <= {*lines}
    made = plan("llama3-70b", on="h100:64", mesh="fsdp=2,tp=8,pp=4", remat="block", zero_stage=2, **SMALL, **SUMS)
    made.export("torchtitan", tmp_path / "job.toml")
    text = (tmp_path / "job.toml").read_text()
    for line in ("pipeline_parallel_degree = 4", "tensor_parallel_degree = 8", 'flavor = "70B"', 'mode = "full"'):
        assert f"{line}\n" in text


@pytest.mark.parametrize(
    ("framework", "model", "mesh", "options", "why"),
    [
        (
            "maxtext",
            "llama3-8b",
            "fsdp=64",
            {"remat": "none"},
            "MaxText has no remat=none; its remat_policy is block, matmuls",
        ),
        (
            "maxtext",
            "llama3-8b",
            "fsdp=8,tp=8",
            {"tp_stream": "whole", "zero_stage": 3},
            "cannot say tp_stream=whole: its steps have split; plan with --tp-stream split",
        ),
        ("maxtext", "llama3-8b", "fsdp=8,pp=8", {"schedule": "1f1b"}, "cannot say schedule=1f1b: its steps have gpipe"),
        ("maxtext", "llama3-8b", "fsdp=64", {"lora_rank": 8, "zero_stage": 3}, "cannot say lora=LoRA"),
        ("maxtext", "gemma2-9b", "fsdp=64", {}, "MaxText cannot say"),
        ("torchtitan", "llama3-8b", "fsdp=64", {}, "torchtitan has no gradient_dtype=bf16"),
        ("torchtitan", "llama2-7b", "fsdp=64", SUMS, "torchtitan has no flavor of llama2-7b"),
        ("torchtitan", "llama3-8b", "fsdp=64", SUMS | {"zero_stage": 1}, "torchtitan has no zero_stage=1"),
        ("torchtitan", "llama3-8b", "fsdp=64", SUMS | {"remat": "matmuls"}, "torchtitan has no remat=matmuls"),
        (
            "megatron",
            "llama3-8b",
            "fsdp=64",
            {},
            "plan with --param-dtype bf16 .*--master-weights --moment-dtype f32",
        ),
        ("megatron", "llama3-8b", "fsdp=64", NARROW | {"remat": "offload"}, "Megatron-LM has no remat=offload"),
        ("megatron", "qwen3-8b", "fsdp=64", NARROW, "Megatron-LM cannot say family.name=qwen3"),
        ("levanter", "llama3-8b", "fsdp=8,sp=8", {}, "Levanter has no axis for sp=8"),
        (
            "levanter",
            "llama3-8b",
            "fsdp=64",
            {"optimizer": "lion", "attention": "flash"},
            "Levanter has no optimizer=lion",
        ),
        ("lwm", "llama3-8b", "fsdp=64", {}, "no export for 'lwm'; a plan is written for levanter, maxtext"),
        ("jax", "llama3-8b", "fsdp=64", {}, "no export for 'jax'"),
    ],
)
def test_a_plan_that_cannot_be_said_is_refused_by_name(framework, model, mesh, options, why, tmp_path):
    made = plan(model, on="h100:64", mesh=mesh, **SMALL | {"remat": "block"} | options)
    with pytest.raises(MeshwrightError, match=why):
        made.export(framework, tmp_path / "settings")
    assert not (tmp_path / "settings").exists()
