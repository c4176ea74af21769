"""Read the limits and API keys of a server: NAME=VALUE words, and a file with a key per line."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields, replace

from meshwright.errors import MeshwrightError
from meshwright.options.serving import ServeArgs
from meshwright.serving.http.service import ApiKey, RequestLimits

CONNECTION_LIMITS = ("head_bytes", "head_seconds", "unread_seconds")
"""Limits of a connection, which apply before the API key of a request is known."""

KEYS_VARIABLE = "MESHWRIGHT_API_KEYS"
"""The environment variable with API keys, separated by commas."""


def limits_and_keys(args: ServeArgs) -> tuple[RequestLimits, tuple[ApiKey, ...]]:
    """Return the limits of requests, and the API keys from the environment (`KEYS_VARIABLE`) and from --api-keys.

    Raises:
        MeshwrightError: the file cannot be read, or a limit is given twice.
    """
    limits = parse_limits(args.limit, RequestLimits(), "--limit")
    if args.timeout is not None:
        if any(word.startswith("seconds=") for word in args.limit):
            raise MeshwrightError("--timeout and --limit seconds= both set the time limit of a request; give one")
        limits = replace(limits, seconds=args.timeout)
    of_environment = [key for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
    keys = parse_api_keys(of_environment, limits, KEYS_VARIABLE) if of_environment else ()
    if args.api_keys is not None:
        try:
            text = args.api_keys.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise MeshwrightError(f"cannot read --api-keys {args.api_keys}: {error}") from None
        keys += parse_api_keys(text.splitlines(), limits, f"--api-keys {args.api_keys}")
    return limits, keys


def parse_limits(words: Iterable[str], limits: RequestLimits, source: str) -> RequestLimits:
    """Return the limits with some values replaced.

    Args:
        words: NAME=VALUE each, where NAME is a field of `RequestLimits`.
        limits: the limits to start from.
        source: where the words are from, for error messages.

    Raises:
        MeshwrightError: a word does not set a limit, or sets one again.
    """
    types = {field.name: float if "float" in str(field.type) else int for field in fields(RequestLimits)}
    found = set[str]()
    for word in words:
        name, _, value = word.partition("=")
        if name in found:
            raise MeshwrightError(f"{source} sets {name} twice, the second time by {word[:60]!r}; set it once")
        found.add(name)
        if name not in types:
            raise MeshwrightError(f"{source} has {word[:60]!r}; write NAME=VALUE with one of {', '.join(types)}")
        try:
            limits = replace(limits, **{name: types[name](value)})
        except ValueError:
            kind = "number" if types[name] is float else "whole number"
            raise MeshwrightError(f"{source} has {word[:60]!r}; {name} must be a {kind} above 0") from None
    return limits


def parse_api_keys(lines: Iterable[str], limits: RequestLimits, source: str) -> tuple[ApiKey, ...]:
    """Parse lines KEY [NAME=VALUE …]. Empty lines and those that begin with # are skipped.

    Args:
        lines: the lines.
        limits: the server's limits, used where a line does not set its own.
        source: where the lines are from, for error messages.

    Raises:
        MeshwrightError: there is no key, a key is repeated, or a word does not set a limit of a key.
    """
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        key, *words = line.split() or [""]
        if not key or key.startswith("#"):
            continue
        place = f"line {number} of {source}"
        if key in keys:
            raise MeshwrightError(f"{place} repeats the key of an earlier line; write each key once")
        if word := next((word for word in words if word.startswith(CONNECTION_LIMITS)), None):
            raise MeshwrightError(f"{place} has {word[:60]!r}, which applies before the key is known; use --limit")
        keys[key] = ApiKey(key, parse_limits(words, limits, place) if words else None)
    if not keys:
        raise MeshwrightError(f"{source} has no key; write one a line")
    return tuple(keys.values())
