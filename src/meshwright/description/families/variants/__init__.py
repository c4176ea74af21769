"""Families that differ from Llama only in features that `ModelConfig` has: how their files are read and written."""
