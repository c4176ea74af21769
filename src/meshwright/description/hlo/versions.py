"""The versions of JAX and its compilers that the tests have covered.

Printed HLO is not a stable interface: a new version may omit or rename what this package reads.
"""

from __future__ import annotations

from importlib.metadata import version

TESTED = (
    {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1", "jax-cuda13-plugin": "0.10.2"},
    {"jax": "0.11.2", "jaxlib": "0.11.2"},
    {"jax": "0.12.0.1", "jaxlib": "0.12.0.1", "libtpu": "0.0.50.1", "jax-cuda13-plugin": "0.12.0.1"},
)
"""The tested combinations of JAX and compilers, oldest first: version by package."""


def untested_notes(compiler: str | None = None) -> tuple[str, ...]:
    """Return a note for users if the installed JAX is untested with this compiler; else ().

    compiler: its package and version, such as `libtpu 0.0.42.1`; by default the installed jaxlib.
    """
    package, _, number = (compiler or f"jaxlib {version('jaxlib')}").partition(" ")
    jax = version("jax")
    if any((one["jax"], one.get(package)) == (jax, number) for one in TESTED):
        return ()
    tested = ", ".join(_pair(one["jax"], package, one[package]) for one in TESTED if package in one)
    return (
        f"meshwright is not tested with {_pair(jax, package, number)}, but with {tested}: what it reads from compiled"
        " programs may be incomplete, and a mistake may go unnoticed",
    )


def _pair(jax: str, package: str, number: str) -> str:
    """Format the versions of JAX and of a compiler; only JAX's if the compiler is a jaxlib of the same version."""
    return f"JAX {jax}" if (package, number) == ("jaxlib", jax) else f"JAX {jax} with {package} {number}"
