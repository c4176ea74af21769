"""Weights of Hugging Face directories: load safetensors as sharded parameters, and save parameters as safetensors."""
