"""Token generation: a KV cache, contiguous or in pages, the steps that use it, and sampling."""
