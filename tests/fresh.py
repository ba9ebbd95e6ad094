"""Whether README's two commands work on a machine that has nothing but Python, make and git.

    python3 tests/fresh.py

Clones HEAD into a new folder, and runs `make run` and `make test` there with an empty HOME, a PATH
of a few programs, and neither a browser, fonts nor data sets: these folders are covered by empty
ones where the system allows a mount namespace, and hidden by variables elsewhere.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# What the two commands need: shells with their tools (Ray starts workers by bash), git and Python.
PROGRAMS = ("sh", "bash", "env", "make", "awk", "cat", "cp", "find", "git", "grep", "kill", "ln",
            "ls", "mkdir", "mv", "ps", "rm", "sed", "sleep", "touch", "uname")  # fmt: skip
COVERED = ("/usr/share/datasets", "/usr/share/fonts", "/usr/local/share/fonts",
           "/usr/share/tokenizers")  # fmt: skip
# What says how the network is reached.
NETWORK = ("PIP_", "SSL_", "REQUESTS_CA", "CURL_CA", "HTTP", "http", "NO_PROXY", "no_proxy",
           "ALL_PROXY")  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    """HOME, PATH and how the network is reached; nothing else of the caller's."""
    for name in ("home", "bin", "tmp", "data"):
        (folder / name).mkdir()
    for name in PROGRAMS:
        if found := shutil.which(name):
            (folder / "bin" / name).symlink_to(found)
    python = folder / "bin" / "python3"  # no link: environments remember where it lies
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name.startswith(NETWORK)}
    own = {"HOME": folder / "home", "PATH": folder / "bin", "TMPDIR": folder / "tmp"}
    return kept | {name: str(value) for name, value in own.items()}


def covering() -> tuple[list[str], dict[str, str]]:
    """What precedes a command so that it sees empty folders, or the variables that hide them."""
    mount = f"{shutil.which('mount')} -t tmpfs none"
    covers = "".join(f"{mount} {one} && " for one in COVERED if Path(one).is_dir())
    rights = [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare = shutil.which("unshare") or "unshare"
    command = [unshare, "--mount", *rights, "/bin/sh", "-c", f'{covers}exec "$@"', "sh"]
    try:
        subprocess.run([*command, "true"], check=True, capture_output=True)
    except (OSError, subprocess.SubprocessError):
        return [], {"FEDMUON_SYSTEM_DATA": "/nowhere"}
    return command, {}


def main() -> int:
    """Run the commands and print their seconds; the exit code is that of the first that fails."""
    with tempfile.TemporaryDirectory(prefix="fedmuon-fresh-") as name:
        folder, tree = Path(name), Path(name, "fedmuon")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        prefix, hidden = covering()
        how = "covered by empty ones" if prefix else "hidden by FEDMUON_SYSTEM_DATA"
        print(f"A clone of HEAD, an empty HOME; folders of data and fonts are {how}.", flush=True)
        settings, seconds = environment(folder) | hidden, {}
        for goal in ("run", "test"):
            began = time.monotonic()
            ended = subprocess.run([*prefix, "make", goal], cwd=tree, env=settings)
            seconds[goal] = time.monotonic() - began
            if ended.returncode:
                print(f"`make {goal}` fails on a fresh machine (exit {ended.returncode}).")
                return ended.returncode
        told = "; ".join(f"`make {goal}` took {one:.0f} s" for goal, one in seconds.items())
        print(f"Both commands work on a fresh machine: {told}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
