"""Token generation: a KV cache, contiguous or in pages, the programs that use it, and sampling."""
