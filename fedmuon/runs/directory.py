"""A run folder: every file is written completely or not at all, and a killed run can be resumed.

A run resumes from its checkpoint. The checkpoint is one file with the model, the server states and
the number of the round. The checkpoint names its run, contains its own digest, and is always
replaced as a whole. The previous checkpoint stays, in case the newest checkpoint is damaged.
`rounds.jsonl` may contain later rounds than the checkpoint. A resumed run removes the records of
these rounds. `SHA256SUMS` contains the checksums of the files that no longer change.
"""

import contextlib
import json
import logging
import math
import os
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedmuon.core import files
from fedmuon.core.arrays import digest_of_arrays, read_arrays, read_metadata, safetensors_bytes
from fedmuon.core.errors import InputError, NonFinite, instead
from fedmuon.core.files import AFRESH, Record, digest, mendable, sums_of, write_bytes
from fedmuon.core.locks import DRIVER, LOCK, require_place

if TYPE_CHECKING:  # numpy is imported only to write or read a checkpoint, or for a ledger
    import numpy as np

    from fedmuon.privacy.ledger import Ledger

__all__ = ["Record", "RunDirectory"]

FIXED = ("config.toml", "partition.npz", "schedule.npy", "initial.safetensors")
ENDS = ("model.safetensors", "momentum.safetensors", "rounds.jsonl", "summary.json")
CLIENTS = "clients.jsonl"  # records of clients, if they are requested
CLIENT_NAMES = "client-names.json"  # the names of clients, if a column or the user names them
CLOCK = "clock.npz"  # the timetable of simulated devices
LEDGERS = ("ledger.jsonl", "ledger.heads")  # of a private run; see fedmuon.privacy.ledger
LEDGER_LOST = (
    "contains a private run that has begun, but its ledger is missing, so the spent epsilon is "
    "unknown"
)
RUN_ID = "run-id.txt"  # identifies the run to nodes that store client states
PERSONAL_MODELS = "personal.safetensors"
AVERAGE_MODEL = "average.safetensors"  # the average of the models after the last rounds
PUBLISHED_MODEL = "published.safetensors"  # the final model with [stability] output-noise
CLIENT_TEXTS = "texts.csv"  # losses of a language model on the text of each client
WORKER_PROFILES = "worker-profiles.json"  # the kinds of work of each Ray worker, by rounds
CONTINUATIONS = "continuations.json"  # what a language model writes before and after training
MAYBE = ("routes.txt", "objects.json", CLIENT_NAMES, CLOCK, RUN_ID, *LEDGERS, CLIENTS,
         "personal.csv", PERSONAL_MODELS, AVERAGE_MODEL, PUBLISHED_MODEL, CLIENT_TEXTS,
         CONTINUATIONS, WORKER_PROFILES)  # fmt: skip
# The files in MAYBE that have a checksum only in finished runs.
LATE = (*LEDGERS, CLIENTS, "personal.csv", PERSONAL_MODELS, AVERAGE_MODEL, PUBLISHED_MODEL,
        CLIENT_TEXTS, CONTINUATIONS, WORKER_PROFILES)  # fmt: skip
# Files with samples or tensors, and files that may be as large.
READ_WHOLE = {"config.toml", "rounds.jsonl", "summary.json"}
NOT_SHOWN = {*FIXED, *ENDS, CLIENTS, PERSONAL_MODELS, AVERAGE_MODEL, PUBLISHED_MODEL} - READ_WHOLE
LARGE = 1 << 20  # a larger file is not read completely only to list its run, in bytes
AUDIT = "one-run.json"  # exists in runs with canaries
FAILED = "failed.txt"  # the reason why the run has no finite model
LOGS = "logs"  # logs of a deployment; they may exist before the run starts
CLIENT_STATES = "client-states"  # the folder of client states
CHECKPOINTS = ("checkpoint.safetensors", "checkpoint-previous.safetensors")
# The horizontal axes of curves, with their labels.
AXES = {
    "rounds": "round",
    "seconds": "simulated seconds",
    "bytes-up": "MB sent up",
    "bytes": "MB sent up and down",
}
BEFORE = "_before"  # end of the names of losses of the untrained model on unseen clients
UNTRAINED = "untrained"  # key of the summary with the results of the untrained model
SO_FAR = ("bytes_down", "bytes_up", "simulated_seconds")  # these are zero before the first round
NO_FILES: Mapping[str, bytes] = {}
Checkpoint = tuple[dict[str, "np.ndarray"], dict[str, str]]  # arrays and their metadata
logger = logging.getLogger(__name__)


@dataclass
class RunDirectory:
    """A run folder, with methods that write, check and read its files."""

    path: Path
    _mark: str = field(default="", init=False)  # set when it can no longer change
    _head: str = field(default="", init=False)  # hash of the ledger at the last checkpoint

    def create(self, resume: bool) -> None:
        """Create the folder. Raise an error if it has files, unless they are a run to resume."""
        with mendable(self.path, "create"):
            self.path.mkdir(parents=True, exist_ok=True)
            entries = self._held()
        if entries and not resume:
            can = "config.toml" in entries and not self.lost()
            or_resume = ", or resume the run with --resume" if can else ""
            raise InputError(
                f"{self.path} is not empty. Choose another folder with --out{or_resume}."
            )
        visible = [name for name in entries - {files.SUMS} if not name.startswith(".")]
        if visible and "config.toml" not in entries:
            raise self._not_a_run()
        files.remove_drafts(self.path)

    def config_to_resume(self) -> Path:
        """Return the path of config.toml of the run to resume.

        Raise an error if the file is missing. With a wrong path and --resume, the command would
        otherwise start a new run with the defaults.
        """
        file = self.path / "config.toml"
        if file.exists():
            return file
        with mendable(self.path, "read"):
            if (exists := self.path.exists()) and not self.path.is_dir():
                raise InputError(f"{self.path} is a file, not a run folder: check the path")
            entries = self._held() if exists else set()
        if entries:
            raise self._not_a_run()
        problem = f"{self.path} has no config.toml" if exists else f"{self.path} does not exist"
        raise InputError(
            f"{problem}, so there is no run to resume in this folder. Check the path, or leave "
            "--resume out to begin a new run."
        )

    def _held(self) -> set[str]:
        """Return the names of the files and folders in the folder, without its locks.

        If a run stopped before its first file, its temporary files are left out, too, because the
        folder counts as new.
        """
        entries = {entry.name for entry in self.path.iterdir()} - {LOCK, DRIVER}
        if "config.toml" in entries:
            return entries
        checksums = {files.SUMS} if set(sums_of(self.path)) <= {*FIXED, *MAYBE} else set()
        return (
            entries - {name for name in entries if name.endswith(files.PART)} - checksums - {LOGS}
        )

    def _not_a_run(self) -> InputError:
        """Return the error for a folder that contains files but no config.toml."""
        if content := files.several_runs(self.path):
            return InputError(f"{self.path} {content}")
        if "config.toml" in sums_of(self.path):
            return InputError(
                f"{self.path / 'config.toml'} is missing, so the folder is damaged: restore the "
                f"file from a copy, or {AFRESH} and without --resume"
            )
        return InputError(
            f"{self.path} is not a run folder, because it contains files but no config.toml. Check "
            "the path. To start a new run, leave --resume out and choose another folder with --out."
        )

    def lost(self) -> str:
        """Return why the unfinished run or audit cannot be resumed.

        Return an empty text if it can be resumed.
        """
        if (self.path / AUDIT).exists() and AUDIT not in sums_of(self.path):
            return (
                "contains an audit that did not finish, and the random choices of its canaries "
                "are lost"
            )
        if (self.path / "summary.json").exists():
            return ""
        ledger, heads = (self.path / name for name in LEDGERS)
        if not ledger.exists() and not heads.exists():
            if not any(name in sums_of(self.path) for name in LEDGERS):
                # without a release, the run can start again with the same result
                return LEDGER_LOST if self.released() else ""
            return (
                "contains a finished private run without its ledger. The privacy budget of this "
                "run is already spent"
            )
        if not ledger.exists():
            return f"has {heads.name}, but no {ledger.name}, so the spent epsilon is unknown"
        has_checkpoint = any((self.path / name).exists() for name in CHECKPOINTS)
        if "summary.json" in sums_of(self.path) and not has_checkpoint:
            return (
                "contains a finished private run without its summary.json. The privacy budget of "
                "this run is already spent"
            )
        return self.ledger().lost

    def ledger(self) -> "Ledger":
        """Return the ledger of a private run. Raise an error if it is known to lack a release."""
        from fedmuon.privacy.ledger import Ledger  # imports numpy, so only if needed

        return Ledger.read(self.path / LEDGERS[0], self.opened_ledger())

    def opened_ledger(self) -> bool:
        """Return whether a private run in this folder has certainly opened its ledger.

        A run writes rounds.jsonl only after the first line of its ledger.
        """
        return (self.path / "rounds.jsonl").exists()

    def released(self) -> bool:
        """Return whether the config is private and the run has made a release.

        A damaged config counts as not private. A custom recipe counts as not private, too.
        """
        from fedmuon.config.incompatible import is_private  # imports pydantic, so only if needed
        from fedmuon.config.load import load

        with contextlib.suppress(InputError, OSError):
            return self.opened_ledger() and is_private(load(self.path / "config.toml"))
        return False

    def require_resumable(self) -> None:
        """Raise an error if the run cannot be resumed. No file is changed."""
        if reason := self.lost():
            raise InputError(f"{self.path} {reason}: {AFRESH}")

    def require_intact(self) -> None:
        """Raise an error if a file that is needed to resume an unfinished run is damaged."""
        files.require_sound(self.path, [name for name in FIXED if (self.path / name).exists()])
        if checkpoint := self.newest_checkpoint():
            self.first_records(int(checkpoint[1]["round"]))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Save the error to a file if numbers are no longer finite within this context."""
        with mendable(self.path / FAILED, "write"):
            (self.path / FAILED).unlink(missing_ok=True)
        try:
            yield
        except NonFinite as error:
            with contextlib.suppress(InputError):  # keep the error that stopped the run
                write_bytes(self.path / FAILED, f"{error}\n".encode())
            raise

    def failure(self) -> str:
        """Return why the run failed, or an empty text if the run did not fail."""
        file = self.path / FAILED
        with mendable(file, "read"):
            return files.read_text(file).strip() if file.exists() else ""

    def fix(self, contents: Mapping[str, bytes], growing: Mapping[str, bytes] = NO_FILES) -> None:
        """Write the files that depend only on the config, or check that existing files match.

        Also write the first bytes of files that grow later, unless these files exist or the run has
        ended.
        """
        for name, content in contents.items():
            file = self.path / name
            with mendable(file, "read"):
                other = file.exists() and files.read_bytes(file) != content
            if other:
                raise InputError(
                    f"{file} does not match this config. The file may be damaged, or the config "
                    "or the data may have changed. Use the config and the data with which the run "
                    f"started, or {AFRESH}."
                )
        missing = {name for name in contents if not (self.path / name).exists()}
        if (self.path / "summary.json").exists():  # its checksums exist and are not computed again
            self.require_sound(but=missing)
        else:
            files.announce(self.path, contents)
            missing |= {name for name in growing if not (self.path / name).exists()}
        # config.toml comes first: without it, a folder with other files is not a run to resume
        for name in sorted(missing, key=lambda name: (name != "config.toml", name)):
            write_bytes(self.path / name, {**growing, **contents}[name])
        self._mark = ""
        self._mark = self.mark

    def require_sound(self, but: Collection[str] = (), ended: bool = False) -> None:
        """Raise an error if a file of the run is damaged. Files named in `but` are not checked.

        Before the run finishes, the method checks the files written before the first round.
        Afterwards, the method checks every file. If `ended` is true and the summary has a checksum,
        the summary must exist.
        """
        with mendable(self.path, "read"):
            present = {entry.name for entry in self.path.iterdir()} | {*sums_of(self.path)}
        finished = (self.path / "summary.json").exists() or (ended and "summary.json" in present)
        maybe = [name for name in MAYBE if name in present and (finished or name not in LATE)]
        names = [*FIXED, *maybe, *(ENDS if finished else ())]
        files.require_sound(self.path, [name for name in names if name not in but])

    def require_unchanged(self, brief: bool = False) -> None:
        """Raise an error if a file of a finished run is missing or was changed.

        If `brief` is true, large files of samples or tensors are not read. Only the size of large
        tensor files is checked.
        """
        with mendable(self.path, "read"):
            existing = [
                self.path / name for name in NOT_SHOWN if brief and (self.path / name).exists()
            ]
            large = [file for file in existing if file.stat().st_size > LARGE]
        self.require_sound(but=[file.name for file in large])
        for file in large:
            if file.suffix == ".safetensors":
                read_metadata(file)
        self.require_fixed()

    def require_fixed(self) -> None:
        """Raise an error if a file is missing that each run writes before its first round.

        This check is skipped if the run has no finished round and no summary.
        """
        log = self.path / "rounds.jsonl"
        with mendable(self.path, "read"):
            begun = log.exists() and log.stat().st_size > 0  # if empty, some files may be missing
        if begun or (self.path / "summary.json").exists():
            missing = [name for name in FIXED if not (self.path / name).exists()]
            files.require_sound(self.path, missing)

    def require_config(self) -> None:
        """Raise an error if config.toml is damaged.

        Other files may be missing if the run was killed early.
        """
        files.require_sound(self.path, ["config.toml"])

    @property
    def mark(self) -> str:
        """A digest of the files written before the first round. The digest identifies the run."""
        if self._mark:
            return self._mark
        sums = sums_of(self.path)
        return digest("".join(sums.get(name, "") for name in FIXED).encode())

    def identity(self) -> dict[str, bytes]:
        """Return the name and the content of the file with the id of the run.

        The id of a new run is random, so that runs with the same config have different ids. A
        resumed run keeps its id. Runs of older versions have no id.
        """
        file, log = self.path / RUN_ID, self.path / "rounds.jsonl"
        if not file.exists() and not (log.exists() and log.stat().st_size):
            return {RUN_ID: f"{secrets.token_hex(16)}\n".encode()}
        if not file.exists() and RUN_ID not in sums_of(self.path):
            return {}
        files.require_sound(self.path, [RUN_ID])
        return {RUN_ID: files.read_bytes(file)}

    @property
    def run_id(self) -> str:
        """The id of the run. Nodes use this id to find the stored states of their clients."""
        file = self.path / RUN_ID
        return files.read_text(file).strip() if file.exists() else self.mark

    def checkpoint(self, round: int, arrays: Mapping[str, "np.ndarray"], ledger: str = "") -> None:
        """Write the arrays of a server state after a round as the new checkpoint.

        For a private run, `ledger` is the hash of the last entry in its ledger.
        """
        require_place(self.path)
        for name in ("rounds.jsonl", *([CLIENTS] if (self.path / CLIENTS).exists() else [])):
            log = self.path / name
            with mendable(log, "write"), open(log, "ab", opener=files.regular) as records:
                os.fsync(records.fileno())  # records of the rounds before the checkpoint
        metadata = {"round": str(round), "ledger": ledger, "run": self.mark}
        content = safetensors_bytes(
            arrays, {**metadata, "digest": digest_of_arrays(arrays, metadata)}
        )
        last, previous = (self.path / name for name in CHECKPOINTS)
        with mendable(last, "write"):
            if last.exists():
                last.replace(previous)
        write_bytes(last, content)
        self._head = ledger

    def newest_checkpoint(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, or None if there is no checkpoint.

        Raise an error if all checkpoints are damaged.
        """
        paths = [self.path / name for name in CHECKPOINTS if (self.path / name).exists()]
        for number, file in enumerate(paths):
            with contextlib.suppress(InputError):
                arrays, metadata = read_arrays(file)
                if metadata.pop("digest", "") != digest_of_arrays(arrays, metadata):
                    raise InputError(f"{file} is damaged")
                if metadata.get("run") != self.mark:
                    raise InputError(f"{file} belongs to another run")
                if number:
                    message = (
                        "fedmuon: the checkpoint %s is damaged. The previous checkpoint is used "
                        "instead"
                    )
                    logger.warning(message, paths[0])
                self._head = metadata.get("ledger", "")
                return arrays, metadata
        if paths:
            raise InputError(
                f"every checkpoint in {self.path} is damaged or belongs to another run: restore "
                f"the checkpoints from a copy, or {AFRESH}"
            )
        return None

    def saved_round(self) -> int | None:
        """Return the number of the round in the last checkpoint, or None without a checkpoint."""
        with contextlib.suppress(InputError):
            return int(read_metadata(self.path / CHECKPOINTS[0]).get("round", 0))
        return None

    def saved_rounds(self) -> list[int]:
        """Return the numbers of the rounds in all readable checkpoints."""
        rounds = []
        for name in CHECKPOINTS:
            with contextlib.suppress(InputError):
                rounds.append(int(read_metadata(self.path / name).get("round", 0)))
        return rounds

    def forget_checkpoints(self) -> None:
        """Remove the checkpoints, which a finished run does not need."""
        with mendable(self.path, "write to"):
            for name in CHECKPOINTS:
                (self.path / name).unlink(missing_ok=True)

    def is_finite(self) -> bool:
        """Return whether the last checkpoint has only finite numbers.

        Without a checkpoint, return true.
        """
        arrays, _ = self.newest_checkpoint() or ({}, {})
        return all(bool((abs(value) < math.inf).all()) for value in arrays.values())

    def ledger_head(self) -> str | None:
        """Return the hash of the ledger's last entry when the run was last saved.

        Return None if the run was never saved.
        """
        if summary := self.summary():
            return summary.get("privacy", {}).get("ledger")
        if not self._head:
            self.newest_checkpoint()
        return self._head or None

    def append(self, record: Record) -> None:
        """Append the record of a round to rounds.jsonl."""
        require_place(self.path)
        files.append(self.path / "rounds.jsonl", [files.sealed(record, self.mark)])

    def append_clients(self, records: Sequence[Record]) -> None:
        """Append records of a round's clients to clients.jsonl, before the record of the round."""
        require_place(self.path)
        if records:
            lines = [files.sealed(record, self.mark) for record in records]
            files.append(self.path / CLIENTS, lines)

    def records(self) -> list[Record]:
        """Return the records in rounds.jsonl that come before the first damaged line."""
        mark = self.mark
        if records := _records(files.whole_lines(self.path / "rounds.jsonl"), mark):
            self._mark = mark  # the lines contain the mark, so it can no longer change
        return records

    def rounds_begun(self) -> int:
        """Return the number of lines in rounds.jsonl, whether or not they are damaged.

        The ledger of a private run must have an entry for each of these rounds, even if the rounds
        come after the checkpoint, because each of them made its releases.
        """
        return len(files.whole_lines(self.path / "rounds.jsonl"))

    def client_records(self) -> list[Record]:
        """Return the records of finished rounds in clients.jsonl, up to the first damaged line."""
        return self._of_clients(self.records())[1]

    def first_records(self, rounds: int) -> list[Record]:
        """Return the records of the first rounds. Raise an error if a line is damaged."""
        file = self.path / "rounds.jsonl"
        lines = files.whole_lines(file)[:rounds]
        if len(records := _records(lines, self.mark)) < rounds:
            raise InputError(
                f"line {len(records) + 1} of {file} is damaged, is missing or belongs to another "
                f"run: restore the file from a copy, or {AFRESH}"
            )
        return records

    def cut_back(self, rounds: int) -> None:
        """Keep only the first lines of rounds.jsonl, after `first_records` has checked them."""
        lines = files.whole_lines(self.path / "rounds.jsonl")[:rounds]
        write_bytes(self.path / "rounds.jsonl", "".join(lines).encode())

    def cut_back_clients(self, records: Sequence[Record]) -> None:
        """Keep only the clients' records of the rounds with these records.

        All of the clients' records must exist.
        """
        lines, of_clients = self._of_clients(records)
        if len(of_clients) < sum(len(answered(record)) for record in records):
            raise InputError(
                f"line {len(of_clients) + 1} of {self.path / CLIENTS} is damaged, is missing or "
                f"belongs to another run: restore the file from a copy, or {AFRESH}"
            )
        write_bytes(self.path / CLIENTS, "".join(lines).encode())

    def _of_clients(self, records: Sequence[Record]) -> tuple[list[str], list[Record]]:
        """Return the lines and records of these rounds in clients.jsonl.

        Stop before the first damaged line.
        """
        expected = [(record["round"], client) for record in records for client in answered(record)]
        valid_lines: list[str] = []
        valid_records: list[Record] = []
        lines, mark = files.whole_lines(self.path / CLIENTS), self.mark
        for line, pair in zip(lines, expected, strict=False):
            record = files.unsealed(line, mark)
            if record is None or (record.get("round"), record.get("client")) != pair:
                break
            valid_lines.append(line)
            valid_records.append(record)
        return valid_lines, valid_records

    def finish(
        self,
        model: bytes,
        momentum: bytes,
        summary: Record,
        tables: Mapping[str, bytes] = NO_FILES,
    ) -> None:
        """Write the model, the momentum, and tables if there are any. Write the summary last.

        Then remove the checkpoints.
        """
        contents = {
            **tables,
            "model.safetensors": model,
            "momentum.safetensors": momentum,
            "summary.json": (json.dumps(summary, indent=2) + "\n").encode(),
        }
        logs = [self.path / name for name in ("rounds.jsonl", *LATE)]
        with mendable(self.path, "read"):
            ended = {file.name: files.read_bytes(file) for file in logs if file.exists()}
        files.announce(self.path, {**ended, **contents})
        for name, content in contents.items():
            write_bytes(self.path / name, content)
        self.forget_checkpoints()

    def summary(self) -> Record | None:
        """Return the summary of the run, or None if the run has not finished."""
        file = self.path / "summary.json"
        if not file.exists():
            return None
        files.require_sound(self.path, [file.name])
        return json.loads(files.read_text(file))

    def finished(self) -> Record:
        """Return the summary of a finished run. Otherwise, raise an error with the reason."""
        if (summary := self.summary()) is not None:
            return summary
        if not self.path.exists():
            message = f"the folder {self.path} does not exist. Choose a folder with a finished run."
        elif not (self.path / "config.toml").exists():
            message = f"{self.path} contains no run. Choose the folder of a finished run."
        elif reason := self.failure():
            message = (
                f"the run in {self.path} failed ({reason.rstrip('.')}). Choose a run that finished."
            )
        else:
            message = (
                f"the run in {self.path} has not finished. Finish it with --resume, or choose a "
                "finished run."
            )
        raise InputError(message)


def client_records(folder: Path) -> list[Record]:
    """Return the records in the file clients.jsonl of a run folder. The run may be unfinished.

    Raises:
        InputError: If there are no records, or they are damaged.
    """
    directory = RunDirectory(folder)
    finished = directory.summary() is not None
    if not (folder / CLIENTS).exists() and CLIENTS not in sums_of(folder):
        raise InputError(
            f"the run in {folder} has no records of clients. Run it again in another folder with "
            "[output] clients = true, or with --clients."
        )
    if finished:
        files.require_sound(folder, [CLIENTS])
    return directory.client_records()


def traffic_of(rounds: Sequence[Record]) -> tuple[int, int] | None:
    """Return (down, up): the total bytes that a run sent to clients, and received from clients.

    Return None if the records of a round do not contain these numbers. Older versions of fedmuon
    did not record these numbers.
    """
    if not all("bytes_up" in record for record in rounds):
        return None
    down, up = (sum(record[name] for record in rounds) for name in ("bytes_down", "bytes_up"))
    return down, up


def from_start(rounds: Sequence[Record], summary: Record | None) -> list[Record]:
    """Return the records of all rounds, preceded by a record of the untrained model as round 0.

    Round 0 comes from the summary of a finished run. It includes the losses on unseen clients.
    Unfinished runs and runs of older versions start with round 1.
    """
    start = (summary or {}).get(UNTRAINED)
    if not summary or not rounds or not start:
        return [*rounds]
    nothing = {name: 0 for name in SO_FAR if name in rounds[0]}
    unseen = {name.removesuffix(BEFORE): value for name, value in losses_before(summary).items()}
    return [{"round": 0, **nothing, **start, **unseen}, *rounds]


def losses_before(summary: Record) -> Record:
    """Return the losses of the untrained model on clients that do not train, by their full names.

    The names end with `BEFORE`.
    """
    return {name: value for name, value in summary.items() if name.endswith(f"_loss{BEFORE}")}


def positions(rounds: Sequence[Record], x: str = "rounds", name: str = "the run") -> list[float]:
    """Return the position of each round of a run on the horizontal axis of its curves.

    Args:
        rounds: The records of all rounds from the first on, evaluated or not.
        x: `rounds`, `seconds`, `bytes-up` or `bytes`. `seconds` are the simulated seconds of
            `[devices]`. `bytes-up` is the number of megabytes that clients have sent until the end
            of the round. `bytes` also counts the megabytes that the server has sent.
        name: The name of the run in error messages.

    Raises:
        InputError: If `x` is none of these names, or if a round has no value for `x`.
    """
    if x not in AXES:
        raise InputError(f"x = {x!r} is not a valid axis of curves: {instead(x, AXES)}")
    if x == "rounds":
        return [record["round"] for record in rounds]
    names, cause = (
        ("simulated_seconds",),
        "the run does not simulate devices. Set [devices] mode and repeat the run in another "
        "folder",
    )
    if x != "seconds":
        names = ("bytes_up",) if x == "bytes-up" else ("bytes_up", "bytes_down")
        cause = "an earlier version of fedmuon wrote the run. Repeat the run in another folder"
    values, total = [], 0.0
    for record in rounds:
        if missing := [key for key in names if key not in record]:
            raise InputError(
                f"{name} does not contain the value {missing[0]} of round {record['round']}, "
                f"because {cause}, or choose x = 'rounds'."
            )
        value = sum(record[key] for key in names)
        total = value if x == "seconds" else total + value / 1e6
        values.append(total)
    return values


def answered(record: Record) -> list[int]:
    """Return the clients whose replies the server used in a round, in ascending order."""
    return sorted(set(record["participants"]) - set(record.get("dropped", ())))


def _records(lines: Sequence[str], run: str) -> list[Record]:
    """Parse the records of rounds 1, 2, ... of this run, and stop before the first damaged line."""
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        record = files.unsealed(line, run)
        if record is None or record.get("round") != number:
            break
        records.append(record)
    return records
