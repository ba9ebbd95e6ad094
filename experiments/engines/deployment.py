"""A SuperLink and its SuperNodes as processes of this machine, which talk over loopback.

Only this process may submit apps, and only the SuperExecs that it starts may take tasks.
"""

import contextlib
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli_w

from fedmuon.config.load import Config
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.experiments.engines import credentials
from fedmuon.experiments.engines.processes import Processes, free_ports
from fedmuon.experiments.engines.ray_cluster import QUIET
from fedmuon.runs.directory import Record, RunDirectory
from fedmuon.runs.loop import Begin, Watch
from fedmuon.server.run_config import packed

GATE = Path(__file__).resolve().with_name("superlink_auth.py")
COMPONENTS = {
    "serverapp": "fedmuon.server.server_app:app",
    "clientapp": "fedmuon.clients.client_app:app",
}
HOST, LINK = "127.0.0.1", "demo"
START, PAUSE, SAVING = 60.0, 0.1, 20.0  # seconds
SETTINGS = {
    **QUIET,
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the packages are here
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; Flower's default is 1
    "PYTHONUNBUFFERED": "1",
}


class Deployment:
    """A SuperLink and its SuperNodes, one a partition; `deployed` makes one and ends it."""

    def __init__(self, processes: Processes, nodes: int, secure: bool) -> None:
        self.processes, self.nodes = processes, nodes
        self._files = credentials.make_server_files(processes.folder) if secure else None
        self._control_key = credentials.make_secret(processes.folder / "control.key")
        self.port, *ports = free_ports(1 + nodes)
        self._superlink = processes.start("superlink", self._superlink_command())
        self._start_superexec("superlink", self.port)
        self._await_superlink()
        keys = [self.make_key(number) for number in range(nodes)] if secure else []
        self._register([f"{key}.pub" for key in keys])
        self.supernodes = [self.start_supernode(number, port) for number, port in enumerate(ports)]

    def execute(
        self,
        config: Config,
        out: Path,
        watch: Watch = lambda record: None,
        begun: Begin = lambda done, total: None,
    ) -> Record:
        """Run the experiment, or go on with it, in `out`; returns its summary."""
        directory = RunDirectory(out.resolve())
        known = len(directory.records())
        submitted = self._submit(config, directory.path)
        begun(known, config.federation.rounds)
        try:
            for record in self._new_records(submitted, directory, known, _longest_silence(config)):
                watch(record)
        except Interrupted:
            self._await_saving()
            raise
        if (summary := directory.summary()) is None:
            raise InputError(self._why())
        return summary

    def _new_records(
        self, submitted: subprocess.Popen[bytes], directory: RunDirectory, known: int, limit: float
    ) -> Iterator[Record]:
        """The rounds as they come, until `flwr run` ends."""
        ended, end = False, time.monotonic() + limit
        while not ended:
            ended = submitted.poll() is not None  # before the last look at the records
            self._require_superlink()
            if new := directory.records()[known:]:
                known, end = known + len(new), time.monotonic() + limit
                yield from new
            if time.monotonic() > end:
                raise InputError(f"the run has been silent for {limit:.0f} s")
            time.sleep(PAUSE)

    def _await_saving(self) -> None:
        """Let the ServerApp, if it runs, save its state and end."""
        end = time.monotonic() + SAVING
        name, app = executor("superlink"), "flwr-serverapp"
        self.processes.ask_to_end(name, app)
        while self.processes.running(name, app) and time.monotonic() < end:
            time.sleep(PAUSE)

    def _superlink_command(self) -> list[str | Path]:
        command = [*_gate("superlink"), self._control_key]
        command += ["--host", HOST, "--port", str(self.port)]
        command += self._tasks_for("superlink")
        if self._files is None:
            return [*command, "--insecure"]
        return [*command, *self._files.options(), "--enable-supernode-auth"]

    def start_supernode(self, number: int, port: int) -> subprocess.Popen[bytes]:
        """A SuperNode that holds partition `number`; what starts its apps runs beside it."""
        name = f"supernode-{number}"
        command: list[str | Path] = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        command += ["--host", HOST, "--port", str(port)]
        command += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
        command += self._tasks_for(name)
        command += self._trust()
        if self._files is not None:
            key = self.processes.folder / f"supernode-{number}.key"
            command += [*self._files.options(), "--auth-supernode-private-key", key]
        supernode = self.processes.start(name, command)
        self._start_superexec(name, port)
        return supernode

    def _tasks_for(self, name: str) -> list[str | Path]:
        """Options of a SuperLink or SuperNode that leaves its apps to the holder of a secret."""
        secret = credentials.make_secret(self.processes.folder / f"{name}.secret")
        return ["--isolation", "process", "--superexec-auth-secret-file", secret]

    def _start_superexec(self, name: str, port: int) -> None:
        """What starts the apps of the SuperLink or SuperNode of this name, and proves it may."""
        command = [*_gate("superexec"), "--runtime-api-address", f"{HOST}:{port}"]
        command += ["--superexec-auth-secret-file", self.processes.folder / f"{name}.secret"]
        self.processes.start(executor(name), [*command, *self._trust()])

    def _trust(self) -> list[str | Path]:
        """Whom a client of the SuperLink believes."""
        return ["--root-certificates", self._files.authority] if self._files else ["--insecure"]

    def _await_superlink(self) -> None:
        """Until it answers over HTTP."""
        end = time.monotonic() + START
        url = f"{'https' if self._files else 'http'}://{HOST}:{self.port}/health"
        trust = ssl.create_default_context(cafile=self._files.authority) if self._files else None
        while True:
            self._require_superlink()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=5, context=trust).close()
                return
            if time.monotonic() > end:
                raise InputError(f"the SuperLink does not answer after {START:.0f} s")
            time.sleep(PAUSE)

    def _require_superlink(self) -> None:
        if (code := self._superlink.poll()) is not None:
            last = (self.processes.log("superlink").strip().splitlines() or ["no words"])[-1]
            raise InputError(f"the SuperLink ended (exit code {code}): {last}")

    def make_key(self, number: int) -> Path:
        """A SuperNode's key, in the file where it looks for it."""
        return credentials.make_node_key(self.processes.folder / f"supernode-{number}.key")

    def _register(self, keys: list[str]) -> None:
        """Tell the SuperLink which SuperNodes to admit."""
        command = [*_gate("register"), LINK, *keys]
        if keys and self._start("register", *command).wait(START + len(keys)):
            raise InputError("the SuperLink does not register a SuperNode's key")

    def _submit(self, config: Config, out: Path) -> subprocess.Popen[bytes]:
        """`flwr run`, which stays until the run has ended."""
        app = write_app(self.processes.folder / "app", packed(config, out))
        return self._start("run", "flwr", "run", app, LINK, "--stream")

    def _start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        """A Flower command that knows this SuperLink, and nothing of the user's own."""
        link = {"address": f"{HOST}:{self.port}", "insecure": self._files is None}
        if self._files is not None:
            link["root-certificates"] = str(self._files.authority)
        home = self.processes.home(name)
        home.mkdir(exist_ok=True)
        known = {"superlink": {"default": LINK, LINK: link}}
        (home / "config.toml").write_text(tomli_w.dumps(known), encoding="utf-8")
        credentials.store_control_key(home / "credentials.yaml", link["address"], self._control_key)
        return self.processes.start(name, command)

    def _why(self) -> str:
        """What the ServerApp has said of its end, or the last words of `flwr run`."""
        said = re.sub(r"\x1b\[[0-9;]*m", "", self.processes.log("run"))
        sentences = re.findall(r"ERROR\s*:\s*fedmuon: (.*)", said)
        return sentences[-1] if sentences else f"the run ended without a result: {said[-300:]}"


def write_app(folder: Path, run_config: dict[str, Any]) -> Path:
    """A Flower app without code of its own: its processes have the fedmuon that runs here."""
    project = {"name": "fedmuon", "version": "0", "description": "as installed", "license": "None"}
    app = {"publisher": "fedmuon", "components": COMPONENTS, "config": run_config}
    folder.mkdir(exist_ok=True)
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def _gate(role: str) -> list[str | Path]:
    """A program of `superlink_auth`; -P, because its folder is none to import from."""
    return [sys.executable, "-P", GATE, role]


def executor(name: str) -> str:
    """What the SuperExec of the SuperLink or SuperNode of this name is called."""
    return f"{name}-exec"


def _longest_silence(config: Config) -> float:
    """Seconds within which the ServerApp itself gives up, and then some."""
    faults = config.faults
    return 2 * START + faults.patience + 2 * (1 + faults.retries) * faults.deadline
