"""Families that differ from Llama only in features of `ModelConfig`: read and write their config.json."""
