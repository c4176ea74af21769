"""Resume a run: its config with changed settings, and a line for each change; read the parameters of a run."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from meshwright.description.step.legality import check_positions, unused_options
from meshwright.description.step.padding import padded
from meshwright.description.step.parameter_tree import parameters
from meshwright.description.step.strategy import DEFAULT
from meshwright.description.step.workload import Dtype, Workload
from meshwright.errors import MeshwrightError
from meshwright.execution.models.adapters import merge_adapters
from meshwright.execution.models.quantised.weights import plain
from meshwright.execution.runtime.arrays import DTYPES, abstract, abstract_for_inference
from meshwright.execution.runtime.sharding_context import ShardingContext
from meshwright.execution.training.preference.loss import check_preference_options
from meshwright.execution.training.run_directory.begun_with import check_begun_with
from meshwright.execution.training.run_directory.checkpoint import Checkpoints, Note
from meshwright.execution.training.run_directory.compatible import OF_KIND, check_allowed, config_differences
from meshwright.execution.training.run_directory.frozen import abstract_parts, with_frozen
from meshwright.execution.training.run_directory.run import RunConfig, read_config
from meshwright.execution.training.settings import as_texts, get_setting, with_settings
from meshwright.execution.training.slots import in_order, move_to_stage_layout
from meshwright.execution.training.update.optimizer import check_optimizer_options
from meshwright.mesh import MeshShape
from meshwright.options.given import given
from meshwright.options.keywords import TrainOptions
from meshwright.options.training import SETTINGS
from meshwright.options.values import Count, read_count, read_mesh, read_system
from meshwright.planning.library import PlanLike
from meshwright.planning.options import LORA_OPTIONS, STRATEGY_OPTIONS, read_adapters, read_names, read_strategy

SHAPES = ("num_layers", *OF_KIND)
"""Options that determine the shapes and dtypes of a checkpoint's arrays."""

FROZEN = (*LORA_OPTIONS, "freeze", "quantize_base")
"""Options that determine which arrays a checkpoint has."""

REFERENCES = ("objective", "reference")
"""Options that determine the stored reference model (`training.preference.reference`)."""


def resumed_run(
    directory: Path,
    *,
    steps: Count | None,
    change: bool,
    options: Mapping[str, Any],
    what: PlanLike | None = None,
    allow: Collection[str] = (),
) -> tuple[RunConfig, list[str]]:
    """Return the config of a resumed run, and a line for each changed setting.

    Steps, hardware, mesh and the settings whose `Setting.resume` is "free" can always change. Other changes are errors
    unless `change` is true; settings that checkpoints depend on never change, except as `allow` says. An option with
    the run's own value is not a change.

    Args:
        steps: total number of steps; None for the run's own.
        change: whether settings may change.
        options: the options of the command, by name.
        what: the model or plan with which the run must have been started; None to skip this check.
        allow: kinds of checkpoint differences to accept (`compatible.ALLOWED`).
    """
    said = given(options, ("from_scratch", *TrainOptions.__annotations__))
    before = read_config(directory)
    for name in ("data", "eval_data", "eval_tasks"):
        if name in said:
            said[name] = before.data.relative(as_texts(said[name]))
    if what is not None:
        said = check_begun_with(what, said, before, directory)
    if said.get("packed") and before.data.rows is not None:  # In a run, `rows` determines this.
        del said["packed"]
        said.setdefault("rows", "packed")
    never = {"from_scratch", *(name for name, setting in SETTINGS.items() if setting.resume == "never")}
    if of_new := [name for name in said if name in never]:
        raise MeshwrightError(
            f"--{of_new[0].replace('_', '-')} is for a new run; a run that continues has its parameters, leave it out"
        )
    if said.get("remat") == "auto":
        raise MeshwrightError(
            "remat auto is for a new run, where the planner chooses; a run that continues has its own"
        )
    system = read_system(
        said.pop("on", before.hardware),
        said.pop("hardware", before.hardware_file),
        said.pop("memory_headroom", before.memory_headroom),
    )
    mesh, asked_mesh = before.mesh, said.pop("mesh", None)
    if asked_mesh is not None or str(system) != before.hardware:
        mesh = read_mesh(asked_mesh or "dp=1,fsdp=-1", system.num_devices)
    free = {name: said.pop(name) for name in [*said] if name in SETTINGS and SETTINGS[name].resume == "free"}
    check_preference_options({*said, *free}, before.workload)
    lines = _change(said, before, directory, num_devices=mesh.num_devices, is_allowed=change, allow=allow)
    config = replace(
        _with(said | free, before, mesh.num_devices),
        hardware=str(system),
        hardware_file=system.chip.file,
        memory_headroom=system.memory_headroom,
        mesh=mesh,
    )
    check_optimizer_options(config.optimizer, {*said, *free}, config.strategy, config.workload.model)
    idle = unused_options(config.workload, mesh, config.strategy)
    lines += [
        f"{name}={getattr(config.strategy, name)!r} is left out on {mesh}: {reason}" for name, reason in idle.items()
    ]
    config = replace(config, strategy=replace(config.strategy, **{name: getattr(DEFAULT, name) for name in idle}))
    config, more = _with_end(config, directory, None if steps is None else read_count("steps", steps))
    return config, lines + more


def _change(
    options: Mapping[str, Any],
    before: RunConfig,
    directory: Path,
    *,
    num_devices: int,
    is_allowed: bool,
    allow: Collection[str],
) -> list[str]:
    """Return a line for each changed setting; raise one `MeshwrightError` that lists all changes that are not allowed.

    Args:
        options: the options of the command, by name.
        before: the config of the run.
        num_devices: number of devices of the resumed run.
        is_allowed: whether settings that checkpoints do not depend on may change.
        allow: kinds of checkpoint differences to accept (`compatible.ALLOWED`).
    """
    after, lines, refused = _with(options, before, num_devices), [], []
    for name in options:
        old, new = option_value(name, before), option_value(name, after)
        if old == new:
            continue
        if (kind := OF_KIND.get(name)) in allow:
            lines.append(f"{name}: {new!r} instead of {old!r}")
            continue
        # Frozen weights are stored in the compute dtype.
        is_shape = name in (*SHAPES, *FROZEN) or (name == "dtype" and before.workload.frozen_paths)
        if is_shape or name in REFERENCES:
            made = "the checkpoints of {} were made" if is_shape else "{} was begun"
            hint = f"--allow {kind} continues with the new value" if kind else "only a new run can have another"
            refused.append(f"{name} is {new!r}; {made.format(directory)} with {old!r}, and {hint}")
        elif not is_allowed:
            hint = "--change (change=True) continues with the new value"
            refused.append(f"{name} is {new!r}; {directory} was begun with {old!r}: {hint}")
        lines.append(f"{name}: {new!r} instead of {old!r}")
    if refused:
        raise MeshwrightError("; ".join(refused))
    return lines


def option_value(name: str, config: RunConfig) -> Any:
    """Return the value in a config of the option called `name`."""
    if name in SETTINGS:
        return get_setting(config, name)
    workload = config.workload
    if name == "batch_tokens":
        return workload.tokens
    if name == "num_layers":
        return workload.config.num_layers
    if name in STRATEGY_OPTIONS:
        value = getattr(config.strategy, name)
        return str(value) if isinstance(value, MeshShape) else value
    if name == "freeze":
        return workload.frozen
    if name in LORA_OPTIONS:
        return getattr(workload.config.lora, name.removeprefix("lora_"), None)
    return getattr(workload, "compute_dtype" if name == "dtype" else name)


def _with(options: Mapping[str, Any], before: RunConfig, num_devices: int) -> RunConfig:
    """Return the config `before` with the values of `options`. num_devices: number of devices of the resumed run."""
    workload = _workload(options, before.workload)
    strategy = {name: value for name, value in options.items() if name in STRATEGY_OPTIONS}
    fields = read_strategy(strategy, num_devices)
    if fields.get("sp_method", "gather") != "gather":
        fields.setdefault("attention", "flash")
    config = replace(before, workload=workload, strategy=replace(before.strategy, **fields))
    return with_settings(config, {name: value for name, value in options.items() if name in SETTINGS})


def _workload(options: Mapping[str, Any], before: Workload) -> Workload:
    """Return the workload `before` with the values of `options`."""
    if "batch" in options and "batch_tokens" in options:
        raise MeshwrightError("--batch and --batch-tokens say the same thing; leave one out")
    counts = {
        name: read_count(name, options[name])
        for name in ("batch", "batch_tokens", "seq_len", "num_layers")
        if name in options
    }
    seq_len = counts.get("seq_len", before.seq_len)
    check_positions(before.model, seq_len)
    batch = counts.get("batch", before.batch)
    each = seq_len * before.sequences // before.batch
    if (tokens := counts.get("batch_tokens", batch * each)) % each:
        raise MeshwrightError(f"batch_tokens is {tokens}, not a multiple of {each}")
    model = replace(before.config, num_layers=counts["num_layers"]) if "num_layers" in counts else before.config
    if adapters := {name: options[name] for name in LORA_OPTIONS if name in options}:
        own = {f"lora_{name}": value for name, value in vars(model.lora).items()} if model.lora else {}
        model = read_adapters(replace(model, lora=None), own | adapters)
    return replace(
        before,
        model=model,
        frozen=read_names(options["freeze"]) if "freeze" in options else before.frozen,
        batch=tokens // each,
        seq_len=seq_len,
        compute_dtype=options.get("dtype", before.compute_dtype),
        param_dtype=options.get("param_dtype", before.param_dtype),
        remat=options.get("remat", before.remat),
        packed=options.get("packed", before.packed),
        quantize_base=options.get("quantize_base", before.quantize_base),
        z_loss=options.get("z_loss", before.z_loss),
        objective=options.get("objective", before.objective),
        reference=options.get("reference", before.reference),
    )


def _with_end(config: RunConfig, directory: Path, steps: int | None) -> tuple[RunConfig, list[str]]:
    """Return the config with a new number of steps, and lines on its effect on the learning-rate schedule.

    If the schedule would end before these steps, it is stretched. Otherwise all steps after its end would run at its
    final rate, by default a tenth of the peak.
    """
    taken = Checkpoints(directory).latest or 0
    if steps is None or steps == config.steps or steps <= taken:
        return config if steps is None else replace(config, steps=steps), []
    optimizer, ends = config.optimizer, config.optimizer.end
    config = replace(config, steps=steps)
    if steps < ends:
        rate = f"{optimizer.rate(steps):.3g}"
        return config, [
            f"stops at step {steps}; the schedule of the learning rate still ends at {ends}, it is {rate} there"
        ]
    if steps == ends:
        return config, []
    stretched = replace(optimizer, decay_steps=steps)
    line = f"the schedule of the learning rate is stretched from {ends} to {steps} steps, where it ends"
    if (rate := f"{stretched.rate(taken):.3g}") != (before := f"{optimizer.rate(taken):.3g}"):
        line += f": at step {taken} the rate is {rate} instead of {before}"
    return replace(config, optimizer=stretched), [line]


def restore_params(
    directory: Path, config: RunConfig, mesh_shape: MeshShape, mesh: Mesh, on_note: Note, *, dtype: Dtype
) -> Any:
    """Return the parameters of the last complete checkpoint of a run, for inference on a mesh without stages.

    Adapters are merged into their weights. Frozen parameters are read or initialised as in the run. Call under
    `jax.set_mesh`.

    Raises:
        MeshwrightError: the run has no checkpoint, or it is of another model.
    """
    checkpoints, step = _last_checkpoint(directory, config, on_note)
    model, layout = config.workload.config, ShardingContext(mesh_shape)
    saved = in_order(layout, model, DEFAULT)
    wanted: Any = {"params": abstract_for_inference(parameters(model), mesh, saved, dtype)}
    if not config.workload.frozen_paths:
        params = checkpoints.restore(step, wanted)["params"]
    else:
        found = checkpoints.restore(step, abstract_parts(config, wanted, mesh))
        params = with_frozen(config, found, layout, mesh, DEFAULT)["params"]
        if config.workload.quantize_base is not None:
            params = jax.jit(lambda params: plain(params, DTYPES[dtype]))(params)
        params = jax.tree.map(lambda array, to: array.astype(to.dtype), params, wanted["params"])
    if saved != layout:
        stored = padded(model, mesh_shape, layout.rules)
        to = abstract_for_inference(parameters(stored), mesh, layout, dtype)
        params = move_to_stage_layout(params, to, model, layout, DEFAULT)
    return jax.jit(lambda params: merge_adapters(params, model))(params) if config.workload.frozen_paths else params


def restore_adapters(directory: Path, config: RunConfig, mesh: Mesh, on_note: Note) -> Any:
    """Return the adapters of the last complete checkpoint of a run, in float32. Call under `jax.set_mesh`."""
    checkpoints, step = _last_checkpoint(directory, config, on_note)
    layout, model = ShardingContext(MeshShape()), config.workload.config
    wanted: Any = {"params": abstract(parameters(model), mesh, layout, "f32")}
    parts = abstract_parts(config, wanted, mesh)
    return checkpoints.restore(step, {"params": parts["params"]})["params"]


def _last_checkpoint(directory: Path, config: RunConfig, on_note: Note) -> tuple[Checkpoints, int]:
    """Return a run's checkpoints and the step of the last complete one.

    Raises:
        MeshwrightError: there is none, or it is of another model.
    """
    checkpoints = Checkpoints(directory)
    if (step := checkpoints.whole(on_note, parts=("params", "frozen"))) is None:
        resume = f"meshwright train {shlex.quote(str(directory))} --resume"
        raise MeshwrightError(f"{directory} has no checkpoint yet; `{resume}` makes one")
    check_allowed(
        config_differences(config, checkpoints.config(step)), (), f"checkpoint {step} of {directory} is another model's"
    )
    return checkpoints, step
