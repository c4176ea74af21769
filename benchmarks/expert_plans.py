"""First plans beside the meshes that people published for the same model, chips and batch.

    .venv/bin/python benchmarks/expert_plans.py

A row has the mesh of a published recipe, planned in its best way, and the first plan of a search over everything that
can be planned: the ratio of their predicted steps, which is above 1 only where a tie goes to a simpler plan.
"""

from __future__ import annotations

from typing import NamedTuple

import meshwright as mw
from meshwright.errors import MeshwrightError


class Recipe(NamedTuple):
    """A published recipe. source: where its mesh is from."""

    model: str
    on: str
    batch: int
    seq_len: int
    mesh: str
    source: str


TPU = "github.com/AI-Hypercomputer/tpu-recipes"
NEMO = "github.com/NVIDIA/dgxc-benchmarking, v25.04"
TITAN = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
MEGATRON = "arXiv:2104.04473, table 1"

RECIPES = (
    *(Recipe("llama3-8b", f"v6e:{shape}", batch, 8192, f"fsdp={chips}", TPU)
      for shape, chips, batch in (("2x4", 8, 24), ("4x8", 32, 96), ("16x16", 256, 768))),
    *(Recipe("llama3-70b", f"v6e:{shape}", batch, 8192, f"fsdp={chips}", TPU)
      for shape, chips, batch in (("8x8", 64, 256), ("8x16", 128, 512), ("16x16", 256, 1024))),
    Recipe("llama3-405b", "v6e:16x16", 256, 8192, "fsdp=256", TPU),
    Recipe("llama3-405b", "v5p:8x8x8", 1024, 8192, "fsdp=512", TPU),
    Recipe("llama3-405b", "tpu7x:4x8x8", 1536, 8192, "fsdp=512", TPU),
    Recipe("llama3-70b", "tpu7x:4x4x4", 256, 8192, "fsdp=128", TPU),
    Recipe("llama3-70b", "v5p:4x4x8", 512, 8192, "fsdp=128", TPU),
    Recipe("llama3-8b", "v5p:4x4x4", 256, 8192, "fsdp=64", TPU),
    Recipe("llama3-8b", "v5e:4x4", 64, 4096, "fsdp=16", TPU),
    Recipe("llama3-70b", "v5e:16x16", 256, 4096, "fsdp=256", TPU),
    Recipe("gpt3-175b", "v5p:8x8x8", 2048, 2048, "fsdp=64,tp=8", TPU),
    Recipe("mixtral-8x7b", "v6e:16x16", 2048, 4096, "fsdp=256", TPU),
    Recipe("mixtral-8x7b", "v5p:4x4x4", 512, 4096, "fsdp=64", TPU),
    Recipe("deepseek-v3", "v5p:8x8x8", 3072, 4096, "fsdp=512", TPU),
    Recipe("deepseek-v3", "tpu7x:4x4x8", 2048, 4096, "fsdp=256", TPU),
    *(Recipe("llama3-8b", f"h100:{gpus}", 16 * gpus, 8192, f"fsdp={gpus // 2},sp=2", NEMO) for gpus in (8, 64, 128)),
    *(Recipe("llama3-70b", f"h100:{gpus}", 2 * gpus, 8192, f"fsdp={gpus // 32},tp=4,sp=2,pp=4", NEMO)
      for gpus in (64, 512, 2048)),
    *(Recipe("llama3-405b", f"h100:{gpus}", gpus // 2, 8192, f"fsdp={gpus // 128},tp=8,sp=2,pp=8", NEMO)
      for gpus in (512, 1024, 2048)),
    *(Recipe("gpt3-175b", f"h100:{gpus}", 2 * gpus, 2048, f"fsdp={gpus // 32},tp=4,pp=8", NEMO)
      for gpus in (128, 512, 2048)),
    Recipe("gpt3-175b", "a100-80gb:1024", 1536, 2048, "dp=16,tp=8,pp=8", MEGATRON),
    Recipe("llama3-405b", "h100:8192", 2048, 8192, "fsdp=64,tp=8,pp=16", "arXiv:2407.21783, table 4"),
    Recipe("llama3-405b", "h100:16384", 2048, 8192, "fsdp=128,tp=8,pp=16", "arXiv:2407.21783, table 4"),
    Recipe("mixtral-8x7b", "h100:64", 256, 4096, "fsdp=8,ep=8", NEMO),
    Recipe("mixtral-8x7b", "h100:256", 1024, 4096, "fsdp=32,ep=8", NEMO),
    Recipe("deepseek-v3", "h100:1024", 8192, 4096, "ep=64,pp=16", "arXiv:2412.19437, section 3.2"),
    Recipe("deepseek-v3", "h100:2048", 15360, 4096, "dp=2,ep=64,pp=16", "arXiv:2412.19437, section 3.2"),
    Recipe("llama3-8b", "h100:8", 16, 8192, "fsdp=8", TITAN),
    Recipe("llama3-70b", "h100:256", 512, 8192, "fsdp=32,tp=8", TITAN),
    Recipe("llama3-405b", "h100:512", 512, 8192, "fsdp=8,tp=8,pp=8", TITAN),
    Recipe("llama3-8b", "v5e:16x16", 1024, 2048, "fsdp=256", TPU),
    Recipe("llama3-70b", "b200:64", 128, 8192, "fsdp=64", NEMO),
    Recipe("llama3-405b", "gb200:128", 64, 8192, "fsdp=2,tp=4,pp=16", NEMO),
)  # fmt: skip


def main() -> None:
    """Print the table."""
    worst = 0.0
    columns = ("model", "on", "batch", "recipe", "step", "ours", "step", "ratio")
    print(f"{columns[0]:13} {columns[1]:15} {columns[2]:>6} {columns[3]:26} {columns[4]:>9}  {columns[5]:28} "
          f"{columns[6]:>9} {columns[7]:>6}")  # fmt: skip
    for recipe in RECIPES:
        options = {"on": recipe.on, "batch": recipe.batch, "seq_len": recipe.seq_len, "include_planned": True}
        start = f"{recipe.model:13} {recipe.on:15} {recipe.batch:6} {recipe.mesh:26}"
        try:
            ours = mw.plan(recipe.model, top=1, **options)
            theirs = mw.plan(recipe.model, mesh=recipe.mesh, **options)
        except MeshwrightError as error:
            print(f"{start} refused: {error}")
            continue
        pair = [plan.predicted.step_seconds or 0.0 for plan in (theirs, ours)]
        marks = ["" if plan.predicted.fits else " !" for plan in (theirs, ours)]
        ratio = pair[1] / pair[0]
        if theirs.predicted.fits:
            worst = max(worst, ratio)
        print(f"{start} {pair[0]:7.2f} s{marks[0]:2} {ours.mesh!s:28} {pair[1]:6.2f} s{marks[1]:2} {ratio:6.3f}")
    print(f"worst ratio among recipes that fit: {worst:.3f}; !: does not fit")


if __name__ == "__main__":
    main()
