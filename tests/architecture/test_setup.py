"""Set-up says what it does, and why it fails in one line."""

import ast
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "requirements" / "install.py"


def load() -> Any:
    """The script as a module; it lies outside the packages, since it runs before them."""
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()

UNREACHABLE = """WARNING: Retrying after connection broken by 'NewConnectionError(...)'
ERROR: Could not find a version that satisfies the requirement six (from versions: none)
ERROR: No matching distribution found for six"""


@pytest.mark.parametrize(("output", "said"), [
    (UNREACHABLE, "the package registry cannot be reached. Check the network"),
    ("ERROR: No matching distribution found for six==9", "does not have six==9, which is pinned"),
    ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES\n  Expected aa\n  Got bb", "Got bb"),
    ("ERROR: [Errno 28] No space left on device", "the disk is full. The environment needs 3 GB"),
    ("line\n" * 99 + "ERROR: of another kind", "ERROR: of another kind"),
])  # fmt: skip
def test_set_up_says_why_it_fails(output: str, said: str) -> None:
    text = install.reason(output)
    assert said in text and text.count("\n") < 20


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_set_up_names_a_python_that_would_do(
    version: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install.sys, "version_info", version)
    monkeypatch.setattr(
        install.shutil, "which", lambda name: name if name == "python3.12" else None
    )
    with pytest.raises(install.FailedError, match=r"Run `make run PYTHON=python3\.12`"):
        install.check_python()
    monkeypatch.setattr(install.shutil, "which", lambda _: None)
    with pytest.raises(install.FailedError, match="Install one of them and run"):
        install.check_python()


@pytest.mark.slow
def test_set_up_ends_with_one_line_where_the_registry_is_out_of_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("INDEX_URL", "http://127.0.0.1:9/"), ("FIND_LINKS", "")):
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(install, "VERIFIED", (*install.VERIFIED, "--retries", "0"))
    monkeypatch.setattr(sys, "argv", ["install.py", str(tmp_path), "docs"])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    with pytest.raises(SystemExit) as ended:
        install.main()
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and "Set-up took" not in out
    assert f"Downloading and verifying {install.count_packages('docs')} packages" in out
    assert error.startswith("Set-up failed: the package registry cannot be reached.")
    assert error.count("\n") == 1


def test_an_old_python_can_read_the_set_up() -> None:
    text = SCRIPT.read_text(encoding="utf-8")
    ast.parse(text, feature_version=(3, 7))
    with pytest.raises(SyntaxError):  # the control
        ast.parse("match 1:\n    case 1:\n        pass", feature_version=(3, 7))
