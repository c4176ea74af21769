"""Weights from Hugging Face: safetensors of a directory into sharded parameters, and back."""
