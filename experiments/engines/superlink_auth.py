"""Flower's commands, started with two security gaps closed.

`flower-superlink` runs any app from anyone who trusts its certificate, unless its Control API has
an authentication plugin. This module adds a plugin that requires a key. `flower-superexec` shows
the tokens of its tasks on command lines, which every user of the machine can read. This module
passes the tokens in files.

The module can run as a program with one of three commands: `superlink_auth.py superlink KEY-FILE
...` and `superlink_auth.py superexec ...` start Flower's commands. `superlink_auth.py register LINK
KEY ...` sends the keys of all SuperNodes to a SuperLink.

The replaced functions are not part of Flower's public interface. test_superlink_auth.py fails if
they change.
"""

import hmac
import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.common.constant import ACCESS_TOKEN_KEY, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountAuthLoginDetails, AccountInfo
from flwr.superlink.auth_plugin import ControlAuthnPlugin

Metadata = Sequence[tuple[str, str | bytes]]


class OneKey(ControlAuthnPlugin):
    """An authentication plugin with one account: the holder of the key. There is no login."""

    def __init__(self, key: str = "") -> None:
        self._key = key.encode()

    def get_login_details(self) -> AccountAuthLoginDetails | None:
        """Return None, because the plugin never sends the key."""
        return None

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        """Return whether the caller sent the key, and the account for which the caller acts."""
        token = dict(metadata).get(ACCESS_TOKEN_KEY, b"")
        token = token.encode() if isinstance(token, str) else token
        if not self._key or not hmac.compare_digest(token, self._key):
            return False, None
        return True, AccountInfo(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME)

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        """Return None, because the plugin never sends the key."""
        return None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:
        """Return no new tokens, because the key is valid as long as the SuperLink runs."""
        return None, None


def superlink(key_file: str) -> None:
    """Run `flower-superlink` with a Control API that requires a key."""
    command: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    key = Path(key_file).read_text(encoding="ascii")
    command.load_control_authn_plugin = lambda: OneKey(key)
    command.flower_superlink()


def register(link: str, keys: Sequence[str]) -> None:
    """Run `flwr supernode register KEY LINK` for each key, and import Flower only once."""
    command: Any = importlib.import_module("flwr.cli.app").app
    for key in keys:
        if code := command(["supernode", "register", key, link], standalone_mode=False):
            sys.exit(code)


def superexec() -> None:
    """Run `flower-superexec` such that its tasks read their tokens from files."""
    command = importlib.import_module("flwr.supercore.cli.flower_superexec")
    executor: Any = importlib.import_module("flwr.supercore.superexec.executor.subprocess_executor")
    executor.subprocess = SimpleNamespace(Popen=_start, DEVNULL=subprocess.DEVNULL)
    command.flower_superexec()


def _start(command: list[str], **options: Any) -> subprocess.Popen:
    """Start the command, and pass its token in a file that only this user can read."""
    place = command.index("--token")
    handle, file = tempfile.mkstemp(prefix="token-")
    with os.fdopen(handle, "w") as written:
        written.write(command[place + 1])
    command = [*command[:place], "--token-file", file, *command[place + 2 :]]
    return subprocess.Popen(command, **options)


if __name__ == "__main__":
    role = sys.argv.pop(1)
    if role == "register":
        register(sys.argv[1], sys.argv[2:])
    elif role == "superlink":
        superlink(sys.argv.pop(1))
    else:
        superexec()
