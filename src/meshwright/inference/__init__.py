"""A model with its weights on a mesh: asked for logits and for text, scored, saved."""

from meshwright.inference.loaded import Chat, LoadedModel, Prompt
from meshwright.inference.save import check_target
from meshwright.inference.scoring import Score, total
from meshwright.inference.stream import GenerateOptions, Piece, collect
from meshwright.inference.tasks import TaskResult, answer, check_answerable, read_task

__all__ = [
    "Chat",
    "GenerateOptions",
    "LoadedModel",
    "Piece",
    "Prompt",
    "Score",
    "TaskResult",
    "answer",
    "check_answerable",
    "check_target",
    "collect",
    "read_task",
    "total",
]
