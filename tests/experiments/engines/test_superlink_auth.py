"""The doors of Flower's that are closed here, and that they are still where they were."""

import importlib
import inspect
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from flwr.cli.auth_plugin.oidc_cli_plugin import OidcCliPlugin
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

from fedmuon.experiments.engines.deployment import make_secret, store_control_key
from fedmuon.experiments.engines.superlink_auth import OneKey, _start


def test_only_the_key_opens(tmp_path: Path) -> None:
    key = make_secret(tmp_path / "key").read_text()
    assert len(key) == 64 and stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    door = OneKey(key)
    for given in ("", key[:-1], key.upper() + "0", "0" * 64, "ключ"):
        assert door.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, given)]) == (False, None)
    assert door.validate_tokens_in_metadata([]) == (False, None)
    opened, account = door.validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, key)])
    assert opened and account is not None
    assert OneKey("").validate_tokens_in_metadata([(ACCESS_TOKEN_KEY, "")]) == (False, None)
    assert door.get_login_details() is None and door.get_auth_tokens("") is None
    assert door.refresh_tokens([("refresh", key)]) == (None, None)


def test_flwr_finds_the_key_that_is_stored_for_it(tmp_path: Path) -> None:
    file, key = tmp_path / "credentials.yaml", make_secret(tmp_path / "key")
    store_control_key(file, "127.0.0.1:1", key)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    plugin = OidcCliPlugin("127.0.0.1:1")
    plugin.store = FileCredentialStore(file)
    plugin.load_tokens()
    assert (ACCESS_TOKEN_KEY, key.read_text()) in plugin.write_tokens_to_metadata([])


def test_tokens_are_in_files_and_not_on_command_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code = "import pathlib, sys, time; print(sys.argv, flush=True); time.sleep(60)"
    process = _start(
        [sys.executable, "-c", code, "--token", "abc", "--insecure"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    said = process.stdout.readline().decode()
    line = Path(f"/proc/{process.pid}/cmdline").read_text() if os.name == "posix" else said
    process.kill()
    process.wait()
    process.stdout.close()
    (file,) = tmp_path.glob("token-*")
    assert "abc" not in line and f"--token-file\0{file}\0--insecure" in line
    assert file.read_text() == "abc" and stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_replaced_is_where_it_was() -> None:
    """Flower does not promise these: a version that moves them must not start unguarded."""
    link = importlib.import_module("flwr.superlink.cli.flower_superlink")
    assert "authn_plugin = load_control_authn_plugin()" in inspect.getsource(link)
    executor = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    source = inspect.getsource(executor)
    assert "import subprocess\n" in source and "subprocess.Popen(" in source
    assert '"--token",\n            spec.token' in source
    from flwr.common.args import try_obtain_flwr_app_token

    assert "token_file" in inspect.getsource(try_obtain_flwr_app_token)


@pytest.mark.slow  # a deployment starts them, too
@pytest.mark.parametrize("role", ["superlink", "superexec"])
def test_the_gate_starts_flowers_own_commands(tmp_path: Path, role: str) -> None:
    """With imports of its own folder off, for modules there have the names of others."""
    import fedmuon.experiments.engines.superlink_auth as gate

    key = [str(make_secret(tmp_path / "key"))] if role == "superlink" else []
    command = [sys.executable, "-P", str(gate.__file__), role, *key, "--help"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "--superexec-auth-secret-file" in said
