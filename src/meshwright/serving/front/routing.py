"""Which replica gets a request: the one that has read the longest beginning of its prompt, unless others idle."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

BLOCK_BYTES = 128
"""Of a prompt; some 32 tokens of text, two pages of a cache."""

MOST_BLOCKS = 512
"""Blocks of one prompt that are looked at."""

KNOWN_BLOCKS = 1 << 16
"""Blocks that are remembered of each replica, those that were used last."""

UNEVEN_REQUESTS, UNEVEN_FACTOR = 8, 1.5
"""A replica with so many more requests than another, and so many times as many, gets none for its prefixes.

SGLang's router weighs both so (https://docs.sglang.ai/router/router.html, its cache-aware policy)."""

PROMPT_FIELDS = ("tools", "messages", "context", "prompt", "prefix_text", "input", "text")
"""The fields of requests that are read, in the order in which they are in a prompt."""


def prefix_blocks(fields: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Hashes of the beginnings of a request's prompt, a block longer each; prompts that begin alike share the first."""
    prompt = [fields[name] for name in PROMPT_FIELDS if name in fields]
    text = json.dumps(prompt, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    hashed, found = blake2b(digest_size=8), []
    for end in range(BLOCK_BYTES, min(len(text), MOST_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        hashed.update(text[end - BLOCK_BYTES : end])
        found.append(hashed.copy().digest())
    return tuple(found)


@dataclass
class _Known:
    """A replica as the router knows it: its open requests, and the blocks that it has read, the latest last."""

    num_open: int = 0
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def num_matched(self, blocks: Sequence[bytes]) -> int:
        return next((number for number, block in enumerate(blocks) if block not in self.blocks), len(blocks))


class Router:
    """Chooses replicas, which are numbers from 0."""

    def __init__(self, num_replicas: int) -> None:
        self._known = [_Known() for _ in range(num_replicas)]

    def choose(self, blocks: Sequence[bytes], among: Collection[int]) -> int:
        """The replica for a prompt, of those that answer.

        The longest known beginning decides, then the fewest open requests, then the fewest blocks that are known, so
        that new prompts are spread. Replicas with many more requests than the least busy one are left out.
        """
        least = min(self._known[number].num_open for number in among)
        most = max(least + UNEVEN_REQUESTS, least * UNEVEN_FACTOR)

        def preference(number: int) -> tuple[int, int, int, int]:
            one = self._known[number]
            return -one.num_matched(blocks), one.num_open, len(one.blocks), number

        return min((number for number in among if self._known[number].num_open <= most), key=preference)

    @contextmanager
    def answering(self, number: int, blocks: Sequence[bytes]) -> Iterator[None]:
        """Count a request of a replica for as long as it is open; what it reads is known from its beginning on."""
        known = self._known[number]
        known.num_open += 1
        for block in blocks:
            known.blocks[block] = None
            known.blocks.move_to_end(block)
        while len(known.blocks) > KNOWN_BLOCKS:
            known.blocks.popitem(last=False)
        try:
            yield
        finally:
            known.num_open -= 1

    def forget(self, number: int) -> None:
        """Forget what a replica has read, as it is lost with it."""
        self._known[number].blocks.clear()

    def num_open(self, number: int) -> int:
        """The requests that a replica has."""
        return self._known[number].num_open

    def num_known(self, number: int, blocks: Sequence[bytes]) -> int:
        """How many of a prompt's blocks a replica has read."""
        return self._known[number].num_matched(blocks)
