"""The app as Flower packs it, and as separate processes with TLS and known keys run it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import small
from cryptography import x509
from deployments import NODES, gone
from flwr.common.config import flatten_dict
from safetensors.numpy import load_file
from test_client_metrics import same_client_records

from fedmuon.config.load import Config, dump, flatten, parse, unflatten
from fedmuon.core.errors import InputError, Interrupted
from fedmuon.experiments.engines.deployment import (
    SETTINGS,
    Deployment,
    deployed,
    executor,
    make_node_key,
    make_server_files,
)
from fedmuon.experiments.engines.processes import SCRIPTS, Processes, free_ports, processes_of
from fedmuon.experiments.run import execute
from fedmuon.federated.build import build_plan
from fedmuon.runs.directory import RunDirectory

pytestmark = pytest.mark.timeout(400)
needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="looks processes up in /proc")
ROOT = Path(__file__).resolve().parents[3]
REPEATING = 1  # a seed with which both rounds draw the same of NODES clients
RETURNED: list[int] = []  # SuperNodes that were killed and admitted again
SIX = ("--federation-config", "num-supernodes=6")


@pytest.fixture(scope="module")
def stranger(deployment: Deployment) -> subprocess.Popen[bytes]:
    """A SuperNode with a key of its own that nobody registered."""
    make_node_key(deployment.processes.folder / f"supernode-{NODES}.key")
    return deployment.start_supernode(NODES, free_ports(1)[0])


def kill(deployment: Deployment, number: int) -> None:
    """End a SuperNode as a power cut would, with its children."""
    name = f"supernode-{number}"
    deployment.processes.kill(name, executor(name))
    deployment.supernodes[number].wait()


def admitted(deployment: Deployment) -> int:
    """How often the SuperLink has admitted a SuperNode."""
    return deployment.processes.log("superlink").count("Activated node")


def revive(deployment: Deployment, number: int) -> None:
    """Start a SuperNode again until the SuperLink admits it, which believes for a minute that the
    dead one still lives."""
    end, known = time.monotonic() + 300, admitted(deployment)
    while time.monotonic() < end:
        node = deployment.supernodes[number] = deployment.start_supernode(number, free_ports(1)[0])
        while node.poll() is None:  # else it ended: not admitted yet
            if admitted(deployment) > known:
                RETURNED.append(number)
                return
            time.sleep(0.1)


def tiny(rounds: int, **tables: dict) -> Config:
    federation = {"clients": NODES, "per-round": 2, "rounds": rounds}
    return small(**{"federation": federation, **tables})


def distance(a: Path, b: Path) -> float:
    """The relative difference of two files' weights."""
    one, other = (load_file(file) for file in (a, b))
    ends = (np.linalg.norm(held - other[name]) / np.linalg.norm(held) for name, held in one.items())
    return float(max(ends))


CASES = [
    # Rounds whose draws may be mixed up; the short one has none, to tell what differs if both do.
    (2, {"steps": 2, "batch": 4}, {"name": "gaussian-smoothed-sign"}),
    (1, {"steps": 2}, {"name": "smoothed-polar"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "local", "orthogonalizer"), CASES)
def test_deployment_is_inline(
    deployment: Deployment,
    tmp_path: Path,
    rounds: int,
    local: dict,
    orthogonalizer: dict,
    request: pytest.FixtureRequest,
) -> None:
    config, seen = tiny(rounds, local=local, orthogonalizer=orthogonalizer), []
    if rounds > 1:
        request.getfixturevalue("stranger")
    inline, out = tmp_path / "inline", tmp_path / "deployed"
    execute(config, inline)
    summary = deployment.execute(config, out, lambda record: seen.append(record["round"]))
    assert seen == [*range(1, rounds + 1)] and summary["engine"] == "deployment"
    log = " ".join(deployment.processes.log("run").split())
    assert "takes the plain mean" not in log  # the mean of FedMuon's paper needs no note
    for name in ("model.safetensors", "momentum.safetensors"):
        assert distance(inline / name, out / name) <= 1e-12
    assert distance(inline / "model.safetensors", out / "initial.safetensors") > 1e-3
    assert (inline / "schedule.npy").read_bytes() == (out / "schedule.npy").read_bytes()


@pytest.mark.slow
def test_personal_parameters_stay_on_their_nodes(deployment: Deployment, tmp_path: Path) -> None:
    """The model that is shared is that inline; the nodes' own parts cannot be tested."""
    tables = {
        "data": {"name": "digits", "train": 60, "test": 20},
        "task": {"name": "network", "model": "mlp"},
        "local": {"recipe": "fedper", "personal": "head.*", "steps": 2},
    }
    config, inline, out = tiny(2, **tables), tmp_path / "inline", tmp_path / "deployed"
    execute(config, inline)
    deployment.execute(config, out)
    assert distance(inline / "model.safetensors", out / "model.safetensors") <= 1e-12
    assert (inline / "personal.safetensors").exists()
    assert not (out / "personal.safetensors").exists()
    tables["data"]["client-test"] = 0.3
    with pytest.raises(
        InputError, match=r"but in a deployment this model stays on the client's SuperNode"
    ):
        deployment.execute(tiny(2, **tables), tmp_path / "tested")


@pytest.mark.slow
def test_states_of_forty_odd_shapes_arrive(deployment: Deployment, tmp_path: Path) -> None:
    """All of them in each message, through the SuperLink; the server's step depends on them."""
    recipe = f"{Path(__file__).parents[2] / 'helpers' / 'odd_states.py'}:every"
    tables = {
        "data": {"name": "digits", "train": 60, "test": 20, "minimum": 1},
        "federation": {"clients": NODES, "per-round": 2, "rounds": 2},
        "local": {"recipe": recipe, "lr": 0.5, "steps": 2},
        "engine": {"dtype": "float64"},
    }
    config = parse(tables)
    inline, out = tmp_path / "inline", tmp_path / "deployed"
    execute(config, inline)
    deployment.execute(config, out)
    log = " ".join(deployment.processes.log("run").split())
    assert "fedmuon: The sizes of the clients differ" in log
    assert "your optimizer takes the plain mean" in log
    assert distance(inline / "model.safetensors", out / "model.safetensors") <= 1e-12


def states_of(deployment: Deployment, number: int) -> Path:
    """Where a SuperNode keeps the states of its client."""
    return deployment.processes.folder / f"supernode-{number}-states"


def stored_states(deployment: Deployment) -> set[Path]:
    """The states of all runs and clients."""
    return {*deployment.processes.folder.glob("supernode-*-states/*/*.safetensors")}


def scaffold(rounds: int, **tables: dict) -> Config:
    return tiny(rounds, local={"recipe": "scaffold", "steps": 2}, **tables)


def stop_after(round: int) -> Callable[[dict], None]:
    def watch(record: dict) -> None:
        if record["round"] == round:
            raise Interrupted(signal.SIGTERM)

    return watch


@pytest.mark.slow
def test_a_resumed_run_finds_the_states_of_its_clients(
    deployment: Deployment, tmp_path: Path
) -> None:
    """On the disks of their nodes, by its id. Its model, draws and records of clients are those
    inline."""
    federation = {"clients": NODES, "per-round": 1, "rounds": 2, "seed": REPEATING}
    output = {"clients": True, "checkpoint-every": 1}
    config = small(federation=federation, local={"recipe": "scaffold", "steps": 2}, output=output)
    inline, out, seen = tmp_path / "inline", tmp_path / "deployed", list[int]()
    execute(config, inline)
    first, second = (build_plan(config).participants(r).tolist() for r in range(2))
    assert first == second  # so the state is read that was written before the stop
    earlier = stored_states(deployment)
    with pytest.raises(Interrupted):
        deployment.execute(config, out, stop_after(1))
    run_id = (out / "run-id.txt").read_text()
    assert not (out / "summary.json").exists()
    summary = deployment.execute(config, out, lambda record: seen.append(record["round"]))
    states = stored_states(deployment) - earlier
    (number,) = first
    assert states and all(states_of(deployment, number) in file.parents for file in states)
    assert (out / "run-id.txt").read_text() == run_id
    assert seen == [2] and summary["engine"] == "deployment"
    assert distance(inline / "model.safetensors", out / "model.safetensors") <= 1e-12
    assert distance(inline / "model.safetensors", out / "initial.safetensors") > 1e-3
    assert (inline / "schedule.npy").read_bytes() == (out / "schedule.npy").read_bytes()
    same_client_records(inline, out)


@pytest.mark.slow
def test_a_node_that_lost_its_state_is_an_error(deployment: Deployment, tmp_path: Path) -> None:
    """Under the strict policy; with the state back in its place, the run resumes and is that
    inline."""
    config = scaffold(2, faults={"retries": 0}, engine={"name": "deployment"})
    schedule = [set(build_plan(config).participants(r).tolist()) for r in range(2)]
    victim = next(iter(schedule[0] & schedule[1]))
    place = states_of(deployment, victim)
    hidden = place.with_name("hidden-states")

    def hide(record: dict) -> None:
        if record["round"] == 1:
            place.rename(hidden)

    execute(scaffold(2), tmp_path / "inline")
    with pytest.raises(
        InputError, match=rf"node of client {victim} has lost the state of the client"
    ):
        deployment.execute(config, tmp_path / "out", hide)
    shutil.rmtree(place, ignore_errors=True)
    hidden.rename(place)
    deployment.execute(config, tmp_path / "out")
    found = tmp_path / "out" / "model.safetensors"
    assert distance(tmp_path / "inline" / "model.safetensors", found) <= 1e-12


@pytest.mark.slow
def test_a_supernode_killed_between_rounds_returns_with_its_states(
    deployment: Deployment, tmp_path: Path
) -> None:
    """It is asked again, and nothing is lost."""
    faults, engine = {"deadline": 40.0, "retries": 8}, {"name": "deployment"}
    config = scaffold(3, faults=faults, engine=engine)
    schedule = [set(build_plan(config).participants(r).tolist()) for r in range(2)]
    victim = next(iter(schedule[0] & schedule[1]))
    execute(scaffold(3), tmp_path / "inline")
    revival = threading.Thread(target=revive, args=(deployment, victim))

    def watch(record: dict) -> None:
        if record["round"] == 1:
            kill(deployment, victim)
            revival.start()

    deployment.execute(config, tmp_path / "out", watch)
    revival.join()
    found = tmp_path / "out" / "model.safetensors"
    assert distance(tmp_path / "inline" / "model.safetensors", found) <= 1e-12
    records = RunDirectory(tmp_path / "out").records()
    assert {fault["client"] for one in records for fault in one.get("faults", [])} == {victim}


@pytest.mark.slow
@pytest.mark.parametrize("trust", ["central", "local", "distributed"])
def test_client_level_deployed_is_that_inline(
    deployment: Deployment, tmp_path: Path, trust: str
) -> None:
    """Under local trust nodes send what is clipped and noisy, under distributed trust with a share
    of the noise and masked by keys that they keep meanwhile; else the server makes it so."""
    cohorts = "poisson" if trust == "central" else "fixed"
    rounds = 2 if trust == "distributed" else 1  # each message takes a node seconds
    known = {"level": "client", "noise": 0.5, "bound": 0.3, "insecure-reproducible-noise": True}
    config = tiny(
        rounds,
        local={"steps": 2, "lr": 0.1},
        privacy=known | {"trust": trust, "cohorts": cohorts},
        faults={"retries": 0},
        engine={"name": "deployment"},
    )
    summary = deployment.execute(config, tmp_path / "deployed")
    execute(config.model_copy(update={"engine": small().engine}), tmp_path / "inline")
    assert summary["privacy"]["trust"] == trust
    for name in ("model.safetensors", "momentum.safetensors"):
        assert distance(tmp_path / "inline" / name, tmp_path / "deployed" / name) <= 1e-12


@pytest.mark.slow
def test_an_unregistered_supernode_is_refused(
    deployment: Deployment, stranger: subprocess.Popen[bytes]
) -> None:
    assert stranger.wait(200) != 0
    said = deployment.processes.log(f"supernode-{NODES}")
    assert "Failed to activate" in said and "Receiving" not in said
    end = time.monotonic() + 200
    known = NODES + len(RETURNED)
    while (found := admitted(deployment)) < known:
        assert time.monotonic() < end
        time.sleep(0.2)
    assert found == known


@pytest.mark.slow
def test_too_few_supernodes_are_one_sentence(deployment: Deployment, tmp_path: Path) -> None:
    federation = {"clients": NODES + 2, "per-round": 2, "rounds": 1}
    engine = {"name": "deployment"}
    config = small(federation=federation, engine=engine, faults={"patience": 0.5})
    with pytest.raises(InputError, match="clients is 5, but only") as refusal:
        deployment.execute(config, tmp_path / "out")
    assert "\n" not in str(refusal.value)


@pytest.mark.slow
def test_an_interrupt_leaves_the_logs_and_nothing_else(tmp_path: Path) -> None:
    started: list[Deployment] = []
    with pytest.raises(Interrupted), deployed(1, False, tmp_path / "logs") as one:
        started.append(one)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)
    assert gone(started[0].processes.folder)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", started[0].port)) != 0
    assert (tmp_path / "logs" / "superlink.log").stat().st_size


def test_the_folder_of_a_deployment_that_never_began_is_new(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    RunDirectory(tmp_path).create(resume=False)
    (tmp_path / "mine.txt").touch()
    with pytest.raises(InputError, match="not empty"):
        RunDirectory(tmp_path).create(resume=False)


@needs_proc
def test_logs_that_cannot_be_kept_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "fedmuon.experiments.engines.deployment.Deployment",
        lambda processes, *given: SimpleNamespace(processes=processes),
    )
    (tmp_path / "logs").touch()
    with pytest.raises(InputError, match="the news"), deployed(1, logs=tmp_path / "logs") as one:
        raise InputError("the news")
    assert "cannot write the logs" in caplog.text
    assert not one.processes.folder.exists()


@needs_proc
def test_children_in_other_groups_are_ended_too() -> None:
    """A child that makes a session of its own and does not listen to SIGTERM."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up'); time.sleep(60)"
    parent = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-uc', {deaf!r}], start_new_session=True)\n"
        "time.sleep(60)"
    )
    processes = Processes({})
    processes.start("parent", [sys.executable, "-c", parent])
    end = time.monotonic() + 200
    while "up" not in processes.log("parent") and time.monotonic() < end:
        time.sleep(0.05)
    assert len(processes_of(processes.folder)) == 2
    processes.stop()
    assert gone(processes.folder)


def test_every_port_is_another() -> None:
    assert len(set(free_ports(50))) == 50


def test_secrets_are_private_and_name_loopback(tmp_path: Path) -> None:
    files = make_server_files(tmp_path)
    key = make_node_key(tmp_path / "node.key")
    assert [file.stat().st_mode & 0o077 for file in (files.key, key)] == [0, 0]
    server = x509.load_pem_x509_certificate(files.certificate.read_bytes())
    server.verify_directly_issued_by(x509.load_pem_x509_certificate(files.authority.read_bytes()))
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert Path(f"{key}.pub").read_text().startswith("ecdsa-sha2-nistp384 ")


def test_the_run_config_holds_every_default() -> None:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    held = flatten_dict(table)
    assert held.pop("out") == held.pop("options") == ""
    wanted = flatten(Config())
    resolved = ("data.normalize", "federation.aggregate")  # by whatever task and recipe are chosen
    assert held == {**wanted, **dict.fromkeys(resolved, "auto")}
    assert unflatten(held) == Config()
    assert {key: type(value) for key, value in held.items()} == {
        key: type(value) for key, value in wanted.items()
    }


@pytest.mark.slow
def test_the_bundle_is_small_and_holds_the_app_only(tmp_path: Path) -> None:
    command = [f"{SCRIPTS}/flwr", "build", "--app", str(ROOT)]
    environment = {**os.environ, **SETTINGS, "FLWR_HOME": str(tmp_path / "home")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    (bundle,) = tmp_path.glob("*.fab")
    assert bundle.stat().st_size < 3_000_000  # uncompressed; Flower's limit is 10 MB
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(bundle).namelist()}
    assert tops == {"pyproject.toml", "LICENSE", "clients", "fedmuon", "server", ".info"}


@pytest.mark.slow
@needs_proc
def test_flwr_run_as_in_the_readme(tmp_path: Path) -> None:
    """`flwr run .` simulates on a Ray of its own; the SuperLink that it leaves is ended here.

    It would take a stranger's that answers at its usual port, so it has another one; and it gives
    its SuperLink 15 seconds to start, which a busy machine may miss: then it is typed again.
    """
    config = small(federation={"rounds": 2})
    execute(config, tmp_path / "inline")
    names = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
    ports = {name: str(port) for name, port in zip(names, free_ports(2), strict=True)}
    processes = Processes({**SETTINGS, **ports, "RAY_ADDRESS": "local"})
    try:
        file, out = processes.folder / "run.toml", tmp_path / "out"
        file.write_text(f'out = "{out}"\n' + dump(config))
        code, late = 1, "Failed to start local SuperLink within"
        for attempt in range(1, 6):
            command = ["flwr", "run", ROOT, "--stream", *SIX, "--run-config", file]
            code = processes.start("run", command).wait(300)
            if processes.log("run").count(late) < attempt:
                break
        assert code == 0, processes.log("run")
        assert (
            distance(tmp_path / "inline" / "model.safetensors", out / "model.safetensors") <= 1e-12
        )
    finally:
        processes.stop()
    assert gone(processes.folder)
