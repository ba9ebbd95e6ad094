"""Create or complete the virtual environment of this source tree, and say what is happening.

    python3 requirements/install.py .venv                # what run, test and check need
    python3 requirements/install.py .venv bench docs     # more, into the same environment

pip verifies every file by its hash, which `requirements/*.txt` has. This script needs nothing but
Python, and an old one (3.7) can still run it, to be told that it is too old.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OLDEST, NEWEST = (3, 11), (3, 13)  # versions whose files are pinned and were tried
VERIFIED = ("install", "--require-hashes", "--no-deps")
UNREACHABLE = re.compile(
    "NewConnectionError|ConnectTimeoutError|ReadTimeoutError|ProxyError|SSLError|Max retries|"
    "NameResolutionError|Connection (refused|reset|aborted)|Network is unreachable"
)
SHOWN = 15  # last lines of pip's output that are printed when it fails for another reason


class FailedError(Exception):
    """A step failed; the message says why and what to do."""


def check_python() -> None:
    """Reject Pythons for which there are no pinned files, and name one that would do."""
    if OLDEST <= sys.version_info[:2] <= NEWEST:
        return
    this = f"{sys.executable} is {sys.version.split()[0]}"
    names = [f"python3.{minor}" for minor in range(NEWEST[1], OLDEST[1] - 1, -1)]
    found = [name for name in names if shutil.which(name)]
    command = f"make {os.environ.get('GOAL') or 'run'} PYTHON={(found or names)[0]}"
    raise FailedError(
        f"fedmuon needs Python 3.11, 3.12 or 3.13, but {this}. "
        f"{'Run' if found else 'Install one of them and run'} `{command}`."
    )


def pip(folder: Path, *arguments: str) -> None:
    """Run pip in the environment; where somebody watches, count the packages."""
    command = [str(folder / "bin" / "python"), "-m", "pip", *arguments]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2"]
    process = subprocess.Popen(
        command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    assert process.stdout
    for line in process.stdout:
        lines.append(line)
        if sys.stdout.isatty() and line.startswith(("Collecting", "Installing collected")):
            count = sum(one.startswith("Collecting") for one in lines)
            told = f"package {count}" if line.startswith("Collecting") else "writing the files"
            print(f"\r    {told:20}", end="", flush=True)
    if sys.stdout.isatty():
        print(f"\r{'':24}\r", end="", flush=True)
    if process.wait():
        raise FailedError(reason("".join(lines)))


def reason(output: str) -> str:
    """One line for the failures that people meet; otherwise the end of what pip printed."""
    end = "\n".join(output.splitlines()[-SHOWN:])
    if UNREACHABLE.search(output):
        return (
            "the package registry cannot be reached. Check the network and `pip config list`, "
            "then run the same command again; downloaded packages are kept."
        )
    if "DO NOT MATCH THE HASHES" in output:
        return (
            "a downloaded file differs from the pinned one and was not installed. Run "
            f"`pip cache purge` and try again; if it persists, do not trust this registry.\n{end}"
        )
    if "No space left on device" in output:
        return f"the disk is full. The environment needs 3 GB in {HERE.parent}."
    found = re.search("No matching distribution found for (.*)", output)
    if found:
        return f"the package registry does not have {found[1]}, which is pinned."
    return end


def count_packages(name: str) -> int:
    """How many packages a file of requirements pins."""
    text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    return len(re.findall(r"^[\w.-]+==", text, re.MULTILINE))


def create(folder: Path) -> None:
    """Make the environment, with what builds packages in it."""
    print(f"  Creating {folder} with Python {sys.version.split()[0]}", flush=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        output = made.stdout + made.stderr
        if "ensurepip" in output:
            raise FailedError("this Python cannot create environments. Install python3-venv.")
        raise FailedError(f"{folder} cannot be created: {output.strip()}")
    pip(folder, *VERIFIED, "-r", "requirements/build.txt")


def install_torch(folder: Path) -> None:
    """Take the build that this machine prefers where its hash is known, else the registry's; a
    build for CUDA needs more packages."""
    print("  Downloading and verifying PyTorch: 200 MB, or several GB with CUDA", flush=True)
    wheels, only = folder / "torch", ("--no-deps", "--only-binary", ":all:")
    try:
        pip(folder, "download", *only, "-c", "constraints.txt", "-d", str(wheels), "torch")
        try:
            local = "--no-index", "--find-links", str(wheels)
            pip(folder, *VERIFIED, *local, "-r", "requirements/torch.txt")
        except FailedError:
            pip(folder, *VERIFIED, "-r", "requirements/torch.txt")
    finally:
        shutil.rmtree(wheels, ignore_errors=True)
    check = [str(folder / "bin" / "python"), "-m", "pip", "check"]
    checked = subprocess.run(check, stdout=subprocess.PIPE, text=True).stdout
    if re.search("^torch.* requires (nvidia|cuda)", checked, re.MULTILINE):
        install_group(folder, "cuda")


def install_group(folder: Path, name: str) -> None:
    """Install the packages of one file of requirements."""
    print(f"  Downloading and verifying {count_packages(name)} packages ({name})", flush=True)
    more = ["--ignore-requires-python"] if name == "bench" else []
    pip(folder, *VERIFIED, "--no-build-isolation", *more, "-r", f"requirements/{name}.txt")


def install(folder: Path, groups: list) -> None:
    """All steps for a new environment, or those of more groups."""
    if not groups:
        create(folder)
        install_torch(folder)
        install_group(folder, "dev")
        print("  Installing fedmuon itself", flush=True)
        pip(folder, "install", "--no-deps", "--no-build-isolation", "--editable", ".")
    for name in groups:
        install_group(folder, name)


def main() -> None:
    """Exit with 0 when the environment is complete, with 2 and one message when it is not."""
    began = time.time()
    try:
        check_python()
        print("Setting up fedmuon, which happens once and takes two to five minutes.", flush=True)
        install(Path(sys.argv[1]), sys.argv[2:])
    except (FailedError, KeyboardInterrupt) as error:
        interrupted = "interrupted. Run the same command to continue."
        print(f"Set-up failed: {str(error) or interrupted}", file=sys.stderr)
        sys.exit(2)
    print(f"Set-up took {time.time() - began:.0f} s.", flush=True)


if __name__ == "__main__":
    main()
