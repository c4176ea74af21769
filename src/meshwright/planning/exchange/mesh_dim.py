"""Read settings of LWM and EasyLM: all degrees in one flag, `--mesh_dim='1,-1,4,1'`, and a named model with changes."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from meshwright.planning.exchange.settings import Settings

_UPDATES = re.compile(r"dict\((.*)\)", re.DOTALL)


def expand(settings: Settings) -> None:
    """Read `--load_llama_config=7b` as sizes, and `--update_llama_config="dict(theta=10000)"` as separate options."""
    option = "load_llama_config"
    name = settings.text(option)
    if name:
        if name not in settings.table.configs:
            raise settings.refusal(
                option, f"is {name!r}; {', '.join(settings.table.configs)} are read, or name a MODEL"
            )
        sizes = settings.table.configs[name]
        fields = ("num_layers", "embed", "mlp", "num_heads", "vocab")
        settings.fields |= {f"model.{field}": size for field, size in zip(fields, sizes, strict=True)}
        settings.means(option, name, f"{sizes[0]} layers, embed={sizes[1]}, mlp={sizes[2]}, num_heads={sizes[3]}")
    text = settings.text("update_llama_config")
    if text:
        match = _UPDATES.fullmatch(text.strip())
        try:
            call: Any = ast.parse(f"dict({match[1]})" if match else "", mode="eval").body
            entries: dict[str, Any] = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        except (SyntaxError, ValueError, AttributeError):
            raise settings.refusal("update_llama_config", f"is {text!r}; it is read as dict(name=value, …)") from None
        settings.add({f"llama.{name}": value for name, value in entries.items()})


def read_sizes(settings: Settings) -> None:
    """Set the fields of sizes without an option: num_kv_heads = num_heads, and head_dim = embed / num_heads."""
    fields = settings.fields
    if "model.embed" in fields and fields.get("model.num_heads", 0) > 0:
        fields["model.num_kv_heads"] = fields["model.num_heads"]
        fields["model.head_dim"] = fields["model.embed"] // fields["model.num_heads"]


def read(settings: Settings) -> None:
    """Set the fields of the mesh, the batch and the microbatches from the options."""
    axes, option = settings.table.mesh_dim, "mesh_dim"
    text = settings.text(option, ",".join("-1" if axis == "fsdp" else "1" for axis in axes))
    degrees = _degrees(settings, text.removeprefix("!"), axes)
    known = math.prod(degree for degree in degrees.values() if degree != -1)
    filled = settings.quotient("devices over mesh_dim", settings.system.num_devices, known)
    degrees = {axis: filled if degree == -1 else degree for axis, degree in degrees.items()}
    if math.prod(degrees.values()) != settings.system.num_devices:
        raise settings.refusal(option, f"is {text}; {settings.system} has {settings.system.num_devices} devices")
    settings.fields |= degrees
    settings.means(option, text, ", ".join(f"{axis}={degree}" for axis, degree in degrees.items()))
    option = "train_dataset.json_dataset.batch_size"
    batch, steps = settings.whole(option), settings.whole("optimizer.accumulate_gradient_steps", 1)
    settings.fields |= {"batch": batch * steps, "num_microbatches": steps}
    settings.means(option, batch, f"batch={batch * steps}")
    settings.means("optimizer.accumulate_gradient_steps", steps, f"num_microbatches={steps}")


def _degrees(settings: Settings, text: str, axes: tuple[str, ...]) -> dict[str, int]:
    """Return the degree of each axis from the text `1,-1,4,1` or `dp:1,fsdp:-1,tp:4,sp:1`; at most one is -1.

    axes: the mesh axes in the order of the text. In a text that names the axes, `mp` is tp.
    """
    parts = [part.strip() for part in text.split(",")]
    named = dict(zip(axes, parts, strict=False))
    if ":" in text:
        named = {
            ("tp" if name == "mp" else name): degree for name, _, degree in (part.partition(":") for part in parts)
        }
    wrong = len(parts) != len(axes) or set(named) != set(axes)
    if wrong or not all(re.fullmatch(r"-1|0*[1-9][0-9]{0,8}", degree) for degree in named.values()):
        raise settings.refusal("mesh_dim", f"is {text!r}; it takes {len(axes)} degrees, {','.join(axes)}")
    if parts.count("-1") + text.count(":-1") > 1:
        raise settings.refusal("mesh_dim", f"is {text!r}; only one degree may be -1")
    return {axis: int(degree) for axis, degree in named.items()}
