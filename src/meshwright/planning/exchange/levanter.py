"""Read and write settings of Levanter, whose mesh has replicas, a model axis, and FSDP over the remaining devices."""

from __future__ import annotations

from typing import Any

from meshwright.description.hardware.system import System
from meshwright.errors import MeshwrightError
from meshwright.planning.exchange.settings import Settings

_DTYPES = {"f32": "f32", "float32": "f32", "bf16": "bf16", "bfloat16": "bf16"}


def read_sizes(settings: Settings) -> None:
    """Set the field `head_dim`, which Levanter computes from embed and num_heads."""
    fields = settings.fields
    if "model.embed" in fields and fields.get("model.num_heads", 0) > 0:
        fields["model.head_dim"] = fields["model.embed"] // fields["model.num_heads"]


def read(settings: Settings) -> None:
    """Set the fields of the mesh, the microbatches, the sequence length and the dtypes from the options."""
    _read_mesh(settings)
    # The dtypes: a jmp policy, such as `p=f32,c=bfloat16`.
    option = "trainer.mp"
    policy = settings.text(option, "f32")
    parts = {"p": policy, "c": policy}
    if "=" in policy:
        parts = {part.partition("=")[0]: part.partition("=")[2] for part in policy.split(",")}
    stored, used = (_DTYPES.get(parts.get(key, ""), "") for key in ("p", "c"))
    if not stored or not used:
        raise settings.refusal(option, f"is {policy!r}; it is read as p=f32,c=bfloat16, of {', '.join(_DTYPES)}")
    settings.fields |= {"param_dtype": stored, "compute_dtype": used}
    settings.means(option, policy, f"param_dtype={stored}, dtype={used}")
    fields = settings.fields
    length = settings.whole("model.seq_len", 2048)
    fields["seq_len"] = settings.whole("train_seq_len", length)
    settings.means("train_seq_len", fields["seq_len"], f"seq_len={fields['seq_len']}")
    per_device = settings.whole("trainer.per_device_parallelism", -1)
    fields["num_microbatches"] = 1
    if per_device > 0:
        devices = fields["dp"] * fields["fsdp"]
        count = settings.quotient("the batch over the sequences at once", fields["batch"], per_device * devices)
        fields["num_microbatches"] = count
        settings.means("trainer.per_device_parallelism", per_device, f"num_microbatches={count}")


def _read_mesh(settings: Settings) -> None:
    """Set the degrees dp, fsdp and tp from the options. fsdp takes the devices that replicas and tp leave."""
    system, fields = settings.system, settings.fields
    replicas = settings.whole("trainer.replica_ici_axis_size", 1)
    across = settings.whole("trainer.replica_dcn_axis_size", 1)
    model = settings.whole("trainer.model_axis_size", 1)
    split = settings.names("trainer.tensor_parallel_axes")
    if model > 1 and set(split) != {"mlp", "heads"}:
        raise settings.refusal("trainer.tensor_parallel_axes", f"is {split}; [mlp, heads] is read, the dims of tp here")
    if settings.text("trainer.fsdp_axis", "embed") != "embed":
        raise settings.refusal("trainer.fsdp_axis", "is another than embed, which fsdp splits here")
    within = settings.quotient("devices of a slice", system.num_devices // system.num_slices, replicas * model)
    slices = settings.quotient("slices over replicas", system.num_slices, across)
    if slices > 1 and replicas > 1:
        raise settings.refusal("trainer.replica_ici_axis_size", "beside shards across slices; dp is the outermost here")
    fields |= {"dp": replicas * across, "fsdp": within * slices, "tp": model}
    settings.means(
        "trainer.replica_ici_axis_size", replicas, f"dp={fields['dp']}, and fsdp={fields['fsdp']} of the rest"
    )
    settings.means("trainer.replica_dcn_axis_size", across, f"dp={fields['dp']}")
    settings.means("trainer.model_axis_size", model, f"tp={model}")


def write(fields: dict[str, Any], system: System) -> dict[str, Any]:
    """Return the options of the mesh, the microbatches, the sequence length and the dtypes, from a plan's fields.

    Raises:
        MeshwrightError: the plan splits over sp, ep or pp, for which Levanter has no axis.
    """
    for axis in ("sp", "ep", "pp"):
        if fields[axis] > 1:
            raise MeshwrightError(f"Levanter has no axis for {axis}={fields[axis]}; it has dp, fsdp and tp")
    words = {"f32": "f32", "bf16": "bfloat16"}
    across = system.num_slices if fields["dp"] % system.num_slices == 0 else 1
    options = {
        "trainer.mp": f"p={words[fields['param_dtype']]},c={words[fields['compute_dtype']]}",
        "trainer.replica_ici_axis_size": fields["dp"] // across,
        "trainer.replica_dcn_axis_size": across,
        "trainer.model_axis_size": fields["tp"],
        "train_seq_len": fields["seq_len"],
        "model.seq_len": fields["seq_len"],
    }
    if fields["tp"] > 1:
        options["trainer.tensor_parallel_axes"] = ["mlp", "heads"]
    shards = fields["dp"] * fields["fsdp"] * fields["num_microbatches"]
    options["trainer.per_device_parallelism"] = fields["batch"] // shards
    return options
