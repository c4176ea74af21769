"""Models with their weights: loaded onto a mesh, asked for logits and for text, scored, and saved."""

from meshwright.inference.adapter import save_adapter
from meshwright.inference.library import Found, find_model, load
from meshwright.inference.loaded import LoadedModel, Prompt
from meshwright.inference.save import check_target
from meshwright.inference.scoring import Score, total
from meshwright.inference.stream import GenerateOptions, Piece, collect
from meshwright.inference.tasks import TaskResult, answer, read_task

__all__ = [
    "Found",
    "GenerateOptions",
    "LoadedModel",
    "Piece",
    "Prompt",
    "Score",
    "TaskResult",
    "answer",
    "check_target",
    "collect",
    "find_model",
    "load",
    "read_task",
    "save_adapter",
    "total",
]
