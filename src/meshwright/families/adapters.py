"""LoRA's targets by the names people know them by: a family's modules, as PEFT has them, or the ops of our layers."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from meshwright.errors import MeshwrightError
from meshwright.families.family import LLAMA_NAMES, Published
from meshwright.families.registry import PUBLISHED
from meshwright.step.blocks import program
from meshwright.step.lora import LoRA, adaptable
from meshwright.step.model import ModelConfig

ALL_LINEAR = "all-linear"
"""Every product of the layers that can have an adapter, as PEFT calls it: QLoRA found that it takes all of them to be
as good as training all parameters (arXiv:2305.14314, section 4)."""


ADAPTER_CONFIG = "adapter_config.json"
"""The file in which PEFT describes an adapter."""

UNKNOWN = (
    "use_dora", "use_qalora", "lora_bias", "bias", "modules_to_save", "layers_to_transform", "target_parameters",
    "exclude_modules", "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "layer_replication",
    "kasa_config", "velora_config", "use_bdlora", "monteclora_config",
)  # fmt: skip
"""Options of PEFT's LoRA that change what it computes, or of what; adapters that have one are refused."""


def with_adapters(
    model: ModelConfig,
    *,
    rank: int,
    alpha: float | None = None,
    targets: Sequence[str] = (ALL_LINEAR,),
    dropout: float = 0.0,
) -> ModelConfig:
    """The model with low-rank adapters beside some of its products.

    Args:
        model: without adapters.
        rank, alpha: W x + alpha / rank * B A x; alpha is 2 rank where there is none, as torchtune's recipes have it.
        targets: `lora_targets`.
        dropout: the share of what adapters read that a train step drops.
    """
    alpha = float(2 * rank if alpha is None else alpha)
    lora = LoRA(rank=rank, alpha=alpha, targets=lora_targets(model, targets), dropout=dropout)
    return replace(model, lora=lora)


def lora_targets(model: ModelConfig, names: Sequence[str]) -> tuple[str, ...]:
    """The products of a model's layers that some names mean, in the layers' order.

    A name is a module's of the family's checkpoints, as q_proj or c_attn, which may hold several products; Llama's,
    where the family has no such module; a product's own, as `query`; or `all-linear`.

    Raises:
        MeshwrightError: a name that means nothing here, or a product that can have no adapter.
    """
    known = adaptable(program(replace(model, lora=None)))
    modules = module_products(model)
    found: set[str] = set()
    for name in names:
        held = [op for path, ops in modules.items() if path == name or path.endswith(f".{name}") for op in ops]
        if name == ALL_LINEAR:
            found.update(known)
        elif held:
            # A module of experts may have the name of one that can be adapted.
            found.update([op for op in held if op in known] or held[:1])
        elif name in known or any(name in ops for ops in modules.values()):
            found.add(name)
        else:
            short = (path.rpartition(".")[2] for path, ops in modules.items() if set(ops) & set(known))
            choices = list(dict.fromkeys((ALL_LINEAR, *short, *known)))
            near = difflib.get_close_matches(name, choices, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise MeshwrightError(
                f"lora target {name!r} is no product of {model.name}; {hint}targets are {', '.join(choices)}"
            )
    return tuple(sorted(found, key=lambda op: (known.index(op) if op in known else -1, op)))


def module_products(model: ModelConfig) -> dict[str, list[str]]:
    """The products that each module of a family's layers holds: {"self_attn.q_proj": ["query"]}.

    Of a family that has no module of a name, Llama's stand for it.
    """
    published = next((known for known in PUBLISHED if known.family == model.family), None)
    own = _products(published.names if published else {})
    ended = {path.rpartition(".")[2] for path in own}
    llama = _products({path: Published(name) for path, name in LLAMA_NAMES.items()})
    return own | {path: ops for path, ops in llama.items() if path.rpartition(".")[2] not in ended}


def _products(names: Mapping[str, Published]) -> dict[str, list[str]]:
    """The products of each module, by where families' weights are."""
    found: dict[str, list[str]] = {}
    for path, place in names.items():
        stack, _, op = path.rpartition(".")
        if stack and place.name.endswith(".weight") and "norm" not in op:
            module = place.name.split("{layer}.")[1].removesuffix(".weight")
            found.setdefault(module, []).append(op)
    return found


def read_adapter_config(directory: Path, model: ModelConfig) -> LoRA:
    """What the `adapter_config.json` of PEFT says of the adapters of a model.

    Raises:
        MeshwrightError: no such file, another kind of adapter, or an option that is not known here.
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
    for name in UNKNOWN:
        if config.get(name) not in (None, False, "none", [], {}):
            raise MeshwrightError(
                f"{path} has {name}={config[name]!r}, which is not read here; adapters have none of it"
            )
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or rank < 1:
        raise MeshwrightError(f"{path} has r={rank!r} and lora_alpha={alpha!r}; they are numbers above 0")
    if isinstance(targets, str) and targets != ALL_LINEAR:
        raise MeshwrightError(f"{path} has target_modules={targets!r}, a pattern; names of modules are read")
    if config.get("use_rslora"):  # It divides by the root of the rank (arXiv:2312.03732).
        alpha *= math.sqrt(rank)
    names = (targets,) if isinstance(targets, str) else tuple(targets or ())
    if not isinstance(dropout := config.get("lora_dropout") or 0.0, (int, float)) or not 0 <= dropout < 1:
        raise MeshwrightError(f"{path} has lora_dropout={dropout!r}; it is a share from 0 to below 1")
    lora = LoRA(rank=rank, alpha=float(alpha), targets=lora_targets(model, names), dropout=float(dropout))
    for module, own in (config.get("rank_pattern") or {}).items():
        # As `weights.peft` writes modules that hold several products: as many times the rank, at the same scale.
        held = [
            len(ops) for each, ops in module_products(model).items() if each == module or each.endswith(f".{module}")
        ]
        if held != [own // rank] or (config.get("alpha_pattern") or {}).get(module) != alpha * held[0]:
            raise MeshwrightError(
                f"{path} has a rank_pattern of its own for {module}; one rank for all targets is read"
            )
    return lora
