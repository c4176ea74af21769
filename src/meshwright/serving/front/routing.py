"""Prefix-aware routing: a request goes to the replica with the longest cached prefix, unless it is too busy."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

BLOCK_BYTES = 128
"""Bytes per block of a prompt. 128 bytes are about 32 tokens of text, or two pages of the KV cache."""

MAX_PROMPT_BLOCKS = 512
"""Maximum number of leading blocks of a prompt that routing considers."""

MAX_REPLICA_BLOCKS = 1 << 16
"""Maximum number of blocks remembered for each replica; the least recently used ones are forgotten."""

IMBALANCE_REQUESTS, IMBALANCE_FACTOR = 8, 1.5
"""A replica is too busy if its open requests exceed the least busy one's by both this number and this factor.

This is SGLang's cache-aware policy (https://docs.sglang.ai/router/router.html).
"""

PROMPT_FIELDS = ("tools", "instructions", "messages", "context", "prompt", "prefix_text", "input", "text")
"""Request fields that form the prompt, in the prompt's order."""


def prefix_blocks(fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return the blocks of a request's prompt: for each block, a hash of the prompt up to its end.

    Prompts with a common prefix have the same first hashes. fields: the JSON object of the request's body.
    """
    prompt = [fields[name] for name in PROMPT_FIELDS if name in fields]
    text = json.dumps(prompt, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    digest, hashes = blake2b(digest_size=8), []
    for end in range(BLOCK_BYTES, min(len(text), MAX_PROMPT_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        digest.update(text[end - BLOCK_BYTES : end])
        hashes.append(digest.copy().digest())
    return tuple(hashes)


@dataclass
class _ReplicaState:
    """A replica's number of open requests, and the blocks probably in its prefix cache, most recently used last."""

    num_open: int = 0
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def num_cached(self, blocks: Sequence[bytes]) -> int:
        return next((number for number, block in enumerate(blocks) if block not in self.blocks), len(blocks))


class Router:
    """Chooses a replica, numbered from 0, for each request."""

    def __init__(self, num_replicas: int) -> None:
        self._replicas = [_ReplicaState() for _ in range(num_replicas)]

    def choose(self, blocks: Sequence[bytes], among: Collection[int]) -> int:
        """Return the number of the replica, one of `among`, for a prompt with these blocks.

        The longest cached prefix decides, then the fewest open requests, then the fewest cached blocks, which spreads
        new prompts. Replicas that are much busier than the least busy one are not considered.
        """
        least = min(self._replicas[number].num_open for number in among)
        limit = max(least + IMBALANCE_REQUESTS, least * IMBALANCE_FACTOR)

        def preference(number: int) -> tuple[int, int, int, int]:
            replica = self._replicas[number]
            return -replica.num_cached(blocks), replica.num_open, len(replica.blocks), number

        return min((number for number in among if self._replicas[number].num_open <= limit), key=preference)

    @contextmanager
    def open_request(self, number: int, blocks: Sequence[bytes]) -> Iterator[None]:
        """Count a request as open on a replica inside the context. Its prompt counts as cached from then on."""
        replica = self._replicas[number]
        replica.num_open += 1
        for block in blocks:
            replica.blocks[block] = None
            replica.blocks.move_to_end(block)
        while len(replica.blocks) > MAX_REPLICA_BLOCKS:
            replica.blocks.popitem(last=False)
        try:
            yield
        finally:
            replica.num_open -= 1

    def forget(self, number: int) -> None:
        """Forget the blocks of a replica that has lost its prefix cache."""
        self._replicas[number].blocks.clear()

    def num_open(self, number: int) -> int:
        """Return the number of open requests of a replica."""
        return self._replicas[number].num_open

    def num_cached(self, number: int, blocks: Sequence[bytes]) -> int:
        """Return how many leading blocks of a prompt a replica has cached."""
        return self._replicas[number].num_cached(blocks)
