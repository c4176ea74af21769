"""One lock for every Python: each gets a JAX, and the compilers that were released with it."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from meshwright.description.hlo.versions import TESTED

ROOT = Path(__file__).parent.parent
PYTHONS = {"3.11": "0.10.2", "3.12": "0.12.0.1", "3.13": "0.12.0.1"}
COMPILERS = ("libtpu", "jax-cuda13-plugin", "jax-cuda13-pjrt")


def pins(lines: list[str], python: str) -> dict[str, str]:
    """The versions that `lines` of requirements give a Python on Linux; a package that they give twice is an error."""
    on = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found: dict[str, str] = {}
    for one in map(Requirement, lines):
        if one.marker is None or one.marker.evaluate(on):
            assert one.name not in found, f"{one.name} twice for Python {python}"
            found[one.name] = str(one.specifier).removeprefix("==")
    return found


def locked() -> list[str]:
    text = (ROOT / "requirements.lock").read_text()
    return [line.removesuffix(" \\") for line in text.splitlines() if re.match(r"\w", line)]


@pytest.mark.parametrize(("python", "jax"), PYTHONS.items())
def test_each_python_gets_a_jax_with_its_own_compilers(python, jax):
    found = pins(locked(), python)
    assert (found["jax"], found["jaxlib"]) == (jax, jax)
    (tested,) = [row for row in TESTED if row["jax"] == jax]
    assert {name: found[name] for name in tested} == tested
    assert found["jax-cuda13-pjrt"] == found["jax-cuda13-plugin"]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_extras_install_what_the_lock_has(python):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lock = pins(locked(), python)
    for extra in ("tpu-compiler", "gpu-compiler"):
        found = pins(extras[extra], python)
        assert {name: found[name] for name in found if name in ("jax", *COMPILERS)} == {
            name: lock[name] for name in found if name in ("jax", *COMPILERS)
        }
        assert "jax" in found
        assert any(name in found for name in COMPILERS)


def test_the_lock_names_packages_alone_and_has_a_hash_of_each():
    text = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"://|--index|--find-links|--extra", text)
    assert all("--hash=sha256:" in entry for entry in re.split(r"\n(?=\w)", text))
