"""Check the Host and Origin of requests, so that web pages of other sites cannot use a server on this machine.

A browser lets a page call the site it came from. If an attacker's site name later resolves to 127.0.0.1 (DNS rebinding,
as in Ollama's CVE-2024-28224), these calls reach this server, and only the Host header shows the other site's name.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from meshwright.errors import MeshwrightError
from meshwright.serving.http.errors import CLOSE, ApiError

_NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?|\[?[0-9a-f:.]+\]?")


def check_cors(origins: Sequence[str]) -> tuple[str, ...]:
    """Return the origins of `--cors`, after checking that each is an origin or "*".

    Raises:
        MeshwrightError: a text is not an origin.
    """
    for origin in origins:
        if origin != "*" and not _is_origin(origin):
            raise MeshwrightError(
                f"--cors has {origin!r}; an origin is a scheme, a host and maybe a port, as https://chat.example.com"
                f" or http://localhost:3000, or * for all"
            )
    return tuple(origins)


def check_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    """Return the host names of `--allowed-host`, in lower case.

    Raises:
        MeshwrightError: a text is not a host name.
    """
    for host in hosts:
        if host != "*" and not _NAME.fullmatch(host.lower()):
            raise MeshwrightError(
                f"--allowed-host has {host!r}; it must be a host name without scheme and port, as gpu1.example.com,"
                " or *"
            )
    return tuple(host.lower().strip("[]") for host in hosts)


def refuse_foreign(
    headers: Sequence[tuple[bytes, bytes]], bound: str, allowed: Sequence[str], origins: Sequence[str], has_keys: bool
) -> ApiError | None:
    """Return the error for a request to another host or, without API keys, from a page of another origin; else None.

    Args:
        headers: headers of the request.
        bound: host or address that the server listens on.
        allowed: additional host names of the server, in lower case; "*" for all.
        origins: origins whose pages may call the server; "*" for all.
        has_keys: whether requests need an API key, which other sites' pages do not have.
    """
    found = {name: value.decode("latin-1") for name, value in headers if name in (b"host", b"origin")}
    host, origin = found.get(b"host"), found.get(b"origin")
    if host is not None and not _is_allowed(_host_name(host), bound, allowed):
        return ApiError(
            f"the request is for the host {host[:100]!r}, which is not this server's; --allowed-host"
            f" {_host_name(host)[:100]} allows it",
            status=403, code="host_not_allowed", headers=CLOSE,
        )  # fmt: skip
    if origin is None or has_keys or "*" in origins or origin in origins:
        return None
    if not _is_origin(origin) or not _is_allowed(_host_name(urlsplit(origin).netloc), bound, allowed):
        hint = f"; --cors {origin[:100]} allows them to call this server" if _is_origin(origin) else ""
        return ApiError(
            f"the request is of pages of {origin[:100]!r}, which may call this server with an API key alone{hint}",
            status=403, code="origin_not_allowed", headers=CLOSE,
        )  # fmt: skip
    return None


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    is_plain = text == f"{parts.scheme}://{parts.netloc}" and "@" not in parts.netloc
    return is_plain and bool(parts.scheme) and bool(_NAME.fullmatch(_host_name(parts.netloc)))


def _host_name(host: str) -> str:
    """Return the name in a Host header, without its port."""
    name = host.lower().strip()
    name = name.rpartition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name.strip("[]").removesuffix(".")


def _is_allowed(name: str, bound: str, allowed: Sequence[str]) -> bool:
    if "*" in allowed or name in allowed or name == bound.lower().strip("[]"):
        return True
    if name == "localhost" or name.endswith(".localhost"):
        return True
    is_wildcard = bound in ("", "0.0.0.0", "::")
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        own = socket.gethostname().lower()
        return is_wildcard and name in (own, f"{own}.local")
    # An address needs no name resolution. A server on all interfaces may be reached by any address of its machine.
    return address.is_loopback or is_wildcard
