"""How far the predicted peak memory of a train step is from what XLA's compilers allocate.

    .venv/bin/python benchmarks/memory.py [--json] [--write tests/data/compiled_memory.json]

The steps of a few scanned layers at the widths of real models, each compiled for hardware that need not be there (10 to
60 s each the first time, then read from the cache), its peak as `meshwright.proof.compiler` defines it beside the
predicted one. Layers are alike, so few of them say what many do; every model is run as a Llama-style decoder of its
widths. With `--write` the compiled figures go to a file, to which `tests/planning/cost/test_cost_memory_compiled.py`
holds the prediction without a compiler.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from meshwright.description.hardware.system import parse_system
from meshwright.description.step.model import ModelConfig
from meshwright.description.step.strategy import Strategy
from meshwright.description.step.workload import Remat, Workload
from meshwright.mesh import MeshShape
from meshwright.planning.cost.memory import step_memory
from meshwright.proof.compiler.compile import compile_in_child
from meshwright.proof.compiler.program import CompileRequest
from meshwright.proof.verification.plans import TRAIN_STEP

GIB = 2**30


def _widths(name: str, embed: int, mlp: int, heads: int, kv_heads: int, vocab: int, **more: int) -> ModelConfig:
    """A model of these widths; its layers are set by each configuration."""
    return ModelConfig(
        name=name,
        num_layers=1,
        embed=embed,
        mlp=mlp,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=more.get("head_dim", 128),
        vocab=vocab,
        tied_embeddings=bool(more.get("tied")),
    )


WIDTHS = {
    model.name: model
    for model in (
        _widths("llama3-8b", 4096, 14336, 32, 8, 128_256),
        _widths("llama2-7b", 4096, 11008, 32, 32, 32_000),
        _widths("qwen2.5-7b", 3584, 18944, 28, 4, 152_064),
        _widths("gemma2-2b", 2304, 9216, 8, 4, 256_000, head_dim=256, tied=1),
        # GPT-2's vocabulary, padded to a multiple of 128 as trainings have it.
        _widths("gpt2-xl", 1600, 6400, 25, 25, 50_304, head_dim=64, tied=1),
    )
}


@dataclass(frozen=True)
class Configuration:
    """A step to compile: a model's widths, layers, sequences of a length, a remat policy, a mesh on some hardware.

    parts: the microbatches that go through the stages of pp, by a schedule.
    """

    model: str
    layers: int
    batch: int
    seq_len: int
    remat: Remat
    hardware: str
    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    parts: int = 1
    schedule: Literal["gpipe", "1f1b"] = "1f1b"

    @property
    def mesh(self) -> MeshShape:
        """The mesh."""
        return MeshShape(dp=self.dp, fsdp=self.fsdp, tp=self.tp, sp=self.sp, pp=self.pp)

    @property
    def strategy(self) -> Strategy:
        """How the step is run."""
        return Strategy(num_microbatches=self.parts, schedule=self.schedule)

    @property
    def workload(self) -> Workload:
        """The step."""
        model = replace(WIDTHS[self.model], num_layers=self.layers)
        return Workload(model=model, batch=self.batch, seq_len=self.seq_len, remat=self.remat)

    def __str__(self) -> str:
        step = f"{self.model} x{self.layers} {self.batch}x{self.seq_len} {self.remat}"
        through = f" {self.schedule} of {self.parts}" if self.pp > 1 else ""
        return f"{step}, {self.mesh}{through} on {self.hardware}"


CONFIGURATIONS = (
    Configuration("llama3-8b", 4, 16, 2048, "block", "v5e:4x4", fsdp=16),
    Configuration("llama3-8b", 4, 16, 4096, "block", "v5e:4x4", fsdp=4, tp=4),
    Configuration("llama3-8b", 2, 8, 8192, "matmuls", "v6e:4x4", fsdp=8, tp=2),
    Configuration("llama3-8b", 4, 8, 4096, "none", "v5p:2x2x2", fsdp=4, tp=2),
    Configuration("llama3-8b", 8, 8, 8192, "block", "h100:8", fsdp=8),
    Configuration("llama3-8b", 4, 8, 8192, "matmuls", "h100:16", fsdp=8, sp=2),
    Configuration("llama2-7b", 8, 16, 4096, "block", "v5e:4x4", fsdp=16),
    Configuration("llama2-7b", 4, 32, 2048, "matmuls", "v5p:2x2x4", dp=2, fsdp=4, tp=2),
    Configuration("llama2-7b", 4, 16, 2048, "none", "v6e:2x4", fsdp=8),
    Configuration("llama2-7b", 2, 4, 8192, "block", "v5e:4x4", fsdp=4, sp=4),
    Configuration("llama2-7b", 4, 16, 2048, "none", "h100:8", fsdp=4, tp=2),
    Configuration("qwen2.5-7b", 4, 16, 2048, "matmuls", "v5e:4x4", fsdp=4, tp=4),
    Configuration("qwen2.5-7b", 6, 16, 4096, "block", "v6e:4x4", fsdp=16),
    Configuration("qwen2.5-7b", 4, 8, 4096, "attention", "v5p:2x2x2", fsdp=4, sp=2),
    Configuration("gemma2-2b", 4, 16, 4096, "block", "v6e:4x4", fsdp=4, tp=4),
    Configuration("gemma2-2b", 8, 16, 2048, "block", "v5p:2x2x2", fsdp=8),
    Configuration("gemma2-2b", 4, 16, 2048, "attention", "h100:8", fsdp=8),
    Configuration("gpt2-xl", 8, 16, 2048, "none", "v5e:4x4", dp=4, fsdp=4),
    Configuration("gpt2-xl", 8, 16, 2048, "matmuls", "h100:8", dp=8),
    Configuration("gpt2-xl", 8, 4, 8192, "attention", "v6e:2x4", dp=2, sp=4),
    Configuration("llama2-7b", 8, 32, 2048, "block", "v5e:2x4", fsdp=4, pp=2, parts=8),
    Configuration("llama2-7b", 8, 32, 2048, "block", "v5e:2x4", fsdp=4, pp=2, parts=8, schedule="gpipe"),
    Configuration("llama2-7b", 8, 16, 2048, "block", "v5e:2x4", fsdp=2, pp=4, parts=8),
    Configuration("llama2-7b", 8, 16, 2048, "block", "h100:8", tp=2, pp=4, parts=8),
    Configuration("llama3-8b", 2, 1, 65_536, "block", "v5p:2x2x1", sp=4),
    Configuration("llama3-8b", 4, 4, 8192, "none", "v5p:2x2x1", fsdp=4),
    Configuration("llama3-8b", 2, 2, 16_384, "block", "v5p:2x2x1", fsdp=2, tp=2),
)


@dataclass(frozen=True)
class Row:
    """A configuration with both figures: the terms predicted, and what the compiler says of its program."""

    configuration: Configuration
    predicted: dict[str, int]
    compiled: dict[str, int]

    @property
    def error(self) -> float:
        """The relative error of the predicted peak, positive where it is too large."""
        return self.predicted["peak"] / self.compiled["peak"] - 1

    def to_json(self) -> dict[str, Any]:
        """This row as plain data."""
        sizes = {"predicted": self.predicted, "compiled": self.compiled}
        return {"configuration": asdict(self.configuration), **sizes, "error": self.error}


def main() -> None:
    """Print every row, the mean and the worst."""
    parser = argparse.ArgumentParser(description="Predicted peak memory of a train step beside the compiled one.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the compiled figures to this file")
    args = parser.parse_args()
    rows = []
    for configuration in CONFIGURATIONS:
        rows.append(row := measure(configuration))
        if not args.json:
            print(show(row), flush=True)
    if args.write:
        compiled = [{"configuration": asdict(row.configuration), "compiled": row.compiled} for row in rows]
        args.write.write_text(json.dumps(compiled, indent=1) + "\n")
    errors = [abs(row.error) for row in rows]
    mean, worst = statistics.mean(errors), max(errors)
    if args.json:
        print(json.dumps({"rows": [row.to_json() for row in rows], "mean_abs_error": mean, "worst": worst}, indent=2))
    else:
        print(f"mean |error| {mean:.1%}, worst {worst:.1%}, {len(rows)} steps")


def measure(configuration: Configuration) -> Row:
    """The row of a configuration; compiles it where the cache has it not."""
    workload, mesh, hardware = configuration.workload, configuration.mesh, configuration.hardware
    program = compile_in_child(
        CompileRequest(
            function=TRAIN_STEP,
            hardware=hardware,
            mesh=mesh.layout,
            arguments={"workload": asdict(workload), "strategy": asdict(configuration.strategy)},
            effort="fast",
        )
    )
    return Row(configuration, predict(configuration), dict(program.memory_bytes))


def predict(configuration: Configuration) -> dict[str, int]:
    """The predicted terms of a configuration."""
    kind = parse_system(configuration.hardware).chip.kind
    return step_memory(configuration.workload, configuration.mesh, configuration.strategy, kind=kind)


def show(row: Row) -> str:
    """A row in one line, in GiB."""
    predicted, compiled = row.predicted["peak"] / GIB, row.compiled["peak"] / GIB
    return f"{row.configuration!s:76} {predicted:7.2f} {compiled:7.2f} GiB {row.error:+7.1%}"


if __name__ == "__main__":
    main()
