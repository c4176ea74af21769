"""The requests of a load: lengths as people's chats have them, from a seed, or prompts of a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from meshwright.errors import MeshwrightError

PROMPT_LEN, OUTPUT_LEN = (246.0, 547.0), (322.0, 244.0)
"""Mean and standard deviation of the tokens of ShareGPT's prompts and answers, as NanoFlow's table of data sets gives
them (Zhu et al., arXiv:2408.12757). Lengths are drawn from log-normal distributions with these; cut as below they are
168 and 320 tokens on average, where vLLM's paper (Kwon et al., arXiv:2309.06180, figure 11) has 161 and 338."""

SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
"""Tokens of a prompt and of an answer at least, of a prompt and of both together at most: what is drawn beyond is drawn
anew, as vLLM's benchmark leaves such conversations out."""

PROMPT_TOKENS = range(32, 96)
"""The tokens that prompts are drawn from: any vocabulary has them, its special tokens mostly below or far above. As
bytes they are ASCII's digits, capitals and signs."""


class LoadRequest(NamedTuple):
    """One request. is_drawn: whether its length is, so that no token ends its answer before."""

    prompt: str | list[int]
    max_tokens: int
    is_drawn: bool


def draw_requests(
    count: int,
    seed: int,
    *,
    max_len: int = LONGEST,
    prompt_len: int | None = None,
    output_len: int | None = None,
    variant: int = 0,
) -> list[LoadRequest]:
    """Requests of random tokens, with the lengths of ShareGPT's conversations.

    Args:
        max_len: the most tokens of a prompt and its answer together. Below `LONGEST` all lengths shrink in proportion.
        prompt_len, output_len: tokens of every prompt, of every answer; None for those of ShareGPT.
        variant: another one has other tokens in prompts of the same lengths, so that no prefix is cached.

    Raises:
        MeshwrightError: lengths beyond max_len.
    """
    least = (prompt_len or 1) + (output_len or 1)
    if least > max_len:
        raise MeshwrightError(f"a prompt and its answer have at least {least:,} tokens; --max-len is {max_len:,}")
    rng, tokens, share = Random(seed), Random(f"{seed} {variant}"), min(1.0, max_len / LONGEST)
    found: list[LoadRequest] = []
    for _ in range(count):
        drawn_prompt, drawn_output = _lengths(rng)
        prompt = prompt_len or max(1, min(int(drawn_prompt * share), max_len - (output_len or 1)))
        output = output_len or max(1, min(int(drawn_output * share), max_len - prompt))
        found.append(LoadRequest(tokens.choices(PROMPT_TOKENS, k=prompt), output, is_drawn=True))
    return found


def _lengths(rng: Random) -> tuple[int, int]:
    """The tokens of a prompt and of its answer."""
    while True:
        prompt, output = draw_length(rng, *PROMPT_LEN), draw_length(rng, *OUTPUT_LEN)
        if SHORTEST <= prompt <= LONGEST_PROMPT and output >= SHORTEST and prompt + output <= LONGEST:
            return prompt, output


def draw_length(rng: Random, mean: float, deviation: float) -> int:
    """A length from the log-normal distribution of a mean and a standard deviation."""
    variance = math.log(1 + (deviation / mean) ** 2)
    return round(rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance)))


def read_requests(path: Path, *, output_len: int) -> list[LoadRequest]:
    """The requests of a file of JSON lines, each {"prompt": text or token ids, "max_tokens": number}.

    Args:
        output_len: the most tokens of an answer whose line has no max_tokens.

    Raises:
        MeshwrightError: a file that cannot be read, or a line that is no such object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MeshwrightError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise MeshwrightError(f"{path} is not UTF-8: {error}") from None
    found = [_request(line, f"{path}, line {at}", output_len) for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise MeshwrightError(f'{path} has no prompts; each line is {{"prompt": …, "max_tokens": …}}')
    return found


def _request(line: str, place: str, output_len: int) -> LoadRequest:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise MeshwrightError(f"{place} is not JSON: {error}") from None
    prompt: Any = data.get("prompt") if isinstance(data, dict) else None
    is_tokens = isinstance(prompt, list) and prompt and all(type(token) is int and token >= 0 for token in prompt)
    if not prompt or not (is_tokens or isinstance(prompt, str)):
        raise MeshwrightError(f"{place} has no prompt, a text or a list of token ids: {line[:60]}")
    most = data.get("max_tokens", output_len)
    if type(most) is not int or most < 1:
        raise MeshwrightError(f"{place} has max_tokens {most!r}; it is a whole number from 1")
    return LoadRequest(prompt, most, is_drawn=False)
