"""Published weights: safetensors of a Hugging Face directory into sharded parameters, and back."""

from meshwright.weights.directory import Tensor, tensor_dtype
from meshwright.weights.load import load_weights, read_tensors
from meshwright.weights.peft import read_adapter, saved_tensors, write_adapter
from meshwright.weights.save import MAX_FILE_BYTES, save_weights

__all__ = [
    "MAX_FILE_BYTES",
    "Tensor",
    "load_weights",
    "read_adapter",
    "read_tensors",
    "save_weights",
    "saved_tensors",
    "tensor_dtype",
    "write_adapter",
]
