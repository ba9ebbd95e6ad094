"""A Flower deployment on this machine: a SuperLink and its SuperNodes as local processes.

`deploy` runs one experiment in a deployment that exists only for this experiment (`fedmuon
deploy-demo`, or [engine] name = 'deployment'). With `secure`, the processes communicate over TLS
with keys and certificates that are created for this run. Only this process may submit apps, and
only the SuperExecs that it starts may take tasks. When this process ends or is killed, all
processes and their child processes are stopped.
"""

import contextlib
import datetime
import ipaddress
import logging
import os
import re
import secrets
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID
from flwr.cli.auth_plugin.oidc_cli_plugin import OidcCliPlugin
from flwr.supercore.auth.typing import AccountAuthCredentials
from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

from fedmuon.config.load import Config, absolute_paths
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.core.locks import DRIVER, held
from fedmuon.core.signals import interruptible
from fedmuon.experiments.engines.processes import Processes, free_ports, importable
from fedmuon.experiments.engines.ray_cluster import QUIET
from fedmuon.federated.build import resolve
from fedmuon.runs.directory import LOGS, Record, RunDirectory
from fedmuon.runs.loop import OnRoundEnd, OnStart
from fedmuon.server.run_config import packed

AUTH = Path(__file__).resolve().with_name("superlink_auth.py")
COMPONENTS = {
    "serverapp": "fedmuon.server.server_app:app",
    "clientapp": "fedmuon.clients.client_app:app",
}
HOST, LINK = "127.0.0.1", "demo"
START, PAUSE, SAVING = 60.0, 0.1, 20.0  # seconds
PATIENCE = 10.0  # seconds for leftover processes of a killed driver to end
LIFE = datetime.timedelta(days=1)  # validity of a certificate before and after now
SETTINGS = {
    **QUIET,
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # all packages are already installed
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; Flower's default is 1
    "PYTHONUNBUFFERED": "1",
}
DEMO = (  # small settings, because each message starts one process
    "data.name=synthetic",
    "data.train=300",
    "data.test=300",
    "local.lr=0.1",
    "federation.clients=3",
    "federation.per-round=2",
    "federation.rounds=3",
    "engine.dtype=float64",
)
logger = logging.getLogger(__name__)


# Deployment


def deploy(
    config: Config,
    out: Path,
    secure: bool,
    on_round_end: OnRoundEnd,
    on_start: OnStart,
    resume: bool = False,
) -> Record:
    """Run a config in a new deployment, and store the logs in out/logs."""
    with held(out, DRIVER):
        try:
            with held(out):
                pass
        except InputError as error:  # the server of a killed driver may still be writing
            logger.warning("fedmuon: waiting %g s, because %s", PATIENCE, error)
            with held(out, patience=PATIENCE):
                pass
        RunDirectory(out).create(resume)
        config = resolve(absolute_paths(config))
        try:
            with deployed(config.federation.clients, secure, out / LOGS) as deployment:
                return deployment.execute(config, out, on_round_end, on_start)
        except InputError as error:
            message = str(error).removesuffix(".")
            raise InputError(f"{message}. The output of each process is in {out / LOGS}.") from None


@contextlib.contextmanager
def deployed(nodes: int, secure: bool = True, logs: Path | None = None) -> Iterator["Deployment"]:
    """Yield a running deployment. At the end, remove everything except the logs in `logs`."""
    with interruptible():
        processes = Processes({**SETTINGS, "PYTHONPATH": importable()})
        try:
            yield Deployment(processes, nodes, secure)
        finally:
            try:
                if logs is not None:
                    shutil.copytree(processes.logs, logs, dirs_exist_ok=True)
            except OSError:  # report the error that ended the run instead
                logger.warning("fedmuon: cannot write the logs of the deployment to %s", logs)
            finally:
                processes.stop()


class Deployment:
    """A SuperLink and its SuperNodes, one per partition.

    The function `deployed` starts and stops a deployment.
    """

    def __init__(self, processes: Processes, nodes: int, secure: bool) -> None:
        self.processes, self.nodes = processes, nodes
        self._files = make_server_files(processes.folder) if secure else None
        self._control_key = make_secret(processes.folder / "control.key")
        # The certificate that clients of the SuperLink trust.
        self._trust: list[str | Path] = ["--insecure"]
        if self._files is not None:
            self._trust = ["--root-certificates", self._files.authority]
        self.port, *ports = free_ports(1 + nodes)
        command = [*_auth("superlink"), self._control_key]
        command += ["--host", HOST, "--port", str(self.port), *self._tasks_for("superlink")]
        if self._files is None:
            command += ["--insecure"]
        else:
            command += [*self._files.options(), "--enable-supernode-auth"]
        self._superlink = processes.start("superlink", command)
        self._start_superexec("superlink", self.port)
        self._await_superlink()
        files = [processes.folder / f"supernode-{number}.key" for number in range(nodes)]
        keys = [f"{make_node_key(file)}.pub" for file in files] if secure else []
        # The SuperLink admits only SuperNodes with these keys.
        if keys and self._start("register", *_auth("register"), LINK, *keys).wait(START + nodes):
            raise InputError(
                "the SuperLink of the deployment did not register the keys of the SuperNodes, so "
                "the run cannot start. The file register.log states the cause. If this machine "
                "was busy, start the run again"
            )
        self.supernodes = [self.start_supernode(number, port) for number, port in enumerate(ports)]

    def execute(
        self,
        config: Config,
        out: Path,
        on_round_end: OnRoundEnd = lambda record: None,
        on_start: OnStart = lambda done, total: None,
    ) -> Record:
        """Run or resume the experiment in `out`, and return its summary."""
        directory = RunDirectory(out.resolve())
        finished = len(directory.records())
        app = write_app(self.processes.folder / "app", packed(config, directory.path))
        submitted = self._start("run", "flwr", "run", app, LINK, "--stream")  # until the run ends
        on_start(finished, config.federation.rounds)
        try:
            for record in self._new_records(
                submitted, directory, finished, _longest_silence(config)
            ):
                on_round_end(record)
        except Interrupted:  # if the ServerApp runs, let it save its state and end
            end = time.monotonic() + SAVING
            name, app_name = executor("superlink"), "flwr-serverapp"
            for number in self.processes.running(name, app_name):
                with contextlib.suppress(OSError):
                    os.kill(number, signal.SIGTERM)
            while self.processes.running(name, app_name) and time.monotonic() < end:
                time.sleep(PAUSE)
            raise
        if (summary := directory.summary()) is not None:
            return summary
        output = re.sub(r"\x1b\[[0-9;]*m", "", self.processes.log("run"))
        sentences = re.findall(r"ERROR\s*:\s*fedmuon: (.*)", output)
        last = f"the run in the deployment ended without a result. Its last output: {output[-300:]}"
        raise InputError(sentences[-1] if sentences else last)

    def _new_records(
        self,
        submitted: subprocess.Popen[bytes],
        directory: RunDirectory,
        finished: int,
        limit: float,
    ) -> Iterator[Record]:
        """Yield the record of each new round until `flwr run` ends."""
        ended, end = False, time.monotonic() + limit
        while not ended:
            ended = submitted.poll() is not None  # checked before the last read of the records
            self._require_superlink()
            if new := directory.records()[finished:]:
                finished, end = finished + len(new), time.monotonic() + limit
                yield from new
            if time.monotonic() > end:
                raise InputError(
                    f"no round of the run in the deployment finished within {limit:.0f} s. If the "
                    "clients need more time, increase [faults] deadline"
                )
            time.sleep(PAUSE)

    def start_supernode(self, number: int, port: int) -> subprocess.Popen[bytes]:
        """Start a SuperNode with partition `number`, and the process that starts its apps."""
        name = f"supernode-{number}"
        command: list[str | Path] = ["flower-supernode", "--superlink", f"{HOST}:{self.port}"]
        command += ["--host", HOST, "--port", str(port)]
        of_node = f"partition-id={number} num-partitions={self.nodes}"
        states = self.processes.folder / f"{name}-states"  # client states between rounds
        command += ["--node-config", f'{of_node} state-dir="{states}"']
        command += [*self._tasks_for(name), *self._trust]
        if self._files is not None:
            key = self.processes.folder / f"{name}.key"
            command += [*self._files.options(), "--auth-supernode-private-key", key]
        supernode = self.processes.start(name, command)
        self._start_superexec(name, port)
        return supernode

    def _tasks_for(self, name: str) -> list[str | Path]:
        """Return Flower's options for a new secret. Only its holder can start the apps."""
        secret = make_secret(self.processes.folder / f"{name}.secret")
        return ["--isolation", "process", "--superexec-auth-secret-file", secret]

    def _start_superexec(self, name: str, port: int) -> None:
        """Start `flower-superexec`, which starts the apps of the SuperLink or SuperNode `name`.

        `flower-superexec` authenticates with the secret of that SuperLink or SuperNode.
        """
        command = [*_auth("superexec"), "--runtime-api-address", f"{HOST}:{port}"]
        command += ["--superexec-auth-secret-file", self.processes.folder / f"{name}.secret"]
        self.processes.start(executor(name), [*command, *self._trust])

    def _await_superlink(self) -> None:
        """Wait until the SuperLink answers over HTTP."""
        end = time.monotonic() + START
        url = f"{'https' if self._files else 'http'}://{HOST}:{self.port}/health"
        trust = ssl.create_default_context(cafile=self._files.authority) if self._files else None
        while True:
            self._require_superlink()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url, timeout=5, context=trust).close()
                return
            if time.monotonic() > end:
                raise InputError(
                    f"the SuperLink of the deployment did not answer within {START:.0f} s, so "
                    "the run cannot start. If this machine was busy, start the run again"
                )
            time.sleep(PAUSE)

    def _require_superlink(self) -> None:
        if (code := self._superlink.poll()) is not None:
            last = (self.processes.log("superlink").strip().splitlines() or ["no words"])[-1]
            raise InputError(
                f"the SuperLink of the deployment ended with exit code {code}. Its last message: "
                f"{last}"
            )

    def _start(self, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
        """Start a Flower command that knows only this SuperLink, not the user's SuperLinks."""
        link = {"address": f"{HOST}:{self.port}", "insecure": self._files is None}
        if self._files is not None:
            link["root-certificates"] = str(self._files.authority)
        home = self.processes.home(name)
        home.mkdir(exist_ok=True)
        flwr_config = {"superlink": {"default": LINK, LINK: link}}
        (home / "config.toml").write_text(tomli_w.dumps(flwr_config), encoding="utf-8")
        store_control_key(home / "credentials.yaml", link["address"], self._control_key)
        return self.processes.start(name, command)


def write_app(folder: Path, run_config: dict[str, Any]) -> Path:
    """Write a Flower app that contains no code: its processes import the installed fedmuon."""
    project = {"name": "fedmuon", "version": "0", "description": "as installed", "license": "None"}
    app = {"publisher": "fedmuon", "components": COMPONENTS, "config": run_config}
    folder.mkdir(exist_ok=True)
    text = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": app}}})
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return folder


def executor(name: str) -> str:
    """Return the name of the SuperExec for the SuperLink or SuperNode `name`."""
    return f"{name}-exec"


def _auth(role: str) -> list[str | Path]:
    """Return the command that runs `superlink_auth` with the subcommand `role`.

    The option -P keeps the folder of `superlink_auth` out of the import path.
    """
    return [sys.executable, "-P", AUTH, role]


def _longest_silence(config: Config) -> float:
    """Return how many seconds to wait for the ServerApp: its own time limit plus a margin."""
    faults = config.faults
    return 2 * START + faults.patience + 2 * (1 + faults.retries) * faults.deadline


# Keys and certificates of one run


@dataclass(frozen=True)
class ServerFiles:
    """PEM files of a server: its certificate for loopback, its key, and the trusted authority."""

    authority: Path
    certificate: Path
    key: Path

    def options(self) -> list[str]:
        """Return the options that pass these files to one of Flower's servers."""
        names = ("--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile")
        files = (self.authority, self.certificate, self.key)
        return [part for name, file in zip(names, files, strict=True) for part in (name, str(file))]


def make_server_files(folder: Path) -> ServerFiles:
    """Create a certificate authority, whose key is not stored, and a server certificate.

    The certificate is valid for 127.0.0.1 and localhost.
    """
    signer, key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = _certificate("fedmuon demo authority", signer, signer, None)
    server = _certificate("localhost", key, signer, authority)
    files = ServerFiles(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    files.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    files.certificate.write_bytes(server.public_bytes(Encoding.PEM))
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_secret(files.key, private)
    return files


def make_node_key(file: Path) -> Path:
    """Create a SuperNode's private key, and store the public key beside it with suffix .pub.

    The keys use the curve P-384 and OpenSSH's format.
    """
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    _write_secret(file, private)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    Path(f"{file}.pub").write_bytes(public)
    return file


def make_secret(file: Path) -> Path:
    """Create a file with 256 random bits in hexadecimal digits."""
    _write_secret(file, secrets.token_hex(32).encode())
    return file


def _write_secret(file: Path, content: bytes) -> None:
    file.touch(mode=0o600)
    file.write_bytes(content)


def store_control_key(file: Path, address: str, key: Path) -> None:
    """Store the key where `flwr` looks for the login credentials of the SuperLink at `address`."""
    plugin = OidcCliPlugin(address)
    plugin.store = FileCredentialStore(file)
    plugin.store_tokens(AccountAuthCredentials(key.read_text(encoding="ascii"), "none"))


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
) -> x509.Certificate:
    """Return a certificate for `key`.

    If `authority` is missing, the certificate is self-signed and may sign other certificates.
    """
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now, signs = datetime.datetime.now(datetime.UTC), authority is None
    uses = x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.subject if authority else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - LIFE)
        .not_valid_after(now + LIFE)
        .add_extension(x509.BasicConstraints(ca=signs, path_length=None), True)
        .add_extension(uses, True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
        .add_extension(signed_by, False)
    )
    if authority:
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        places = x509.SubjectAlternativeName([x509.DNSName("localhost"), address])
        builder = builder.add_extension(places, False)
    return builder.sign(signer, hashes.SHA384())
