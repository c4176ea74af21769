"""LoRA target names (PEFT module names, or meshwright's names of matmuls), and PEFT's `adapter_config.json`."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.description.families.family import LLAMA_NAMES, Published
from meshwright.description.families.registry import published_of
from meshwright.description.step.blocks import program
from meshwright.description.step.lora import EMBEDDING, UNEMBEDDING, LoRA, adaptable
from meshwright.description.step.model import ModelConfig
from meshwright.errors import MeshwrightError, did_you_mean

ALL_LINEAR = "all-linear"
"""PEFT's name for every matmul that can have an adapter.

QLoRA needs adapters on all of them to match full training (arXiv:2305.14314, section 4).
"""


ADAPTER_CONFIG = "adapter_config.json"
"""The file in which PEFT describes an adapter."""

UNSUPPORTED = (
    "use_qalora", "lora_bias", "bias", "modules_to_save", "target_parameters", "trainable_token_indices",
    "alora_invocation_tokens", "arrow_config", "layer_replication", "kasa_config", "velora_config", "use_bdlora",
    "monteclora_config",
)  # fmt: skip
"""PEFT LoRA options that change what is computed; adapters with them are refused."""


def with_adapters(
    model: ModelConfig,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = (ALL_LINEAR,),
    dropout: float = 0.0,
    dora: bool = False,
) -> ModelConfig:
    """Return the model with low-rank adapters on some of its matmuls.

    Args:
        model: the model without adapters.
        rank, alpha: matmuls compute W x + alpha / rank * B A x. The default alpha is 2 * rank, as in torchtune's
            recipes.
        targets: names of matmuls, as in `lora_targets`.
        dropout: probability of dropping an element of the adapters' input in training.
        dora: whether outputs have trained magnitudes (`LoRA.dora`).
    """
    alpha = float(2 * rank if alpha is None else alpha)
    lora = LoRA(rank=rank, alpha=alpha, targets=lora_targets(model, targets), dropout=dropout, dora=dora)
    return replace(model, lora=lora)


def with_adapter_slots(model: ModelConfig, *, slots: int, rank: int, ends: Sequence[str] = ()) -> ModelConfig:
    """Return the model with slots for several adapters beside every matmul of its layers that can have one.

    In a server's step each row uses the adapter in one slot, or none.

    Args:
        model: the model without adapters.
        slots: the number of slots; for 0 the model is returned unchanged.
        rank: the largest rank of an adapter; adapters of smaller rank are padded with zeros.
        ends: `EMBEDDING`, `UNEMBEDDING` or both, to have slots there too.
    """
    if not slots:
        return model
    # Adapters of different scales share the slots, so that each B is multiplied by its scale when it is read.
    targets = lora_targets(model, (ALL_LINEAR, *ends))
    return replace(model, lora=LoRA(rank=rank, alpha=rank, targets=targets, slots=slots))


def lora_targets(model: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """Return meshwright's names of the matmuls that `names` selects, in layer order.

    A name is one of: a module of the family's checkpoints (q_proj; c_attn, which holds several matmuls); a module of
    Llama, if the family has none of that name; meshwright's name of a matmul (`query`); `all-linear`.

    Raises:
        MeshwrightError: a name matches nothing, or a matmul can have no adapter.
    """
    known = adaptable(program(replace(model, lora=None)))
    modules, ends = module_matmuls(model), (EMBEDDING, UNEMBEDDING)
    found: set[str] = set()
    for name in names:
        of_module = [op for path, ops in modules.items() if path == name or path.endswith(f".{name}") for op in ops]
        if name == ALL_LINEAR:
            found.update(known)
        elif of_module:
            # A module of experts may share its name with a module that can be adapted.
            found.update([op for op in of_module if op in known] or of_module[:1])
        elif name in (*known, *ends) or any(name in ops for ops in modules.values()):
            found.add(name)
        else:
            short = (path.rpartition(".")[2] for path, ops in modules.items() if set(ops) & {*known, *ends})
            choices = list(dict.fromkeys((ALL_LINEAR, *short, *known, *ends)))
            hint = did_you_mean(map(repr, difflib.get_close_matches(name, choices, n=1)))
            raise MeshwrightError(
                f"lora target {name!r} is no matmul of {model.name}; {hint}targets are {', '.join(choices)}"
            )
    order = (*known, *ends)
    return tuple(sorted(found, key=lambda op: (order.index(op) if op in order else -1, op)))


def module_matmuls(model: ModelConfig) -> dict[str, list[str]]:
    """Return the matmuls in each module of a family: {"self_attn.q_proj": ["query"], "lm_head": ["unembedding"]}.

    Llama's modules are included, except those whose name the family has too.
    """
    published = published_of(model)
    own = {name: [ours] for ours, name in end_modules(model).items()} | _matmuls_of_layer(
        published.names if published else {}
    )
    ended = {path.rpartition(".")[2] for path in own}
    llama = {LLAMA_NAMES[ours].removesuffix(".weight"): [ours] for ours in (EMBEDDING, UNEMBEDDING)}
    llama |= _matmuls_of_layer({path: Published(name) for path, name in LLAMA_NAMES.items()})
    return own | {path: ops for path, ops in llama.items() if path.rpartition(".")[2] not in ended}


def _matmuls_of_layer(names: Mapping[str, Published]) -> dict[str, list[str]]:
    """Return the matmuls in each module of a layer: {"self_attn.q_proj": ["query"]}. names: a family's weight names."""
    found: dict[str, list[str]] = {}
    for path, place in names.items():
        stack, _, op = path.rpartition(".")
        if stack and place.name.endswith(".weight") and "norm" not in op:
            module = place.name.split("{layer}.")[1].removesuffix(".weight")
            found.setdefault(module, []).append(op)
    return found


def read_adapter_config(directory: Path, model: ModelConfig, *, takes_saved: bool = False) -> LoRA:
    """Return the LoRA that a PEFT `adapter_config.json` describes.

    If modules differ in rank or scale, the result has the largest rank and the default scale; `module_scale` returns
    each module's own.

    Args:
        directory: the folder that PEFT wrote.
        model: the model that is adapted.
        takes_saved: whether to accept `modules_to_save`, fully trained modules saved with the adapter.

    Raises:
        MeshwrightError: there is no such file, or it describes another kind of adapter or has an unsupported option.
    """
    path, config = directory / ADAPTER_CONFIG, adapter_config(directory)
    for name in UNSUPPORTED:
        if config.get(name) not in (None, False, "none", [], {}) and not (takes_saved and name == "modules_to_save"):
            raise MeshwrightError(
                f"{path} has {name}={config[name]!r}, which is not read here; adapters have none of it"
            )
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or rank < 1:
        raise MeshwrightError(f"{path} has r={rank!r} and lora_alpha={alpha!r}; they are numbers above 0")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        targets = _matching_matmuls(targets, model, path)
    names = (targets,) if isinstance(targets, str) else tuple(targets or ())
    if not isinstance(dropout := config.get("lora_dropout") or 0.0, (int, float)) or not 0 <= dropout < 1:
        raise MeshwrightError(f"{path} has lora_dropout={dropout!r}; it is a share from 0 to below 1")
    modules, layers = _matmuls_by_full_name(model), range(model.num_layers)
    adapted = {
        op for module, ops in modules.items() for op in ops
        if any(is_adapted(config, module.format(layer=layer)) for layer in layers)
    }  # fmt: skip
    left_out = {op for ops in modules.values() for op in ops} - adapted
    products = tuple(op for op in lora_targets(model, names) if op not in left_out)
    if config.get("ensure_weight_tying") and model.tied_embeddings and EMBEDDING in products:
        products = (*products, UNEMBEDDING)  # PEFT writes the head's adapter without listing it as a target.
    largest, scale = rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    for module, ops in modules.items():
        if set(ops) & set(products):
            for layer in layers:
                own = module_scale(config, module.format(layer=layer))
                # `weights.peft` exports a module of n matmuls with n times the rank and the same scale.
                is_joined = own.rank == rank * len(ops) and math.isclose(own.scale, scale)
                largest = max(largest, rank if is_joined else own.rank)
    dora = bool(config.get("use_dora"))
    return LoRA(rank=largest, alpha=float(scale * largest), targets=products, dropout=float(dropout), dora=dora)


def adapter_config(directory: Path) -> dict[str, Any]:
    """Return the `adapter_config.json` of a LoRA that PEFT wrote.

    Raises:
        MeshwrightError: there is no such file, or it describes another kind of adapter.
    """
    if not directory.is_dir():
        raise MeshwrightError(
            f"there is no directory {str(directory)!r}; give one with {ADAPTER_CONFIG}, as PEFT writes"
        )
    path = directory / ADAPTER_CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MeshwrightError(f"{directory} is no adapter of PEFT: cannot read {path.name}: {error.strerror}") from None
    except ValueError:
        raise MeshwrightError(f"{path} is no JSON") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise MeshwrightError(f"{path} is no LoRA's: peft_type is {config.get('peft_type')!r}; 'LORA' is read")
    for name in ("rank_pattern", "alpha_pattern"):
        own = config.get(name) or {}
        if not isinstance(own, dict) or not all(isinstance(n, (int, float)) and n > 0 for n in own.values()):
            raise MeshwrightError(f"{path} has {name}={own!r}; it takes an object of numbers above 0")
    excluded = config.get("exclude_modules") or []
    if not isinstance(excluded, str | list) or not _is_pattern(excluded):
        raise MeshwrightError(f"{path} has exclude_modules={excluded!r}; it takes names of modules, or a pattern")
    layers = config.get("layers_to_transform")
    if not (layers is None or _is_layers(layers if isinstance(layers, list) else [layers])):
        raise MeshwrightError(f"{path} has layers_to_transform={layers!r}; it takes the number of a layer, or a list")
    return config


def _is_layers(layers: list[Any]) -> bool:
    return all(type(layer) is int and layer >= 0 for layer in layers)


def _is_pattern(words: str | list[Any]) -> bool:
    """Whether a string is a valid regular expression, or a list has only strings."""
    try:
        re.compile(words if isinstance(words, str) else "")
    except re.error:
        return False
    return all(isinstance(word, str) for word in words)


class ModuleScale(NamedTuple):
    """The rank of a module's adapter B A, and the factor that it is multiplied by."""

    rank: int
    scale: float


def module_scale(config: Mapping[str, Any], module: str) -> ModuleScale:
    """Return the rank and the scale of a module's adapter, from PEFT's `rank_pattern` and `alpha_pattern`.

    Args:
        config: result of `adapter_config`.
        module: full name, such as model.layers.0.self_attn.q_proj.
    """

    def own(name: str, default: Any) -> Any:
        patterns = config.get(name) or {}
        return next((n for key, n in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)

    rank, alpha = own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])
    # Rank-stabilised LoRA divides by the root of the rank (arXiv:2312.03732).
    return ModuleScale(rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank))


def is_adapted(config: Mapping[str, Any], module: str) -> bool:
    """Whether PEFT adapts one target module of one layer.

    It does not if `target_modules` is a pattern that the module does not match, if `layers_to_transform` lacks its
    layer, or if `exclude_modules` has it.

    Args:
        config: result of `adapter_config`.
        module: full name of a target module, such as model.layers.0.self_attn.q_proj.
    """
    targets, layers = config.get("target_modules"), config.get("layers_to_transform")
    excluded = config.get("exclude_modules") or []
    if isinstance(excluded, str):
        if re.fullmatch(excluded, module):
            return False
    elif any(f".{module}".endswith(f".{name}") for name in excluded):
        return False
    if isinstance(targets, str):  # PEFT refuses layers_to_transform beside it.
        return targets == ALL_LINEAR or re.fullmatch(targets, module) is not None
    if layers is None or layers == []:
        return True
    number = re.match(r".*\.(\d+)\.", module)
    return number is not None and int(number[1]) in ([layers] if isinstance(layers, int) else layers)


def end_modules(model: ModelConfig) -> dict[str, str]:
    """Return the full module names of embedding and unembedding: {"embedding": "model.embed_tokens", ...}.

    If the family has no weight for one of them, because it always ties its embeddings, Llama's name is returned.
    """
    published = published_of(model)
    names = {ours: place.name for ours, place in published.names.items()} if published else LLAMA_NAMES
    return {ours: names.get(ours, LLAMA_NAMES[ours]).removesuffix(".weight") for ours in (EMBEDDING, UNEMBEDDING)}


def _matmuls_by_full_name(model: ModelConfig) -> dict[str, list[str]]:
    """Return the matmuls in each module of a family, by full module name: {"model.layers.{layer}.mlp.up_proj": ["up"]}.

    Modules of single experts are left out.
    """
    published = published_of(model)
    found = {name: [ours] for ours, name in end_modules(model).items()}
    for path, place in (published.names if published else {}).items():
        stack, _, op = path.rpartition(".")
        if stack and place.name.endswith(".weight") and "norm" not in op and "{expert}" not in place.name:
            found.setdefault(place.name.removesuffix(".weight"), []).append(op)
    return found


def _matching_matmuls(pattern: str, model: ModelConfig, path: Path) -> list[str]:
    """Return the matmuls whose full module name matches a pattern in at least one layer.

    path: the file, for messages.

    Raises:
        MeshwrightError: the pattern is invalid or matches nothing.
    """
    known, found = adaptable(program(replace(model, lora=None))), []
    try:
        for module, ops in _matmuls_by_full_name(model).items():
            if any(re.fullmatch(pattern, module.format(layer=layer)) for layer in range(model.num_layers)):
                found += [op for op in ops if op in (*known, EMBEDDING, UNEMBEDDING)]
    except re.error as error:
        raise MeshwrightError(f"{path} has target_modules={pattern!r}, which is no pattern: {error}") from None
    if not found:
        raise MeshwrightError(f"{path} has target_modules={pattern!r}, which matches no matmul")
    return found
