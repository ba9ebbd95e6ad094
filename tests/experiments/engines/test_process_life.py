"""What a driver starts listens on loopback, obeys it alone, and ends with it, keys and all."""

import json
import os
import signal
import ssl
import stat
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from driven import Driver, is_loopback, key_files, listening, living, processes_of, rounds, settings

from fedmuon.core.errors import Interrupted
from fedmuon.core.signals import interruptible
from fedmuon.experiments.engines.orphan_cleanup import OWNER, GuardedFolder, clear_abandoned

ROOT = Path(__file__).resolve().parents[3]
GONE = 30.0  # seconds: a fifth of a second on an idle machine
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc").exists(), reason="looks processes up in /proc"),
]

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
OWNING = f"""
import os, subprocess, sys, time
from fedmuon.experiments.engines.orphan_cleanup import GuardedFolder
held = GuardedFolder("held-", sys.argv[1])
named = dict(os.environ, TOLD=str(held.path))
for alone in (True, False):
    subprocess.Popen([sys.executable, "-c", {DEAF!r}], env=named, start_new_session=alone)
(held.path / "node.key").touch()
print(held._guard.pid, flush=True)
time.sleep(600)
"""


def owner(place: Path) -> tuple[subprocess.Popen[str], int, Path]:
    """A process with a guarded folder and two children, its guard, and the folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNING, place],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    guard = int(process.stdout.readline())
    process.stdout.close()
    (folder,) = place.glob("held-*")
    return process, guard, folder


def gone(folder: Path, helpers: set[int]) -> bool:
    """Whether all this is gone within the time."""
    end = time.monotonic() + GONE
    while time.monotonic() < end:
        if not (living(helpers) or processes_of(folder) or folder.exists()):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", [os.kill, os.killpg], ids=["process", "group"])
def test_children_and_keys_end_with_their_owner(tmp_path: Path, end) -> None:
    process, _, folder = owner(tmp_path)
    helpers = processes_of(folder)
    assert len(helpers) == 2 and key_files(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    end(process.pid, signal.SIGKILL)
    process.wait()
    assert gone(folder, helpers)


def test_the_next_owner_clears_what_lost_its_guard_too(tmp_path: Path) -> None:
    """And nothing else: not what somebody owns, is no folder of ours, or is only linked to."""
    process, guard, folder = owner(tmp_path)
    helpers = processes_of(folder)
    clear_abandoned(tmp_path, "held-")
    assert living(helpers) == helpers and folder.exists()  # it has an owner
    os.kill(guard, signal.SIGKILL)
    process.kill()
    process.wait()
    time.sleep(0.5)
    assert living(helpers) == helpers and folder.exists()  # without a guard it stays
    (tmp_path / "held-by-nobody").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / OWNER).touch()
    (tmp_path / "held-link").symlink_to(tmp_path / "elsewhere")
    new = GuardedFolder("held-", str(tmp_path))
    assert gone(folder, helpers)
    assert new.path.exists() and (tmp_path / "held-by-nobody").exists()
    assert (tmp_path / "elsewhere" / OWNER).exists()
    new.close()
    assert not new.path.exists()


def test_a_guard_that_hangs_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedmuon.experiments.engines.orphan_cleanup.PATIENCE", 0.3)
    folder = GuardedFolder("held-", str(tmp_path))
    os.kill(folder._guard.pid, signal.SIGSTOP)
    folder.close()
    folder._guard.kill()
    folder._guard.wait()
    assert not folder.path.exists()


def test_interrupts_nest_and_the_second_is_the_systems() -> None:
    with interruptible(), pytest.raises(Interrupted):
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        pytest.fail("the inner one swallows the signal")
    code = (
        "import os, time\n"
        "from fedmuon.core.signals import interruptible\n"
        "with interruptible():\n"
        "    try:\n"
        "        with interruptible():\n"
        "            os.kill(os.getpid(), 15); time.sleep(10)\n"
        "    finally:\n"
        "        os.kill(os.getpid(), 15); time.sleep(10)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGTERM


def test_a_hangup_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
            with pytest.raises(Interrupted):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGHUP)  # while the state is saved
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


ASK = """
import os, sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info()))
"""


def asked(address: str, **token: str) -> subprocess.CompletedProcess[str]:
    """What Ray's control store tells a caller about its nodes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = {**kept, "RAY_gcs_rpc_server_reconnect_timeout_s": "2", **token}
    command = [sys.executable, "-c", ASK, address]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def one_worker() -> list[str]:
    """All processors for one worker: a second one would only have to be started."""
    from ray._private.utils import get_num_cpus

    return ["--set", f"engine.cpus-per-client={get_num_cpus()}"]


@pytest.mark.slow
def test_a_local_ray_is_closed_and_ends_with_its_driver(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["run", "--engine", "ray", "--out", out, *settings(), *one_worker()]
    with Driver(*command) as driver:
        driver.until(lambda: rounds(out))
        folder, helpers = driver.folder, driver.helpers()
        assert folder is not None and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(helpers) > 5  # negative control of what is gone below
        heard = listening(helpers | {driver.process.pid})
        assert len(heard) > 3 and all(map(is_loopback, heard))
        token, address = folder / "token", gcs_address(helpers)
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        commands = [Path(f"/proc/{one}/cmdline").read_bytes() for one in helpers]
        assert not any(token.read_bytes() in command for command in commands)
        idle = (b"/log_monitor.py", b"/monitor.py")  # Ray's own, which nobody needs here
        assert not any(one in command for one in idle for command in commands)
        known = asked(address, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))
        assert known.stdout.strip() == "1", known.stderr
        for stranger in ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}):
            refused = asked(address, **stranger)
            assert refused.returncode and "uthenticat" in refused.stderr, refused.stderr
        driver.end(signal.SIGKILL)
        assert gone(folder, helpers)


def gcs_address(helpers: set[int]) -> str:
    """Where Ray's control store listens, from its command line."""
    commands = [Path(f"/proc/{one}/cmdline").read_text().split("\0") for one in helpers]
    (options,) = [one for one in commands if one[0].endswith("/raylet")]
    return next(one.partition("=")[2] for one in options if one.startswith("--gcs-address="))


def test_other_addresses_are_not_loopback() -> None:
    assert is_loopback("0100007F:1F90")
    assert is_loopback("0000000000000000FFFF00000100007F:1F90")
    assert is_loopback("00000000000000000000000001000000:1F90")
    assert not is_loopback("00000000:1F90")
    assert not is_loopback("00000000000000000000000000000000:1F90")
    assert not is_loopback("020200C0:1F90")


@pytest.mark.slow
def test_ray_is_interrupted_with_its_state_saved(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["run", "--engine", "ray", "--out", out, *settings(), *one_worker()]
    with Driver(*command) as driver:
        driver.until(lambda: rounds(out) > 2)
        folder, helpers = driver.folder, driver.helpers()
        assert not (out / "checkpoint.safetensors").exists()  # due every 100,000 rounds
        code = driver.end(signal.SIGTERM)
        said = driver.said.read_text()
        assert code == 143 and "Traceback" not in said and "--resume" in said, said
        assert folder is not None and gone(folder, helpers)
    assert (out / "checkpoint.safetensors").exists()
    lines = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [*range(1, len(lines) + 1)]


def status(driver: Driver, out: Path, path: str, key: str = "") -> int:
    """The HTTP status with which the SuperLink answers an empty request."""
    assert driver.folder is not None
    headers = {"Content-Type": "application/protobuf"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    trust = ssl.create_default_context(cafile=driver.folder / "ca.pem")
    config = (driver.folder / "home" / "run" / "config.toml").read_text()
    address = tomllib.loads(config)["superlink"]["demo"]["address"]
    asked = urllib.request.Request(f"https://{address}{path}", b"", headers, method="POST")
    try:
        with urllib.request.urlopen(asked, timeout=60, context=trust) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
def test_a_deployment_is_closed_ends_with_its_driver_and_goes_on(tmp_path: Path) -> None:
    """A stranger with the certificate and the address can ask, but learns nothing.

    After kill -9, --resume and SIGTERM, no round is lost that a checkpoint holds.
    """
    out = tmp_path / "out"
    with Driver("run", "--engine", "deployment", "--out", out, *settings()) as driver:
        driver.until(lambda: rounds(out))
        folder, helpers = driver.folder, driver.helpers()
        assert folder is not None and stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert len(helpers) > 5 and len(key_files(folder)) > 5  # negative control
        heard = listening(helpers | {driver.process.pid})
        assert len(heard) == 2 and all(map(is_loopback, heard))
        key = (folder / "control.key").read_text()
        control = [f"/v1/control/{name}" for name in ("start-run", "list-runs", "stop-run")]
        for path in (*control, "/v1/control/register-node", "/v1/runtime/acquire-task"):
            assert status(driver, out, path) == 401, path
            assert status(driver, out, path, "0" * 64) == 401, path
        assert status(driver, out, "/v1/control/list-runs", key) == 200
        assert status(driver, out, "/v1/runtime/acquire-task", key) == 401  # another secret
        commands = b"".join(Path(f"/proc/{one}/cmdline").read_bytes() for one in helpers)
        assert b"flwr-serverapp" in commands and b"--token-file" in commands
        assert b"--token\0" not in commands and key.encode() not in commands
        driver.end(signal.SIGKILL, group=True)
        assert gone(folder, helpers)
    before = rounds(out)
    with Driver("run", "--resume", "--out", out) as driver:
        driver.until(lambda: rounds(out) > before)
        folder, helpers = driver.folder, driver.helpers()
        code = driver.end(signal.SIGTERM)
        said = driver.said.read_text()
        assert code == 143 and "Traceback" not in said and "--resume" in said, said
        assert folder is not None and gone(folder, helpers)
    assert (out / "checkpoint.safetensors").exists() and rounds(out) > before
