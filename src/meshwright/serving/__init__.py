"""Serve a model: continuous batching over a paged KV cache on a mesh, and the HTTP that ordinary clients speak."""
