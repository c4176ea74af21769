"""Tokens after prompts: a KV cache, contiguous or in pages, the steps through it, and sampling."""
