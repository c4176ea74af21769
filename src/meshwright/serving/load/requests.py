"""The requests of a load: random prompts with ShareGPT's length distribution, or the prompts of a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError

PROMPT_LEN, OUTPUT_LEN = (246.0, 547.0), (322.0, 244.0)

"""(mean, standard deviation) of the lengths of ShareGPT's prompts, and of its answers, in tokens.

They are from NanoFlow's table of data sets (Zhu et al., arXiv:2408.12757). Lengths are sampled from the log-normal
distributions with this mean and deviation. With the limits below, the sampled means are 168 and 320 tokens; vLLM's
paper (Kwon et al., arXiv:2309.06180, figure 11) has 161 and 338.
"""

MIN_LEN, MAX_PROMPT_LEN, MAX_LEN = 4, 1024, 2048
"""Limits in tokens: minimum of a prompt and of an answer, maximum of a prompt, maximum of both together.

Lengths outside these limits are sampled again, because vLLM's benchmark leaves such conversations out.
"""

PROMPT_TOKENS = range(32, 96)
"""Token ids of random prompts. They exist in every vocabulary, and are rarely special tokens.

In a vocabulary of bytes they are ASCII digits, capitals and punctuation.
"""


class LoadRequest(NamedTuple):
    """One request."""

    prompt: str | list[int]
    max_tokens: int
    is_random: bool  # Whether the prompt is random tokens; then stop tokens do not end the answer.


def random_requests(
    count: int,
    seed: int,
    *,
    max_len: int = MAX_LEN,
    prompt_len: int | None = None,
    output_len: int | None = None,
    variant: int = 0,
) -> list[LoadRequest]:
    """Return requests of random tokens with ShareGPT's distribution of lengths.

    Args:
        count: number of requests.
        seed: seed of lengths and tokens.
        max_len: maximum tokens of a prompt and its answer; below `MAX_LEN` all lengths shrink in proportion.
        prompt_len: tokens of every prompt; None for ShareGPT's distribution.
        output_len: tokens of every answer; None for ShareGPT's distribution.
        variant: requests of another variant have the same lengths and different tokens, so that no prefix is cached.

    Raises:
        MeshwrightError: prompt_len and output_len together exceed max_len.
    """
    least = (prompt_len or 1) + (output_len or 1)
    if least > max_len:
        raise MeshwrightError(f"a prompt and its answer have at least {least:,} tokens; --max-len is {max_len:,}")
    rng, tokens, share = Random(seed), Random(f"{seed} {variant}"), min(1.0, max_len / MAX_LEN)
    requests: list[LoadRequest] = []
    for _ in range(count):
        sampled_prompt, sampled_output = _lengths(rng)
        prompt = prompt_len or max(1, min(int(sampled_prompt * share), max_len - (output_len or 1)))
        output = output_len or max(1, min(int(sampled_output * share), max_len - prompt))
        requests.append(LoadRequest(tokens.choices(PROMPT_TOKENS, k=prompt), output, is_random=True))
    return requests


def _lengths(rng: Random) -> tuple[int, int]:
    """Sample the lengths of a prompt and its answer, in tokens."""
    while True:
        prompt, output = random_length(rng, *PROMPT_LEN), random_length(rng, *OUTPUT_LEN)
        if MIN_LEN <= prompt <= MAX_PROMPT_LEN and output >= MIN_LEN and prompt + output <= MAX_LEN:
            return prompt, output


def random_length(rng: Random, mean: float, deviation: float) -> int:
    """Sample from the log-normal distribution with this mean and standard deviation."""
    variance = math.log(1 + (deviation / mean) ** 2)
    return round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)))


def read_requests(path: Path, *, output_len: int) -> list[LoadRequest]:
    """Read requests from JSON lines, each {"prompt": text or token ids, "max_tokens": number}.

    output_len: max_tokens of lines without it.

    Raises:
        MeshwrightError: the file cannot be read, or a line is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MeshwrightError(f"{path} is not UTF-8: {error}") from None
    requests = [_request(line, f"{path}, line {at}", output_len) for at, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise MeshwrightError(f'{path} has no prompts; each line is {{"prompt": …, "max_tokens": …}}')
    return requests


def _request(line: str, location: str, output_len: int) -> LoadRequest:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise MeshwrightError(f"{location} is not JSON: {error}") from None
    prompt: Any = data.get("prompt") if isinstance(data, dict) else None
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)
    if not prompt or not (is_tokens or isinstance(prompt, str)):
        raise MeshwrightError(f"{location} has no prompt (text or a list of token ids): {line[:60]}")
    max_tokens = data.get("max_tokens", output_len)
    if type(max_tokens) is not int or max_tokens < 1:
        raise MeshwrightError(f"{location} has max_tokens {max_tokens!r}; it must be a whole number from 1")
    return LoadRequest(prompt, max_tokens, is_random=False)
