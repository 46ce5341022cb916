"""Asks which of the locked packages have known holes, and says plainly when no service answers.

    python requirements/audit.py requirements/runtime.lock ...      0: none known; 1: some; 2: could not be asked

pip-audit (``pip install pip-audit``) asks the package index, and a service of OSV's if the index does not know. It
counts packages that neither knows as audited, with a remark; here they are the answer. Not part of CI, which has no
such service to rely on: run it before a release, and when a hole is announced.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SERVICES = ("pypi", "osv")
TIMEOUT_S = 600
CLEAN, HOLES, UNKNOWN = 0, 1, 2


def main(locks: Sequence[str]) -> int:
    """Audit locks; the exit status."""
    program = shutil.which("pip-audit")
    if program is None:
        print("audit: pip-audit is not installed: pip install pip-audit", file=sys.stderr)
        return UNKNOWN
    return max(audit(program, lock) for lock in locks)


def audit(program: str, lock: str) -> int:
    """Audit one lock by the first service that knows its packages; its exit status."""
    for service in SERVICES:
        found = _ask(program, service, lock)
        known = [one for one in found if "skip_reason" not in one]
        if known:
            return _report(lock, service, known, len(found))
    print(f"audit: {lock}: NOTHING was audited: no service that knows holes can be reached from here", file=sys.stderr)
    return UNKNOWN


def _ask(program: str, service: str, lock: str) -> list[dict[str, Any]]:
    words = [program, "-s", service, "-r", lock, "--require-hashes", "--disable-pip", "-f", "json"]
    done = subprocess.run(
        [*words, "--progress-spinner", "off"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:  # it ends with a traceback when the service cannot be reached
        return []
    found: list[dict[str, Any]] = answer["dependencies"]
    return found


def _report(lock: str, service: str, known: list[dict[str, Any]], total: int) -> int:
    holes = [(one, hole) for one in known for hole in one["vulns"]]
    for one, hole in holes:
        fixed = ", ".join(hole["fix_versions"]) or "nowhere yet"
        print(f"audit: {one['name']} {one['version']}: {hole['id']} ({', '.join(hole['aliases'])}), fixed in {fixed}")
    print(f"audit: {lock}: {len(known)} of {total} packages audited by {service}, {len(holes)} known holes")
    if holes:
        return HOLES
    return CLEAN if len(known) == total else UNKNOWN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
