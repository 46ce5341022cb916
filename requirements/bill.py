"""The bill of materials that a wheel carries: what it needs, at the versions that were tested, as CycloneDX 1.6.

Made of ``runtime.lock`` while the wheel is built (``Wheel``, named in setup.py), and laid at
``raftkv-VERSION.dist-info/sboms/raftkv.cdx.json``, where PEP 770 has it. The same tree makes the same bytes: no time
and no random number is in it.

A wheel contains none of these packages; pip takes what fits the ranges of setup.py. Who wants just these versions
installs by the lock.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel

LOCK = Path(__file__).with_name("runtime.lock")
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", re.MULTILINE)


def bill(name: str, version: str, lock: str) -> dict[str, Any]:
    """Return the bill of materials.

    Arguments:
        name, version: of what is built.
        lock: text of the lock.
    """
    pins = sorted(set(_PIN.findall(lock)))
    subject = f"pkg:pypi/{name}@{version}"
    refs = [f"pkg:pypi/{package.lower()}@{pinned}" for package, pinned in pins]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": subject,
                "name": name,
                "version": version,
                "purl": subject,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [
            {"type": "library", "bom-ref": ref, "name": package, "version": pinned, "purl": ref, "scope": "required"}
            for (package, pinned), ref in zip(pins, refs, strict=True)
        ],
        "dependencies": [{"ref": subject, "dependsOn": refs}, *({"ref": ref} for ref in refs)],
    }


class Wheel(bdist_wheel):
    """Builds a wheel that carries its bill of materials."""

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        """Make the directory of metadata, and lay the bill into it."""
        super().egg2dist(egginfo_path, distinfo_path)
        metadata = self.distribution.metadata
        made = bill(metadata.get_name(), metadata.get_version(), LOCK.read_text(encoding="utf-8"))
        target = Path(distinfo_path, "sboms", "raftkv.cdx.json")
        target.parent.mkdir()
        target.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
