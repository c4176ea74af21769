"""A published measurement, as a row of the schema that `published_runs.py` scores, in the planner's words.

What a row does not say is taken as its kind of software had it then: the rules are below, each with its reason, and
are about software, not about single rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from meshwright.description.frameworks.framework import Framework, find_framework, load_framework
from meshwright.description.hardware.chip import Chip
from meshwright.description.hardware.load import load_chip
from meshwright.description.hardware.system import System, make_system
from meshwright.description.step.attention import LatentAttention
from meshwright.description.step.legality import check_mesh
from meshwright.description.step.model import AttentionConfig, Experts, LearnedPositions, ModelConfig, Norms
from meshwright.description.step.strategy import Attention, Strategy
from meshwright.description.step.workload import Remat, Workload
from meshwright.errors import MeshwrightError
from meshwright.mesh import MeshShape
from meshwright.planning.cost.memory import step_memory

Row = Mapping[str, Any]

_PER_NODE = (
    re.compile(r"(\d+)\s*[x×]\s*(\d+) ?G"),  # 8x200Gb/s, 4 x 100 GbE, 8x200G NICs
    re.compile(r"(\d+) (?:NICs|cards|rails|links) (?:of|at) (\d+)"),
    re.compile(r"(\d+) ?Gb(?:ps|/s|it/s) ?(?:/|per |a )node"),
)
_PER_GPU = re.compile(r"(\d+) ?Gb(?:ps|/s|it/s)[^,;]* (?:per|a|/) ?GPU")
"""The network of a node, or of a GPU, in gigabits a second, as rows spell it."""

_CLOUDS = {"p5": 3200, "p4d": 400, "p4de": 400}
"""Gigabits a second of a node of AWS, by its instance (aws.amazon.com/ec2/instance-types)."""


@dataclass(frozen=True)
class Setting:
    """What ran: a workload on a mesh of a system, in some way."""

    workload: Workload
    mesh: MeshShape
    strategy: Strategy
    system: System


def read_setting(row: Row) -> Setting:
    """The setting of a row; one that the planner has no words for is a `MeshwrightError`."""
    system, mesh = read_system(row), _mesh(row)
    workload = Workload(
        model=row_model(row["model"]),
        batch=_batch(row),
        seq_len=row["seq_len"],
        remat="block",
        param_dtype=load_framework(framework_of(row, system)).param_dtype,
    )
    check_mesh(workload, replace(mesh, pp=1))
    return _first_that_fits(list(_settings(row, workload, mesh, system)))


def measured_seconds(row: Row) -> float | None:
    """The step time of a row: as it says or was derived, else from tokens a second, else from its flops; None without.

    Flops count as the row's convention says: 6 a weight and token, and 12 or (causal) 6 x layers x heads x head_dim x
    seq_len a token for scores.
    """
    measured, derived = row["measured"], row.get("derived") or {}
    for said in (measured.get("step_time_s"), derived.get("step_time_s")):
        if said:
            return float(said)
    tokens, devices = row["tokens_per_step"], row["num_devices"]
    if rate := measured.get("tokens_per_s_per_device"):
        return tokens / rate / devices
    if not (tflops := measured.get("tflops_per_device")):
        return None
    model, convention = row["model"], row.get("flops_convention") or ""
    scores = model["layers"] * model["heads"] * model["head_dim"] * row["seq_len"]
    factor = 6 if "causal half" in convention else 0 if "no attention" in convention else 12
    passes = 4 / 3 if "hfu" in convention else 1
    return passes * tokens * (6 * model["params"] + factor * scores) / (tflops * 1e12 * devices)


def model_flops_seconds(row: Row) -> float:
    """The time of a row's model flops, 6 a parameter and token and the scores, at its chip's stated peak."""
    model = row["model"]
    scores = 12 * model["layers"] * model["heads"] * model["head_dim"] * row["seq_len"]
    flops = row["tokens_per_step"] * (6 * _active(model) + scores)
    return flops / (row["num_devices"] * row["hardware"]["peak_bf16_tflops"] * 1e12)


def _active(model: Row) -> float:
    """The parameters that work on a token."""
    return (model.get("moe") or {}).get("active_params") or model["params"]


def row_model(said: Row) -> ModelConfig:
    """The model of a row; what is called GPT has norms, positions and biases as GPT-2 and GPT-3 have them."""
    gpt = {
        "norms": Norms(kind="layer", has_bias=True),
        "positions": LearnedPositions(rows=2048),
        "activation": "gelu",
    }
    attention = said.get("attention") or ""
    return ModelConfig(
        name=said["name"],
        num_layers=said["layers"],
        embed=said["d_model"],
        mlp=said["d_ff"],
        num_heads=said["heads"],
        num_kv_heads=said.get("kv_heads") or said["heads"],
        head_dim=said.get("head_dim") or said["d_model"] // said["heads"],
        vocab=said["vocab"],
        gated=said["gated_mlp"],
        tied_embeddings=bool(said["tied_embeddings"]),
        experts=_experts(said),
        parallel_blocks=said.get("parallel_blocks"),
        attention=AttentionConfig(windows=_windows(attention), latent=_latent(attention)),
        **(gpt if re.search(r"\bgpt(?!-?oss)", said["name"].lower()) else {}),
    )


def _latent(words: str) -> LatentAttention | None:
    """Latent attention as a row has it: `MLA q_lora=1536 kv_lora=512 nope=128 rope=64 v=128`."""
    if "mla" not in words.lower():
        return None
    sizes = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", words)}
    return LatentAttention(
        query_rank=sizes.get("q_lora"),
        kv_rank=sizes["kv_lora"],
        nope_head_dim=sizes["nope"],
        rope_head_dim=sizes["rope"],
        value_head_dim=sizes["v"],
    )


def _windows(words: str) -> tuple[int | None, ...]:
    """Windows as a row has them: `alternating sliding-window 128`, `5:1 sliding-window 1024`."""
    found = re.search(r"sliding[- ]window (?:of )?(\d+)", words)
    if not found:
        return (None,)
    ratio = re.search(r"(\d+):1", words)
    count = int(ratio[1]) if ratio else 1
    return (int(found[1]),) * count + ((None,) if ratio or "alternating" in words else ())


def _experts(said: Row) -> Experts | None:
    """The experts of a row's model, under any of the names that are in use."""
    moe = said.get("moe")
    if not moe:
        return None
    count, active = (
        next((moe[name] for name in names if moe.get(name)), 0)
        for names in (("experts", "num_experts", "n_experts"), ("active", "top_k", "num_active", "experts_per_token"))
    )
    shared = moe.get("shared_experts") or 0
    width = moe.get("d_ff") or moe.get("expert_d_ff") or said["d_ff"]
    dense = moe.get("dense_layers") or 0
    if (every := moe.get("every") or 1) > 1:  # Experts in every n-th layer cost what they cost in a row.
        dense = said["layers"] - said["layers"] // every
    return Experts(count=count, num_active=active, mlp=width, shared_mlp=shared * width, num_dense_layers=dense)


def _mesh(row: Row) -> MeshShape:
    """The mesh of a row; what ZeRO shards over is fsdp, by whatever name the row has it."""
    said = row["parallelism"]
    dp, fsdp, tp, sp, pp, ep = (said.get(name) or 1 for name in ("dp", "fsdp", "tp", "cp", "pp", "ep"))
    if said.get("zero_stage") and fsdp == 1:
        dp, fsdp = 1, dp
    mesh = MeshShape(dp=dp, fsdp=fsdp, tp=tp, sp=sp, pp=pp, ep=ep)
    if mesh.ep > 1 and mesh.num_devices == _num_devices(row) * mesh.ep:
        # Experts over devices that are counted as data parallel already.
        axis = "fsdp" if mesh.fsdp % mesh.ep == 0 else "dp"
        mesh = replace(mesh, **{axis: mesh.degree(axis) // mesh.ep})
    if mesh.num_devices != _num_devices(row):
        raise MeshwrightError(f"its mesh {mesh} has {mesh.num_devices} devices, not {_num_devices(row)}")
    return mesh


def _num_devices(row: Row) -> int:
    """The devices of a row as JAX counts them: a chip of TPU7x has two."""
    return row["num_devices"] * (row["hardware"].get("jax_devices_per_chip") or 1)


def read_system(row: Row) -> System:
    """The chips of a row; where replicas are joined by the data-centre network, a slice each."""
    said = row["hardware"]
    name = said["chip"].lower().replace("_", "-").removeprefix("tpu").strip("- ")
    chip = load_chip(name.removesuffix("-sxm").replace("-hbm2e", ""))
    slices = 1
    if chip.levels and (gigabits := node_gigabits(row, chip.chips_per_host)):
        chip = _with_network(chip, gigabits * 1e9 / 8)
    if chip.torus:
        dp, most = row["parallelism"].get("dp") or 1, 1
        for size in chip.torus.max_slice:
            most *= size
        slices = dp if "DCN" in (said.get("interconnect") or "") else -(-row["num_devices"] // most)
    chips = _num_devices(row) // chip.devices_per_chip
    return make_system(chip, (chips // slices,), num_slices=slices)


def node_gigabits(row: Row, gpus: int) -> float | None:
    """The network of a row's node of `gpus` GPUs in gigabits a second; None where the row does not say it."""
    words = row["hardware"].get("interconnect") or ""
    for pattern in _PER_NODE:
        if found := pattern.search(words):
            return math.prod(map(float, found.groups()))
    if found := _PER_GPU.search(words):
        return gpus * float(found[1])
    instance = re.search(r"\bp\d\w*", words)
    return _CLOUDS.get(instance[0]) if instance else None


def defaults(row: Row) -> tuple[str, ...]:
    """What a row does not say, so that the rules of this file choose it."""
    if row["kind"] != "train":
        return ()
    said, system = row["parallelism"], read_system(row)
    is_interleaved = "interleaved" in (said.get("pp_schedule") or "")
    found = {
        "framework": find_framework(*_texts(row)) is None,
        "network": bool(system.chip.levels) and node_gigabits(row, system.chip.chips_per_host) is None,
        "remat": "unknown" in (row.get("remat") or "unknown"),
        "microbatches": not row.get("micro_batch"),
        "virtual stages": is_interleaved and not said.get("virtual_stages"),
        "inferred by the table": bool(row.get("inferred_fields")),
    }
    return tuple(name for name, is_taken in found.items() if is_taken)


def _with_network(chip: Chip, node_bytes_per_second: float) -> Chip:
    """The chip in nodes with other network cards; all levels above the node change alike."""
    node, *rest = chip.levels
    factor = node_bytes_per_second / rest[0].link_bytes_per_second
    slower = [replace(level, link_bytes_per_second=factor * level.link_bytes_per_second) for level in rest]
    return replace(chip, levels=(node, *slower))


def _settings(row: Row, workload: Workload, mesh: MeshShape, system: System) -> Iterator[Setting]:
    """The settings that a row may mean, those with least recomputation and largest microbatches first."""
    framework = load_framework(framework_of(row, system))
    base, saved = _strategy(row, mesh, system), _saved_values(row, framework)
    for remat in _remats(row, framework, saved):
        strategy = base
        if remat == "named":
            strategy = replace(base, profile=replace(base.profile, saved_values=saved))
        for parts in _microbatches(row, mesh, base):
            yield Setting(replace(workload, remat=remat), mesh, replace(strategy, num_microbatches=parts), system)


def _first_that_fits(settings: list[Setting]) -> Setting:
    """The first setting that fits in memory; where none does, the last, which wants least."""
    for setting in settings[:-1]:
        wanted = step_memory(setting.workload, setting.mesh, setting.strategy, kind=setting.system.chip.kind)["peak"]
        if wanted <= setting.system.usable_bytes:
            return setting
    return settings[-1]


def _remats(row: Row, framework: Framework, saved: tuple[str, ...]) -> tuple[Remat, ...]:
    """The policies that a row's words may mean, least recomputation first.

    Pax's own configurations (github.com/google/paxml, contrib/gpu/scripts_gpu/configs.py) keep products in GPT5B and
    nothing elsewhere, its default.
    """
    words = (row.get("remat") or "unknown").lower()
    if named := next((policy for word, policy in framework.remat.items() if word in words), None):
        return (named,)
    if saved:
        return ("named",)
    if "none likely" in words or "default off" in words:
        return ("none",)
    if "unknown" in words and "pax" in row["id"].lower() and "gpt" in row["model"]["name"].lower():
        return ("matmuls",) if "5B" in row["model"]["name"].split() else ("block",)
    if "unknown" in words:
        return ("none", "matmuls", "block")
    if "full" in words:
        return ("block",)
    if words.startswith("none"):
        return ("none",)
    return ("matmuls",)


def _saved_values(row: Row, framework: Framework) -> tuple[str, ...]:
    """The values that a row's policy saves or offloads by name, as in `save q,k,v; offload context; recompute MLP`."""
    parts = re.split(r"[;(]", (row.get("remat") or "").lower())
    words = [word for part in parts if "recompute" not in part for word in re.findall(r"[a-z_0-9]+", part)]
    return tuple(dict.fromkeys(value for word in words for value in framework.saved.get(word, "").split()))


def _microbatches(row: Row, mesh: MeshShape, base: Strategy) -> list[int]:
    """The numbers of microbatches that a row may mean.

    A size that times all devices is the batch is JAX's batch a device, which is not cut. A pipeline without one runs
    sequence by sequence, which keeps its bubble and its memory smallest; torchtitan cuts as often as there are stages,
    unless told otherwise (torchtitan/parallelisms/pipelining_utils.py).
    """
    batch = _batch(row)
    local = max(1, batch // mesh.degree(("dp", "fsdp", "ep")))
    if size := row.get("micro_batch"):
        return [1 if mesh.pp == 1 and size * _num_devices(row) == batch else max(1, local // size)]
    if mesh.pp > 1:
        return [min(local, mesh.pp * base.virtual_stages) if _is_torchtitan(row) else local]
    return [parts for parts in range(1, local + 1) if local % parts == 0]


def _batch(row: Row) -> int:
    """The sequences of a row's step."""
    return row.get("global_batch_sequences") or round(row["tokens_per_step"] / row["seq_len"])


def _strategy(row: Row, mesh: MeshShape, system: System) -> Strategy:
    """How the software of a row ran a step."""
    said, name = row["parallelism"], framework_of(row, system)
    framework = load_framework(name)
    words = _words(row)
    fields: dict[str, Any] = dict(framework.strategy)
    if said.get("sp"):
        fields["tp_stream"] = "split"
    if system.chip.kind == "tpu" or "asynctp" in f"{row['id']} {row.get('dtype')}".lower():
        # XLA sends what a product on a TPU needs from its neighbours in chunks beside it (Wang et al., ASPLOS 2023,
        # doi.org/10.1145/3567955.3567959); MaxText's scripts ask for more (`xla_tpu_overlap_compute_collective_tc`).
        fields["collective_matmul"] = True
    profile = framework.profile
    if name == "torchtitan":
        # torchtitan compiles its loss in 2025 (torchtitan/components/loss.py), not yet in its report of December 2024;
        # over a split vocab handlers run op by op (torch/distributed/tensor/parallel/loss.py).
        profile = replace(profile, fused_loss=not ("_202412_" in words or mesh.tp > 1))
    if "eager" in words:
        profile = replace(profile, fused_elementwise=False)
    schedule = (said.get("pp_schedule") or "").lower()
    if stated := re.search(r"\bvp\s*=\s*(\d+)", schedule):  # As in: README lists no VP, the preset uses VP=12.
        said = {"virtual_stages": int(stated[1]), **{k: v for k, v in said.items() if v}}
    return Strategy(
        zero_stage=min(said.get("zero_stage") or 0, framework.most_zero_stage_with_pp if mesh.pp > 1 else 3),  # pyright: ignore[reportArgumentType]
        schedule="gpipe" if "gpipe" in schedule else "1f1b",
        virtual_stages=_virtual_stages(row, said, mesh, schedule, framework),
        attention=_attention(words, system, framework),
        matmul_dtype="fp8" if "fp8" in words or "float8" in words else "int8" if "int8" in words else None,
        profile=profile,
        **fields,
    )


def _words(row: Row) -> str:
    """What a row says of its software, in lower case."""
    return " ".join(str(row.get(key) or "") for key in ("id", "source", "dtype", "remat", "notes")).lower()


def _texts(row: Row) -> tuple[str, ...]:
    """The texts of a row that may name its framework, the surest first."""
    return row["id"], str(row.get("dtype")), str(row["source"]), str(row.get("notes"))


def framework_of(row: Row, system: System) -> str:
    """The framework of a row by what it is called, then by its source, then by its other words."""
    return find_framework(*_texts(row)) or ("maxtext" if system.chip.kind == "tpu" else "fsdp")


def _is_torchtitan(row: Row) -> bool:
    """Whether torchtitan ran a row."""
    return "torchtitan" in f"{row['id']} {row['source']}".lower()


def _virtual_stages(row: Row, said: Row, mesh: MeshShape, schedule: str, framework: Framework) -> int:
    """The virtual stages; of an interleaved schedule without a number those that share the layers evenly.

    Two, where layers cannot be shared evenly at all.
    """
    if stages := said.get("virtual_stages"):
        return int(stages)
    each, rest = divmod(row["model"]["layers"], mesh.pp)
    even = [count for count in range(2, each + 1) if each % count == 0]
    if (schedule and "interleaved" not in schedule) or (not schedule and framework.virtual_stages == "fewest"):
        return 1
    return 2 if rest else 1 if not even else even[0] if framework.virtual_stages == "fewest" else even[-1]


def _attention(words: str, system: System, framework: Framework) -> Attention:
    """Where attention ran: a fused kernel by name, or as all have it who came after FlashAttention (2022)."""
    is_fused = re.search(r"(?<!non-)flash", words) or "te bf16" in words
    is_old = system.chip.name in ("a100-40gb", "a100-80gb", "v3", "v4")
    is_fused = is_fused or framework.always_fuses_attention or not is_old
    if "no flash" in words or not is_fused:
        return "scores"
    return framework.attention.get(system.chip.kind, "flash")
