"""Which replica a front sends a request to."""

from meshwright.serving.front.routing import (
    BLOCK_BYTES,
    IMBALANCE_REQUESTS,
    MAX_PROMPT_BLOCKS,
    MAX_REPLICA_BLOCKS,
    Router,
    prefix_blocks,
)

SYSTEM = "You are a helper. " * 40


def blocks_of(text):
    return prefix_blocks({"prompt": text, "max_tokens": 4})


def test_prompts_that_begin_alike_share_their_first_blocks():
    one, other = blocks_of(f"{SYSTEM}one {'x' * 300}"), blocks_of(f"{SYSTEM}two {'x' * 300}")
    num_shared = sum(mine == theirs for mine, theirs in zip(one, other, strict=True))
    assert num_shared == len(f'["{SYSTEM}') // BLOCK_BYTES
    assert one[num_shared:] != other[num_shared:]
    # Once they differ, no later block is alike, though its own text is.
    assert not set(one[num_shared:]) & set(other)
    assert blocks_of("short") == ()
    assert len(blocks_of("x" * 10**6)) == MAX_PROMPT_BLOCKS
    assert blocks_of([*range(500)])[:5] == blocks_of([*range(500), 7])[:5]


def test_what_is_no_prompt_changes_nothing():
    assert prefix_blocks({"prompt": SYSTEM, "seed": 1, "stream": True}) == blocks_of(SYSTEM)
    chat = {"messages": [{"role": "system", "content": SYSTEM}]}
    assert prefix_blocks({**chat, "tools": [{"type": "function"}]})[0] != prefix_blocks(chat)[0]
    assert prefix_blocks({"prompt": "\ud800" * 300})


def test_the_longest_known_beginning_decides():
    router = Router(3)
    with router.open_request(1, blocks_of(SYSTEM)):
        pass
    assert router.choose(blocks_of(f"{SYSTEM} and more"), (0, 1, 2)) == 1
    with router.open_request(2, blocks_of(f"{SYSTEM}{SYSTEM}")):
        pass
    assert router.choose(blocks_of(f"{SYSTEM}{SYSTEM} and more"), (0, 1, 2)) == 2
    assert router.choose(blocks_of(f"{SYSTEM}{SYSTEM} and more"), (0, 1)) == 1
    router.forget(2)
    assert router.choose(blocks_of(f"{SYSTEM}{SYSTEM} and more"), (0, 1, 2)) == 1


def test_new_prompts_go_where_the_fewest_requests_are_and_then_the_fewest_prefixes():
    router = Router(2)
    with router.open_request(0, ()):
        assert router.choose(blocks_of(SYSTEM), (0, 1)) == 1
    assert router.num_open(0) == 0
    with router.open_request(0, blocks_of(SYSTEM)):
        pass
    assert router.choose(blocks_of("y" * 1000), (0, 1)) == 1


def test_a_known_prefix_does_not_overload_a_replica():
    router, blocks = Router(2), blocks_of(SYSTEM)
    opened = []
    for _ in range(IMBALANCE_REQUESTS + 1):
        assert router.choose(blocks, (0, 1)) == 0
        opened.append(router.open_request(0, blocks))
        opened[-1].__enter__()
    assert router.choose(blocks, (0, 1)) == 1
    opened.pop().__exit__(None, None, None)
    assert router.choose(blocks, (0, 1)) == 0


def test_the_oldest_blocks_are_forgotten():
    router, many = Router(2), [number.to_bytes(8, "big") for number in range(MAX_REPLICA_BLOCKS)]
    with router.open_request(0, blocks_of(SYSTEM)), router.open_request(0, many):
        pass
    assert router.num_cached(0, blocks_of(SYSTEM)) == 0
    assert router.num_cached(0, many) == MAX_REPLICA_BLOCKS
