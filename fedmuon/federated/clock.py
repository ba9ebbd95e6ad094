"""The virtual clock: simulate when devices are available, how long they take, and who replies.

Time is simulated, not measured. The times depend on the config, the sizes of messages and the
numbers of samples, but not on training results. All rounds can therefore be computed before the
first one, and all engines use the same times.
"""

import csv
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedmuon.config.load import Config
from fedmuon.config.schema import biased_participation
from fedmuon.core.errors import InputError
from fedmuon.core.files import read_text
from fedmuon.core.rng import Draw, generator

# Hardware keys of a device. The index of a key is the block of its draw.
HARDWARE = ("speed", "bandwidth-down", "bandwidth-up")
ATTEMPTS = 100  # maximum number of attempts at a round without replies
LONGEST = 1e15  # maximum seconds of a client's round, and of the keys of [devices]
ZONE, THERE = 3, 4  # blocks of the draws of time zones and of random availability


@dataclass(frozen=True)
class Timetable:
    """The simulated schedule of a run: who takes part in each round, and when each round ends.

    Attributes:
        selected: The clients that the server selected in each round, sorted.
        answered: The clients whose replies the server used in each round, sorted.
        seconds: The simulated time [R] at which each round ended.
        uniform: Whether each cohort is a uniform sample of all clients.
        versions: For each client in `answered`, the version of the model from which the client
            started. Version r is the model after r rounds. The tuple is empty if every client
            starts from the newest model.
        lost: For each round [R], the number of clients that received the model but are not in
            `selected`. In the asynchronous modes, these clients were lost, or their replies were
            discarded. Otherwise, they took part in attempts without a reply.
        weights: For each client in `answered`, the weight of its reply. The tuple is empty if every
            client starts from the newest model.
        mixes: Whether a reply pulls the newest model towards the client's model (FedAsync), instead
            of adding the change that the client made to the model that it received.
        discarded: For each round [R], the number of replies that were discarded because they were
            too late. The tuple is empty if no reply is discarded.
    """

    selected: tuple[np.ndarray, ...]
    answered: tuple[np.ndarray, ...]
    seconds: np.ndarray
    uniform: bool
    versions: tuple[np.ndarray, ...] = ()
    lost: tuple[int, ...] = ()
    weights: tuple[np.ndarray, ...] = ()
    mixes: bool = False
    discarded: tuple[int, ...] = ()

    def oldest(self, round: int) -> int:
        """Return the oldest model version that a reply in this round or a later round needs."""
        return min((int(versions.min()) for versions in self.versions[round:]), default=round)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the timetable as arrays, in which rows with fewer clients end with -1."""
        widest = max(map(len, self.selected))

        def table(rounds: Sequence[np.ndarray]) -> np.ndarray:
            padded = np.full((len(rounds), widest), -1, np.int64)
            for row, clients in zip(padded, rounds, strict=True):
                row[: len(clients)] = clients
            return padded

        return {
            "selected": table(self.selected),
            "answered": table(self.answered),
            "seconds": self.seconds,
            **({"versions": table(self.versions)} if self.versions else {}),
        }


@dataclass(frozen=True)
class Devices:
    """The devices of all clients: how long a round takes, and when each client is available.

    Attributes:
        seed: The seed of the run.
        needed: For each client [N], seconds from the server's message to the client's reply.
        dropout: Probability that a client is lost during a round.
        share: Probability that a client is available, or the available share of a day.
        day: Length in seconds of a day, or of a trace, which then repeats.
        zones: The start of each client's day [N], as a share of the day, or None without days.
        spans: For each client, the sorted intervals [T, 2] in which the client is available, or
            None without a trace.
    """

    seed: int
    needed: np.ndarray
    dropout: float = 0.0
    share: float = 1.0
    day: float = 0.0
    zones: np.ndarray | None = None
    spans: tuple[np.ndarray, ...] | None = None

    def until_there(self, now: float, round: int, attempt: int = 0) -> np.ndarray:
        """Return, for each client, the seconds from `now` until the client is available.

        The result is 0 for an available client. With random availability, the result is infinite
        for an unavailable client, because availability does not change during an attempt at a
        round.
        """
        clients = len(self.needed)
        if self.spans is not None:
            return np.array([_wait(spans, now % self.day, self.day) for spans in self.spans])
        if self.zones is not None:
            phase = (now / self.day + self.zones) % 1.0
            return np.where(phase < self.share, 0.0, (1.0 - phase) * self.day)
        if self.share < 1.0:
            rng = generator(self.seed, Draw.DEVICE, round=round, step=attempt, block=THERE)
            return np.where(rng.random(clients) < self.share, 0.0, math.inf)
        return np.zeros(clients)

    def lost_after(self, client: int, round: int, attempt: int = 0) -> float:
        """Return the seconds after which a client is lost in this round, or infinity."""
        if not self.dropout:
            return math.inf
        rng = generator(self.seed, Draw.DEVICE, round=round, client=client, step=attempt)
        chance, share = rng.random(2)
        return float(share * self.needed[client]) if chance < self.dropout else math.inf

    def choose(
        self, now: float, round: int, many: int, attempt: int = 0, barred: Collection[int] = ()
    ) -> tuple[float, np.ndarray]:
        """Draw `many` clients uniformly from the available clients that are not in `barred`.

        If fewer clients are available, choose all available clients. If no client is available,
        wait until at least one is available.

        Returns:
            The time after the wait, and the sorted clients. With random availability, the second
                array may be empty.
        """
        rng = generator(self.seed, Draw.SCHEDULE, round=round, step=attempt)
        if not barred and self.zones is None and self.spans is None and self.share == 1.0:
            return now, np.sort(rng.choice(len(self.needed), many, replace=False))
        waits = self.until_there(now, round, attempt)
        waits[[*barred]] = math.inf
        if not math.isfinite(wait := float(waits.min())):
            return now, np.empty(0, np.int64)
        available = np.flatnonzero(waits == wait)
        return now + wait, np.sort(rng.choice(available, min(many, len(available)), replace=False))


def _wait(spans: np.ndarray, now: float, day: float) -> float:
    """Return the seconds until the next interval begins. Within an interval, return 0."""
    place = int(np.searchsorted(spans[:, 1], now, side="right"))
    if place == len(spans):
        return float(spans[0, 0] + day - now)
    return max(0.0, float(spans[place, 0] - now))


def awaited_rounds(config: Config, devices: Devices) -> Timetable:
    """Simulate rounds that end when clients have replied, or at a deadline.

    Raises:
        InputError: If a round gets no reply.
    """
    table, federation = config.devices, config.federation
    count, deadline = federation.per_round, math.inf
    if table.mode == "deadline":
        count, deadline = table.select or count, table.deadline or math.inf
    now, selected, answered, ends, unused = 0.0, [], [], [], [0] * federation.rounds
    if (fastest := float(devices.needed.min())) > deadline:
        raise InputError(
            f"[devices] deadline = {deadline:g} s is too short for all {federation.clients} "
            f"clients, because the fastest client needs {fastest:.4g} s. Raise deadline."
        )
    for round in range(federation.rounds):
        for attempt in range(ATTEMPTS):
            now, clients = devices.choose(now, round, count, attempt)
            duration, used = round_of(
                devices, clients, (round, attempt), federation.per_round, deadline
            )
            now += duration
            if len(used):
                break
            unused[round] += len(clients)
        else:
            raise InputError(
                f"round {round + 1} has received no reply after {ATTEMPTS} attempts. Raise "
                "[devices] available, deadline or select, or lower [devices] dropout."
            )
        selected.append(clients)
        answered.append(used)
        ends.append(now)
    schedule = tuple(selected), tuple(answered), np.array(ends)
    return Timetable(*schedule, not biased_participation(config), lost=tuple(unused))


def round_of(
    devices: Devices, chosen: np.ndarray, number: tuple[int, int], wanted: int, deadline: float
) -> tuple[float, np.ndarray]:
    """Return the duration of an attempt at a round, and the clients whose replies are used.

    The attempt ends when `wanted` replies have arrived, when every client has replied or is lost,
    or at the deadline, whichever happens first. Among simultaneous replies, lower client numbers
    come first.
    """
    if not len(chosen):
        return 0.0, chosen
    needed = devices.needed[chosen]
    losses = np.array([devices.lost_after(int(client), *number) for client in chosen])
    replied = np.flatnonzero((losses == math.inf) & (needed <= deadline))
    used = replied[np.argsort(needed[replied], kind="stable")][:wanted]
    if len(used) == wanted:
        return float(needed[used[-1]]), np.sort(chosen[used])
    return min(deadline, float(np.minimum(needed, losses).max())), np.sort(chosen[used])


# The devices of a config


def devices_of(config: Config, work: np.ndarray, sizes: tuple[int, int]) -> Devices:
    """Build the configured devices, for clients that process `work` [N] samples per round."""
    table, seed = config.devices, config.federation.seed
    clients = len(work)
    with np.errstate(all="ignore"):  # overflow is rejected below
        speed, down, up = hardware(config, clients)
        needed = table.latency + sizes[0] / down + work * table.cost / speed + sizes[1] / up
    if not (needed <= LONGEST).all():
        slow = int(np.argmax(~(needed <= LONGEST)))
        raise InputError(
            f"[devices]: client {slow} needs {needed[slow]:.3g} s for a round, but the maximum "
            f"is {LONGEST:g} s. Raise the speeds and bandwidths (also in a trace), or lower "
            "their spread."
        )
    devices = Devices(seed, needed, table.dropout)
    if table.availability == "bernoulli":
        return Devices(seed, needed, table.dropout, table.available)
    if table.availability == "day-night":
        zones = generator(seed, Draw.DEVICE, block=ZONE).random(clients)
        return Devices(seed, needed, table.dropout, table.available, table.day, zones)
    if table.availability == "trace":
        spans = _spans(table.availability_trace, clients)
        day = max(float(client_spans[-1, 1]) for client_spans in spans)
        return Devices(seed, needed, table.dropout, day=day, spans=spans)
    return devices


def hardware(config: Config, clients: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return three arrays: the speeds, download bandwidths and upload bandwidths of all clients."""
    table, columns = config.devices, []
    traced = _hardware_trace(table.trace, clients) if table.reads_trace else {}
    for block, name in enumerate(HARDWARE):
        median = getattr(table, name.replace("-", "_"))
        kind = table.speeds if name == "speed" else table.bandwidths
        spread = table.speed_spread if name == "speed" else table.bandwidth_spread
        rng = generator(config.federation.seed, Draw.DEVICE, block=block)
        if kind == "trace":
            columns.append(traced[name])
        elif kind == "log-normal":
            columns.append(median * np.exp(spread * rng.standard_normal(clients)))
        elif kind == "pareto":  # the time then has a Pareto distribution with shape 1 / spread
            columns.append(median * (1.0 - rng.random(clients)) ** spread)
        else:
            columns.append(np.full(clients, median))
    speed, down, up = columns
    return speed, down, up


def _rows(path: str, key: str, columns: Sequence[str]) -> list[tuple[int, int, list[float]]]:
    """Read a CSV trace. Return a line number, a client and the numbers of each line."""
    where, rows = f"[devices] {key}", []
    if not path:
        raise InputError(
            f"{where} does not name a file. Set {where} to the path of a CSV file with the "
            f"columns {', '.join(columns)}."
        )
    try:
        lines = list(csv.reader(read_text(Path(path), "utf-8-sig").splitlines()))
    except OSError as error:
        raise InputError(f"{where}: cannot read {path} ({error}). Check the path.") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{where}: {path} is not a CSV text file ({error}). Save the file as UTF-8."
        ) from None
    if not lines or [cell.strip() for cell in lines[0]] != list(columns):
        raise InputError(
            f"{path} does not begin with the header line {','.join(columns)}. Add this line."
        )
    for number, cells in enumerate(lines[1:], 2):
        if not any(map(str.strip, cells)):
            continue
        try:
            client, *values = map(float, cells)
        except ValueError:
            client, values = math.nan, []
        sound = len(values) == len(columns) - 1 and all(map(math.isfinite, values))
        if not sound or client < 0 or not client.is_integer():
            raise InputError(
                f"{path}, line {number}: the line is {','.join(cells)!r}, but it must contain a "
                f"client number and {len(columns) - 1} finite numbers ({','.join(columns)}). Fix "
                "the line."
            )
        rows.append((number, int(client), values))
    return rows


def _require_all(path: str, entries: Mapping[int, object], clients: int) -> None:
    """Raise an error if a trace has no line for some client."""
    if missing := [client for client in range(clients) if client not in entries]:
        raise InputError(
            f"{path} has no line for client {missing[0]} ({len(missing)} of {clients} clients "
            f"are missing). Add lines for all clients from 0 to {clients - 1}."
        )


def _hardware_trace(path: str, clients: int) -> dict[str, np.ndarray]:
    """Read a hardware trace, with one line per client. Return a dictionary of the columns."""
    rows: dict[int, list[float]] = {}
    for line, client, values in _rows(path, "trace", ("client", *HARDWARE)):
        if client in rows:
            raise InputError(
                f"{path}, line {line}: client {client} already has an earlier line. Remove one "
                "of the two lines."
            )
        if min(values) <= 0:
            raise InputError(
                f"{path}, line {line}: {min(values):g} is not a valid speed or bandwidth for "
                f"client {client}. Use numbers above 0."
            )
        rows[client] = values
    _require_all(path, rows, clients)
    columns = np.array([rows[client] for client in range(clients)]).T
    return dict(zip(HARDWARE, columns, strict=True))


def _spans(path: str, clients: int) -> tuple[np.ndarray, ...]:
    """Return the sorted intervals of each client in an availability trace.

    For each client, the result is an array [T, 2] with the start and the end of each interval.
    """
    intervals: dict[int, list[list[float]]] = {}
    for line, client, (start, end) in _rows(path, "availability-trace", ("client", "start", "end")):
        if not 0 <= start < end:
            raise InputError(
                f"{path}, line {line}: client {client} is available from {start:g} to {end:g} s, "
                "but the start must be 0 or more and the end must be later. Fix the line."
            )
        intervals.setdefault(client, []).append([start, end])
    _require_all(path, intervals, clients)
    spans_of_clients = tuple(np.array(sorted(intervals[client])) for client in range(clients))
    for client, spans in enumerate(spans_of_clients):
        if (spans[1:, 0] < spans[:-1, 1]).any():
            raise InputError(
                f"{path}: the intervals of client {client} overlap. Merge overlapping intervals "
                "into one line."
            )
    return spans_of_clients
