"""Try README's two commands and the first page on a machine that has only Python, make and git.

    python3 tests/fresh.py [TARGET ...]

It clones HEAD into a new folder. There it runs `make run`, `make test`, and each `fedmuon` command
of the first page in an empty folder, with an empty HOME, a PATH of a few programs, and neither a
browser, fonts nor data sets. The folders of data and fonts are covered by empty ones where the
system allows a mount namespace, and hidden by variables elsewhere. Then it makes each TARGET in the
same clone, with the caller's environment. So continuous integration sets up only once.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path("docs", "start", "first-run.md")
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


def steps(page: Path) -> Iterator[tuple[str, str]]:
    """What a reader of a page does, in its order: ("write", file and text), ("type", command).

    Files are cells that begin with `%%writefile`, or toml blocks that begin with their name.
    """
    marked = re.compile(r"^```(\S[^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for fence, block in marked.findall(page.read_text(encoding="utf-8")):
        first, _, rest = block.partition("\n")
        if first.startswith("%%writefile "):
            yield "write", f"{first.split()[1]}\n{rest}"
        elif fence == "toml" and re.fullmatch(r"# [\w-]+\.toml", first):
            yield "write", f"{first[2:]}\n{rest}"
        elif fence in ("sh", "{code-cell} python"):
            for line in block.replace("\\\n", " ").splitlines():
                if line.removeprefix("!").startswith("fedmuon "):
                    yield "type", shlex.join(shlex.split(line.removeprefix("!"), comments=True))


def timed(command: list[str], tree: Path, settings: dict[str, str] | None = None) -> float:
    """The seconds of a command that ends with 0; another end is that of this script."""
    began = time.monotonic()
    code = subprocess.run(command, cwd=tree, env=settings).returncode
    if code:
        print(f"`{shlex.join(command)}` fails in a fresh clone (exit code {code}).")
        sys.exit(code)
    return time.monotonic() - began


def main(targets: list[str]) -> None:
    """Run the commands and print their seconds; the exit code is that of the first that fails."""
    with tempfile.TemporaryDirectory(prefix="fedmuon-fresh-") as name:
        folder, tree = Path(name), Path(name, "fedmuon")
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
        prefix, hidden = covering()
        how = "covered by empty ones" if prefix else "hidden by FEDMUON_SYSTEM_DATA"
        print(f"A clone of HEAD, an empty HOME; folders of data and fonts are {how}.", flush=True)
        settings = environment(folder) | hidden
        seconds = {
            f"make {goal}": timed([*prefix, "make", goal], tree, settings)
            for goal in ("run", "test")
        }
        settings["PATH"] = f"{tree / '.venv' / 'bin'}{os.pathsep}{settings['PATH']}"
        work = folder / "work"  # apart from the clone, whose files `make check` reads
        work.mkdir()
        for act, what in steps(tree / PAGE):
            if act == "write":
                name, _, text = what.partition("\n")
                (work / name).write_text(text, encoding="utf-8")
            else:
                print(f"$ {what}", flush=True)
                seconds[what] = timed([*prefix, *shlex.split(what)], work, settings)
        for goal in targets:
            seconds[f"make {goal}"] = timed(["make", goal], tree)
        print("Each command works in a fresh clone. Seconds:")
        for command, one in seconds.items():
            print(f"{one:7.1f}  {command}")


if __name__ == "__main__":
    main(sys.argv[1:])
