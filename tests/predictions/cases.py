"""The cases of the golden records, as plain data: every preset, every way to run a step, every kind of chip.

Nothing here calls the library. Fields of workloads and strategies are named as they were when the records were written;
`compute.py` translates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY: Mapping[str, Any] = {}
"""A search with nothing fixed."""


def train(
    model: str,
    hardware: str,
    mesh: str,
    batch: int,
    seq_len: int,
    *,
    workload: Mapping[str, Any] = ANY,
    changes: Mapping[str, Any] = ANY,
    search: Mapping[str, Any] = ANY,
    **strategy: Any,
) -> dict[str, Any]:
    """A train step of a preset with some changes, on one mesh, by a strategy.

    Args:
        model: name of the preset.
        hardware: the system, as `--on` takes it.
        mesh: axes and degrees, as `dp=2,fsdp=4`.
        batch: sequences of the step over all devices.
        seq_len: tokens of a sequence.
        workload: remat, dtypes.
        changes: fields of the model that differ from the preset; those of its experts under `experts`.
        search: searches over the whole space, by a name, each with what is fixed in it.
        strategy: fields of the strategy that differ from the default.
    """
    return {
        "kind": "train",
        "model": model,
        "changes": dict(changes),
        "hardware": hardware,
        "mesh": mesh,
        "batch": batch,
        "seq_len": seq_len,
        "workload": dict(workload),
        "strategy": strategy,
        "search": dict(search),
    }


def serve(
    model: str,
    hardware: str,
    mesh: str,
    batch: int,
    *,
    cache: str = "heads",
    changes: Mapping[str, Any] = ANY,
    search: Mapping[str, Any] = ANY,
    **serving: Any,
) -> dict[str, Any]:
    """A decode step or a prefill of a preset on one layout, at one batch; each search has the latency it asks for."""
    return {
        "kind": "serve",
        "model": model,
        "changes": dict(changes),
        "hardware": hardware,
        "mesh": mesh,
        "batch": batch,
        "cache": cache,
        "serving": serving,
        "search": dict(search),
    }


SEARCH = {"search": ANY}
RUNNABLE = {"search of what runs": {"is_runnable": True}}

SMALL_DENSE = {"num_layers": 5, "num_kv_heads": 4}
MEGATRON = {
    "spmd_pipeline": False,
    "tp_stream": "whole",
    "overlaps_gradients": False,
    "fuses": False,
    "fuses_loss": False,
    "dropout": 0.1,
}
FSDP = {
    "flat_buffers": True,
    "fuses": False,
    "fuses_loss": False,
    "reruns_blocks": True,
    "gradient_dtype": "f32",
    "attention": "flash",
}
DEEPSPEED = {"lists_shards": True, "overlaps_weights": False, "overlaps_gradients": False, "fuses": False}

DENSE_ON_TPUS = {
    "8b fsdp+tp on v5p": train(
        "llama3-8b", "v5p:4x4x4", "fsdp=16,tp=4", 512, 8192, attention="flash", search=SEARCH | RUNNABLE
    ),
    "8b scores in chunks on v5p": train("llama3-8b", "v5p:4x4x4", "dp=2,fsdp=16,tp=2", 256, 4096),
    "8b no remat on v5p": train("llama3-8b", "v5p:4x4x4", "fsdp=32,tp=2", 64, 2048, workload={"remat": "none"}),
    "70b 1f1b lockstep on v5p": train(
        "llama3-70b", "v5p:8x8x8", "fsdp=32,tp=4,pp=4", 512, 8192, attention="flash", num_microbatches=8
    ),
    "70b interleaved lockstep on v5p": train(
        "llama3-70b",
        "v5p:4x4x8",
        "dp=2,fsdp=4,tp=4,pp=4",
        256,
        4096,
        attention="flash",
        num_microbatches=16,
        virtual_stages=5,
        zero_stage=1,
    ),
    "70b ring over sp on v5p": train(
        "llama3-70b", "v5p:8x8x8", "fsdp=16,sp=4,tp=8", 64, 32_768, attention="flash", sp_method="ring"
    ),
    "405b offload on v5p": train(
        "llama3-405b",
        "v5p:16x16x16",
        "fsdp=512,tp=8",
        1024,
        8192,
        attention="flash",
        workload={"remat": "offload", "param_dtype": "bf16"},
        master_weights=True,
        num_microbatches=2,
    ),
    "405b search of v5p": train(
        "llama3-405b", "v5p:8x16x16", "fsdp=256,tp=8", 2048, 8192, attention="flash", search=SEARCH
    ),
    "palm slices of v4": train("palm-540b", "2*v4:8x16x16", "dp=2,fsdp=1024,sp=2", 2048, 2048),
    "7b fsdp on v5e": train("llama2-7b", "v5e:4x4", "fsdp=16", 64, 4096, num_microbatches=2, search=SEARCH | RUNNABLE),
    "7b attention kept on v5e": train(
        "llama2-7b", "v5e:8x8", "fsdp=16,tp=4", 64, 2048, workload={"remat": "attention"}, tp_stream="whole"
    ),
    "7b gpipe lockstep on v5e": train(
        "llama2-7b", "v5e:2x4", "fsdp=4,pp=2", 32, 2048, num_microbatches=8, schedule="gpipe"
    ),
    "7b whole programs of stages on v5e": train(
        "llama2-7b", "v5e:4x8", "fsdp=8,pp=4", 128, 2048, num_microbatches=16, spmd_pipeline=False, virtual_stages=2
    ),
    "13b gather over sp on v5e": train(
        "llama2-13b", "v5e:8x8", "fsdp=16,sp=4", 32, 8192, workload={"remat": "matmuls"}, attention="flash"
    ),
    "13b scores over sp on v5e": train("llama2-13b", "v5e:8x8", "fsdp=16,sp=4", 32, 4096),
    "70b two slices of v5e": train(
        "llama2-70b", "2*v5e:16x16", "dp=2,fsdp=64,tp=4", 512, 4096, attention="flash", collective_matmul=True
    ),
    "qwen2 biases on v6e": train(
        "qwen2-7b", "v6e:4x4", "fsdp=4,tp=4", 16, 2048, workload={"remat": "matmuls"}, search=SEARCH
    ),
    "qwen3 norms of heads on v6e": train(
        "qwen3-8b", "v6e:8x8", "dp=2,fsdp=8,sp=2,tp=2", 64, 8192, attention="flash", sp_method="ulysses"
    ),
    "gemma tied on v6e": train("gemma-7b", "v6e:4x4", "fsdp=8,tp=2", 32, 8192, attention="flash"),
    "gemma2 post norms on v6e": train(
        "gemma2-9b", "v6e:4x8", "fsdp=8,tp=4", 64, 4096, collective_matmul=True, num_microbatches=4, zero_stage=2
    ),
    "mistral window on tpu7x": train("mistral-7b", "tpu7x:4x4x4", "fsdp=64,tp=2", 128, 8192, attention="flash"),
    "8b int8 on v6e": train(
        "llama3-8b", "v6e:4x4", "fsdp=16", 32, 8192, attention="flash", matmul_dtype="int8", optimizer="lion"
    ),
    "8b fp8 on tpu7x": train(
        "llama3-8b",
        "tpu7x:2x2x4",
        "fsdp=8,tp=4",
        64,
        8192,
        attention="flash",
        matmul_dtype="fp8",
        workload={"param_dtype": "bf16"},
        moment_dtype="bf16",
        search=SEARCH,
    ),
    "gpt2 learned positions on v5e": train(
        "gpt2", "v5e:2x4", "dp=2,fsdp=4", 64, 1024, workload={"remat": "none"}, optimizer="adafactor"
    ),
    "gpt2 muon on v5e": train("gpt2", "v5e:2x4", "dp=2,fsdp=4", 64, 1024, optimizer="muon", on_bad_step="skip"),
    "gpt2-xl ZeRO-1 on v5e": train(
        "gpt2-xl", "v5e:4x4", "dp=4,fsdp=4", 64, 1024, zero_stage=1, num_microbatches=4, optimizer="adamw-8bit"
    ),
}

DENSE_ON_GPUS = {
    "8b fsdp on h100": train("llama3-8b", "h100:16", "fsdp=16", 32, 8192, attention="flash", search=SEARCH | RUNNABLE),
    "8b scores on h100": train("llama3-8b", "h100:8", "fsdp=4,tp=2", 8, 4096),
    "8b torchtitan on h100": train(
        "llama3-8b", "h100:128", "fsdp=128", 256, 8192, workload={"remat": "alternate"}, **FSDP
    ),
    "70b torchtitan with tp on h100": train(
        "llama3-70b", "h100:256", "fsdp=32,tp=8", 512, 8192, workload={"remat": "block"}, collective_matmul=True, **FSDP
    ),
    "70b 1f1b on h100": train(
        "llama3-70b",
        "h100:512",
        "dp=4,fsdp=4,tp=8,pp=4",
        512,
        8192,
        attention="flash",
        num_microbatches=16,
        virtual_stages=4,
        spmd_pipeline=False,
        zero_stage=1,
        workload={"param_dtype": "bf16"},
        master_weights=True,
        gradient_dtype="f32",
    ),
    "405b on h100": train(
        "llama3-405b",
        "h100:8192",
        "fsdp=64,tp=8,pp=16",
        2048,
        8192,
        attention="flash",
        num_microbatches=32,
        spmd_pipeline=False,
        collective_matmul=True,
        workload={"remat": "none"},
    ),
    "8b cudnn on h100": train(
        "llama3-8b", "h100:8", "fsdp=8", 16, 4096, attention="cudnn", workload={"remat": "matmuls"}
    ),
    "8b cudnn ulysses on h100": train(
        "llama3-8b", "h100:16", "fsdp=4,sp=4", 16, 16_384, attention="cudnn", sp_method="ulysses"
    ),
    "deepseek-v2 cudnn on h200": train(
        "deepseek-v2", "h200:512", "dp=2,fsdp=16,ep=16", 1024, 4096, attention="cudnn", workload={"remat": "none"}
    ),
    "8b ring on h100": train(
        "llama3-8b",
        "h100:64",
        "fsdp=8,sp=8",
        8,
        131_072,
        attention="flash",
        sp_method="ring",
        workload={"remat": "none"},
    ),
    "7b fp8 on h100": train(
        "llama2-7b", "h100:32", "fsdp=32", 64, 4096, attention="flash", matmul_dtype="fp8", num_microbatches=2
    ),
    "7b gpipe lockstep on h100": train(
        "llama2-7b", "h100:8", "tp=2,pp=4", 16, 2048, num_microbatches=8, schedule="gpipe", dropout=0.1
    ),
    "gpt3 megatron on a100": train(
        "gpt3-175b",
        "a100-80gb:1024",
        "dp=16,tp=8,pp=8",
        1536,
        2048,
        num_microbatches=96,
        virtual_stages=2,
        search=SEARCH,
        **MEGATRON,
    ),
    "gpt3 gpipe of its own programs on a100": train(
        "gpt3-175b",
        "a100-80gb:384",
        "tp=8,pp=48",
        48,
        2048,
        num_microbatches=48,
        schedule="gpipe",
        workload={"param_dtype": "bf16"},
        master_weights=True,
        **MEGATRON,
    ),
    "gpt3 DeepSpeed ZeRO-3 on a100": train(
        "gpt3-175b", "a100-80gb:384", "fsdp=384", 1536, 2048, num_microbatches=4, dropout=0.1, **DEEPSPEED
    ),
    "neox parallel blocks on a100": train(
        "gpt-neox-20b",
        "a100-40gb:96",
        "dp=6,fsdp=2,tp=2,pp=4",
        1536,
        2048,
        num_microbatches=32,
        spmd_pipeline=False,
        zero_stage=0,
        workload={"remat": "attention"},
    ),
    "bloom alibi on a100": train(
        "bloom-176b",
        "a100-80gb:384",
        "fsdp=8,tp=4,pp=12",
        2048,
        2048,
        num_microbatches=128,
        spmd_pipeline=False,
        zero_stage=1,
        dropout=0.1,
    ),
    "7b ZeRO-2 on a100": train(
        "llama2-7b", "a100-40gb:64", "dp=2,fsdp=32", 256, 4096, attention="flash", zero_stage=2, num_microbatches=2
    ),
    "13b ZeRO-0 with sgd on a100": train(
        "llama2-13b", "a100-80gb:32", "dp=8,fsdp=2,tp=2", 128, 2048, zero_stage=0, optimizer="sgd"
    ),
    "qwen3 uneven stages on a100": train(
        "qwen3-8b", "a100-80gb:40", "dp=8,pp=5", 80, 4096, attention="flash", num_microbatches=10
    ),
    "7b float32 with gradients in bf16 on a100": train(
        "llama2-7b",
        "a100-80gb:64",
        "dp=8,fsdp=8",
        256,
        2048,
        attention="flash",
        gradient_dtype="bf16",
        num_microbatches=2,
        workload={"compute_dtype": "f32"},
    ),
    "7b narrow parameters with wide moments on a100": train(
        "llama2-7b",
        "a100-80gb:32",
        "dp=4,fsdp=8",
        128,
        4096,
        attention="flash",
        moment_dtype="f32",
        zero_stage=1,
        workload={"param_dtype": "bf16"},
    ),
    "8b on b200": train("llama3-8b", "b200:16", "fsdp=8,tp=2", 64, 8192, attention="flash", optimizer="adafactor"),
    "70b on gb200": train("llama3-70b", "gb200-nvl72:128", "fsdp=64,tp=2", 256, 8192, attention="flash"),
}

EXPERTS = {
    "mixtral ep on v5p": train(
        "mixtral-8x7b", "v5p:4x4x8", "fsdp=4,tp=4,ep=8", 512, 4096, attention="flash", search=SEARCH
    ),
    "mixtral without ep on h100": train(
        "mixtral-8x7b", "h100:128", "fsdp=32,tp=4", 256, 8192, attention="flash", workload={"remat": "attention"}
    ),
    "mixtral ep on h100": train(
        "mixtral-8x7b", "h100:64", "dp=2,fsdp=2,tp=2,ep=8", 128, 4096, attention="flash", num_microbatches=2
    ),
    "mixtral capacity on v5e": train(
        "mixtral-8x7b",
        "v5e:8x16",
        "fsdp=4,tp=4,ep=8",
        256,
        4096,
        changes={"experts": {"capacity_factor": 1.25}},
        workload={"remat": "matmuls"},
    ),
    "mixtral 1f1b lockstep on v6e": train(
        "mixtral-8x7b", "v6e:8x8", "fsdp=2,tp=4,ep=4,pp=2", 256, 4096, attention="flash", num_microbatches=8
    ),
    "qwen3 experts on v6e": train(
        "qwen3-30b-a3b", "v6e:8x8", "fsdp=4,sp=2,ep=8", 128, 8192, attention="flash", sp_method="ring"
    ),
    "qwen3 experts on h100": train(
        "qwen3-30b-a3b", "h100:32", "ep=16,tp=2", 64, 4096, attention="flash", matmul_dtype="fp8", search=SEARCH
    ),
    "deepseek-v2 on h100": train(
        "deepseek-v2", "h100:512", "dp=2,fsdp=16,ep=16", 1024, 4096, attention="flash", workload={"remat": "none"}
    ),
    "deepseek-v2 lockstep on v5p": train(
        "deepseek-v2", "v5p:8x8x8", "fsdp=8,tp=4,ep=8,pp=2", 512, 4096, attention="flash", num_microbatches=4
    ),
    "deepseek-v3 on h100": train(
        "deepseek-v3",
        "h100:2048",
        "fsdp=2,ep=64,pp=16",
        4096,
        4096,
        attention="flash",
        num_microbatches=32,
        spmd_pipeline=False,
        workload={"param_dtype": "bf16"},
        moment_dtype="bf16",
        master_weights=True,
        matmul_dtype="fp8",
    ),
    "deepseek-v3 plain layers shared by stages on v5p": train(
        "deepseek-v3", "v5p:8x8x16", "fsdp=4,tp=4,ep=16,pp=4", 1024, 4096, attention="flash", num_microbatches=4
    ),
    "deepseek-v3 plain layers repeated by stages on v5p": train(
        "deepseek-v3", "v5p:8x8x16", "fsdp=4,tp=4,ep=16,pp=4", 256, 4096, num_microbatches=4, schedule="gpipe"
    ),
    "deepseek-v3 search of h100": train(
        "deepseek-v3", "h100:256", "fsdp=16,sp=4,ep=4", 512, 4096, attention="flash", search=SEARCH
    ),
}

ON_CPU = {
    "tiny on cpu": train("tiny", "cpu:8", "dp=2,fsdp=2,tp=2", 16, 128, search=SEARCH | RUNNABLE),
    "tiny f32 with dropout on cpu": train(
        "tiny", "cpu:8", "fsdp=2,sp=2,tp=2", 16, 128, workload={"compute_dtype": "f32"}, dropout=0.2
    ),
    "tiny interleaved with an empty slot on cpu": train(
        "tiny",
        "cpu:4",
        "dp=2,pp=2",
        16,
        32,
        changes=SMALL_DENSE,
        workload={"compute_dtype": "f32"},
        num_microbatches=4,
        virtual_stages=2,
    ),
    "tiny experts on cpu": train(
        "tiny-moe", "cpu:8", "ep=2,dp=2,sp=2", 16, 32, workload={"compute_dtype": "f32"}, num_microbatches=2
    ),
    "tiny experts with slots on cpu": train(
        "tiny-moe",
        "cpu:8",
        "ep=2,fsdp=2,tp=2",
        16,
        32,
        changes={"experts": {"capacity_factor": 4.0}},
        workload={"remat": "none"},
        search=RUNNABLE,
    ),
    "tiny shared experts over stages on cpu": train(
        "tiny-moe-shared",
        "cpu:8",
        "ep=2,fsdp=2,pp=2",
        16,
        32,
        changes={"num_layers": 6, "experts": {"num_dense_layers": 2}},
        num_microbatches=4,
        virtual_stages=2,
    ),
}

SERVING = {
    "decode 70b int8 on v5e": serve(
        "llama3-70b",
        "v5e:4x4",
        "tp=8,dp=2",
        64,
        phase="decode",
        prompt_len=8000,
        output_len=192,
        weight_dtype="int8",
        kv_dtype="int8",
        search={"search": {}, "search in 20 ms": {"latency_seconds": 0.02}},
    ),
    "decode 7b cache by batch on v5e": serve(
        "llama2-7b", "v5e:2x2", "fsdp=2,tp=2", 16, cache="batch", phase="decode", prompt_len=1984, output_len=64
    ),
    "decode 13b cache by sequence on v6e": serve(
        "llama3-8b", "v6e:4x4", "sp=2,tp=8", 32, cache="sequence", phase="decode", prompt_len=30_000, output_len=2000
    ),
    "decode mixtral on h100": serve(
        "mixtral-8x7b", "h100:8", "ep=2,tp=4", 256, phase="decode", prompt_len=2048, output_len=512
    ),
    "decode deepseek-v3 fp8 on h100": serve(
        "deepseek-v3",
        "h100:64",
        "ep=64",
        4096,
        phase="decode",
        prompt_len=4096,
        output_len=1024,
        weight_dtype="fp8",
        compute_dtype="fp8",
        search={"search in 50 ms": {"latency_seconds": 0.05}},
    ),
    "decode window on a100": serve(
        "mistral-7b", "a100-80gb:2", "tp=2", 64, phase="decode", prompt_len=16_000, output_len=1000, page_size=64
    ),
    "decode qwen on tpu7x": serve(
        "qwen3-30b-a3b", "tpu7x:2x2x1", "ep=4,tp=2", 128, phase="decode", prompt_len=1000, output_len=1000
    ),
    "prefill 70b on v5p": serve(
        "llama3-70b",
        "v5p:2x2x2",
        "tp=8",
        4,
        cache="heads",
        phase="prefill",
        prompt_len=8192,
        output_len=1,
        search={"search": {}},
    ),
    "prefill mixtral on h100": serve(
        "mixtral-8x7b", "h100:8", "ep=2,tp=4", 16, phase="prefill", prompt_len=4096, output_len=128
    ),
    "prefill latent on h100": serve(
        "deepseek-v2", "h100:16", "fsdp=2,tp=8", 8, cache="sequence", phase="prefill", prompt_len=8192, output_len=64
    ),
    "decode tiny on cpu": serve("tiny", "cpu:4", "dp=2,tp=2", 8, phase="decode", prompt_len=96, output_len=32),
}

IMAGES = {}

PUBLISHED = {"published runs": {"kind": "published", "file": "tests/data/published_runs.json"}}

CASES = DENSE_ON_TPUS | DENSE_ON_GPUS | EXPERTS | ON_CPU | SERVING | IMAGES | PUBLISHED
