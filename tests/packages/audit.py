"""Known vulnerabilities of the pinned versions, where a service that knows them can be reached."""

import json
import subprocess
import sys
from typing import Any

from .pins import FOLDER, NAMES

TOOL = "pip-audit==2.10.1"
SERVICES = ("pypi", "osv")


def ask(service: str) -> dict[str, Any] | None:
    """What the service says of every pin, as pip-audit writes it; None if it says nothing."""
    command = [sys.executable, "-m", "uv", "tool", "run", "--quiet", "--from", TOOL, "pip-audit"]
    command += ["--disable-pip", "--no-deps", "--progress-spinner", "off", "--timeout", "15"]
    command += ["--format", "json", "--vulnerability-service", service]
    for name in NAMES:
        command += ["--requirement", str(FOLDER / f"{name}.txt")]
    ended = subprocess.run(command, capture_output=True, text=True)
    try:
        return json.loads(ended.stdout)
    except ValueError:
        return None


def verdict(said: dict[str, Any] | None) -> tuple[int, str]:
    """Exit code and sentences: 0 none is known, 1 some are, 2 nobody knows.

    pip-audit passes over what its service does not know, and calls that sound.
    """
    if said is None:
        return 2, "No service that knows vulnerabilities can be reached, so nothing was audited."
    unknown = [one["name"] for one in said["dependencies"] if "skip_reason" in one]
    if unknown:
        few = ", ".join(unknown[:3])
        return 2, f"{len(unknown)} packages could not be audited, so this says nothing: {few} ..."
    found = [
        f"{one['name']} {one['version']} has {flaw['id']}, fixed in "
        f"{', '.join(flaw['fix_versions']) or 'no version yet'}."
        for one in said["dependencies"]
        for flaw in one["vulns"]
    ]
    sound = f"No vulnerability is known of {len(said['dependencies'])} packages."
    return (1, "\n".join(found)) if found else (0, sound)


def main() -> int:
    code, text = verdict(None)
    for service in SERVICES:
        if code == 2:
            code, text = verdict(ask(service))
    print(text)
    return code


if __name__ == "__main__":
    sys.exit(main())
