"""A software bill of materials of the lock, in CycloneDX 1.6, with the licence of each package as it is installed.

    .venv/bin/python .ci/sbom.py [-o sbom.json]      exit code 1 if a licence is not on the list below
    .venv/bin/python .ci/sbom.py --audit             known vulnerabilities of the lock, by pip-audit (make audit)

https://cyclonedx.org/docs/1.6/json/. The packages are those that the lock has for this Python and system.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import distribution, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"

ALLOWED = {
    "0BSD", "Apache-2.0", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "ISC", "MIT", "MIT-CMU", "MPL-2.0",
    "PSF-2.0", "Zlib",
}  # fmt: skip
"""Licences that a package may have: SPDX identifiers, and "BSD License" where metadata do not say which BSD licence."""

REVIEWED = {
    "docutils": "public domain, BSD and PSF; what is under the GPL is a mode for Emacs, which the wheel does not have",
    "libtpu": "Google Cloud Platform Terms of Service; the TPUs' compiler, an extra, not distributed by meshwright",
    "nvidia-cudnn-cu13": "NVIDIA's own licence; plans kernels for GPUs, an extra, not distributed by meshwright",
}
"""Packages with other licences, and why they may be used."""

SPELLED = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache 2.0": "Apache-2.0",
    "apache license": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "bsd": "BSD License",
    "bsd 3-clause license": "BSD-3-Clause",
    "bsd license": "BSD License",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "python software foundation license": "PSF-2.0",
}
"""SPDX identifiers of what older metadata say: the first line of the licence, or classifiers."""


@dataclass(frozen=True)
class Package:
    """A package of the lock: its name, version and the sha256 of each of its files."""

    name: str
    version: str
    hashes: tuple[str, ...]

    @property
    def purl(self) -> str:
        """Its package URL, which other tools know it by."""
        return f"pkg:pypi/{canonicalize_name(self.name)}@{self.version}"

    @property
    def licence(self) -> str:
        """The SPDX expression of its licence, as its installed metadata say it; "" if they do not."""
        found = metadata(self.name)
        if expression := found.get("License-Expression"):
            return expression
        first = (found.get("License") or "").strip().split("\n")[0]
        if first.lower() in SPELLED:
            return SPELLED[first.lower()]
        if re.fullmatch(r"[\w.-]+(?: (?:AND|OR) [\w.-]+)*", first) and first != "UNKNOWN":
            return first
        kinds = [line.rpartition(" :: ")[2] for line in found.get_all("Classifier") or [] if line.startswith("License")]
        return " OR ".join(SPELLED.get(kind.lower(), kind) for kind in kinds if kind != "OSI Approved") or first

    @property
    def is_allowed(self) -> bool:
        """Whether its licence is on the list, or was looked at."""
        parts = [part.split(" OR ") for part in self.licence.split(" AND ")]
        return self.name in REVIEWED or all(not ALLOWED.isdisjoint(part) for part in parts)


def locked() -> Iterator[Package]:
    """Yield the packages that the lock has for this Python and system."""
    for entry in re.split(r"\n(?=\w)", LOCK.read_text().replace("\\\n", " ")):
        line, *hashes = re.split(r"\s+--hash=sha256:", entry.strip())
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate():
            (version,) = wanted.specifier
            yield Package(wanted.name, version.version, tuple(one.split()[0] for one in hashes))


def bill(packages: list[Package]) -> dict[str, Any]:
    """The bill of materials. It names no time, so that the same lock gives the same bill."""
    by_name = {canonicalize_name(one.name): one for one in packages}
    of_project = metadata("meshwright")
    project = f"pkg:pypi/meshwright@{of_project['Version']}"
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, LOCK.read_text())}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library", "bom-ref": project, "name": "meshwright", "version": of_project["Version"],
                "purl": project, "licenses": [{"license": {"id": of_project["License-Expression"]}}],
            }
        },
        "components": [_component(one) for one in packages],
        "dependencies": [
            {"ref": ref, "dependsOn": sorted({by_name[name].purl for name in _needs(name) if name in by_name})}
            for ref, name in ((project, "meshwright"), *((one.purl, one.name) for one in packages))
        ],
    }  # fmt: skip


def _component(package: Package) -> dict[str, Any]:
    licence = package.licence
    is_name = not set(re.split(" AND | OR ", licence)) - {"BSD License"} or package.name in REVIEWED
    return {
        "type": "library",
        "bom-ref": package.purl,
        "name": package.name,
        "version": package.version,
        "purl": package.purl,
        "licenses": [{"license": {"name": licence}}] if is_name else [{"expression": licence}],
        "externalReferences": [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{package.name}/{package.version}/",
                "comment": "one hash for each file of this version",
                "hashes": [{"alg": "SHA-256", "content": one} for one in package.hashes],
            }
        ],
    }


def _needs(name: str) -> Iterator[str]:
    """The packages that an installed one requires here, for all of its extras."""
    found = distribution(name)
    extras = {"", *(found.metadata.get_all("Provides-Extra") or [])} if name == "meshwright" else {""}
    for wanted in map(Requirement, found.requires or []):
        if wanted.marker is None or any(wanted.marker.evaluate({"extra": extra}) for extra in extras):
            yield canonicalize_name(wanted.name)


PIP_AUDIT = "pip-audit==2.10.1"


def audit() -> int:
    """Ask PyPI's advisories about each package of the lock; print the known vulnerabilities, and what was not answered.

    pip-audit has an environment of its own: it is not in the lock, and its packages are others than the project's.
    """
    venv, unknown = ROOT / ".venv-audit", "so nothing is known of their vulnerabilities"
    if not (program := venv / "bin" / "pip-audit").is_file():
        for words in (["-m", "venv", venv], [venv / "bin" / "python", "-m", "pip", "install", "--quiet", PIP_AUDIT]):
            made = subprocess.run(
                [sys.executable, *words] if words[0] == "-m" else words, capture_output=True, text=True
            )
            if made.returncode:
                reason = (made.stderr.strip() or "no reason given").splitlines()[-1]
                print(f"audit: {PIP_AUDIT} cannot be installed ({reason[:120]}), {unknown}")
                return 0
    words = [program, "--disable-pip", "--require-hashes", "--progress-spinner", "off", "-f", "json", "-r", LOCK]
    done = subprocess.run(words, capture_output=True, text=True)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        print(f"audit: the advisories cannot be reached ({reason[:120]}), {unknown}")
        return 0
    for one in found:
        for known in one.get("vulns", ()):
            fixed = ", ".join(known["fix_versions"]) or "no version yet"
            print(f"{one['name']} {one['version']}: {known['id']}, fixed in {fixed}")
    skipped = [one["name"] for one in found if "skip_reason" in one]
    if skipped:
        print(
            f"audit: the advisories say nothing of {len(skipped)} of {len(found)} packages, as {skipped[0]}, {unknown}"
        )
    else:
        print(f"audit: {len(found)} packages were checked")
    return 1 if any(one.get("vulns") for one in found) else 0


def main() -> int:
    """Write the bill of materials, or audit the lock."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="default: to the terminal")
    parser.add_argument("--audit", action="store_true")
    args = parser.parse_args()
    if args.audit:
        return audit()
    packages = list(locked())
    text = json.dumps(bill(packages), indent=1) + "\n"
    if args.output is None:
        print(text, end="")
    else:
        args.output.write_text(text)
        print(f"wrote {args.output}: {len(packages)} packages, {len({one.licence for one in packages})} licences")
    for one in packages:
        if not one.is_allowed:
            print(
                f"{one.name} {one.version}: its licence, {one.licence!r}, is not on the list of {__file__}",
                file=sys.stderr,
            )
    return 0 if all(one.is_allowed for one in packages) else 1


if __name__ == "__main__":
    sys.exit(main())
