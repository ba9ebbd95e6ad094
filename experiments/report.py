"""`fedmuon report`: collect results of suites, runs with neighbours, and plain runs.

A folder can be a suite (suite.json, whose `kind` names the other files), a run with neighbours
(neighbours.csv, bound.json, config.toml) or a plain run (summary.json). A folder that contains such
folders, at any depth, gets one page for all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedmuon.analysis.report.findings import SHARED, Findings
from fedmuon.analysis.report.tables import RUN_AGAIN, read_json
from fedmuon.analysis.report.verdicts import SCOPE, tally
from fedmuon.analysis.report.write import as_written, write_page
from fedmuon.core.errors import InputError, plain
from fedmuon.core.files import mendable, sums_of
from fedmuon.experiments.certifying.page import with_certificates
from fedmuon.experiments.inspect.client_figure import clients_picture
from fedmuon.experiments.inspect.index import statuses
from fedmuon.experiments.inspect.page import drawn, of_runs
from fedmuon.experiments.inspect.status import RunStatus, is_run, run_status
from fedmuon.experiments.stability.neighbours_report import findings as of_neighbours
from fedmuon.experiments.studies.find import KINDS
from fedmuon.experiments.tables import GAP, SWEEP, columns
from fedmuon.runs.directory import RunDirectory

LEFT_OUT = "left out"  # first words of the line about a damaged folder
SUITE, RUN = ("runs.csv", "suite.json"), ("bound.json", "neighbours.csv")


class Unfinished(InputError):
    """The runs on neighbouring data sets are unfinished. The page still shows the run."""


@dataclass
class Missing:
    """Reasons why folders have no section on a page: they are damaged or unfinished."""

    left_out: list[str] = field(default_factory=list)
    unfinished: list[str] = field(default_factory=list)


def write_report(folder: Path, tell: Callable[[str], None] = lambda line: None) -> Path:
    """Write FOLDER/report.html with its figures and tables.

    If FOLDER contains several folders, damaged ones are left out and unfinished runs show only a
    curve.

    Args:
        folder: A suite, a run, or a folder of such folders.
        tell: Receives one line for each folder that is damaged, unfinished or incomplete.

    Returns:
        The path of the page.

    Raises:
        InputError: If the folder itself is damaged or contains no results.
    """
    findings, missing, readable = _gathered(folder)
    # All readable runs are drawn together if there are several.
    runs = [drawn(run) for run in readable] if len(readable) > 1 else []
    page = write_page(folder, findings, runs, missing.left_out, missing.unfinished)
    lines = [f"{LEFT_OUT}: {reason}" for reason in missing.left_out]
    lines += [f"unfinished: {reason}" for reason in missing.unfinished]
    for line in (*lines, *filter(None, (entry.pending for entry in findings))):
        tell(line)
    return page


def gather(folder: Path) -> list[Findings]:
    """Return the findings of the folder, or of each suite and run below it."""
    return _gathered(folder)[0]


def _gathered(folder: Path) -> tuple[list[Findings], Missing, list[RunStatus]]:
    """Return the findings as `gather` does.

    Also return the reasons why some subfolders are left out, and the intact runs among the
    subfolders.
    """
    if not folder.is_dir():
        raise InputError(
            f"{folder} is not a folder. Pass a folder that `fedmuon suite`, `stability` or `run` "
            "wrote."
        )
    if reader := _reader(folder):
        return [_read(reader, folder)], Missing(), []
    if _is_plain(folder):
        return [of_runs([run_status(folder)])], Missing(), []
    several = {SWEEP: "a sweep", GAP: "a result of `fedmuon gap`"}
    if kind := next((label for name, label in several.items() if (folder / name).is_file()), None):
        raise InputError(
            f"{folder} is {kind}, which has no report page. For its table, use `fedmuon show "
            f"{folder}`. For a report of its runs, use `fedmuon report {folder / 'runs'}`."
        )
    with mendable(folder, "read"):
        below = [*outputs_below(folder)]
    runs = {run.path: run for run in statuses([path for path in below if is_run(path)])}
    findings, missing = _each(below, runs)
    if not findings:
        reasons = [*missing.left_out, *missing.unfinished]
        raise InputError(
            reasons[0]
            if reasons
            else (
                f"{folder} contains neither a finished suite nor a run. Pass a folder that "
                "`fedmuon suite`, `stability` or `run` wrote, or finish the experiment with "
                "--resume."
            )
        )
    return findings, missing, [run for run in runs.values() if not run.damage]


def outputs_below(folder: Path) -> Iterator[Path]:
    """Yield every suite and run below a folder, ordered by path, but none inside another."""
    for entry in sorted(folder.iterdir()):
        if not entry.is_dir() or entry.is_symlink():
            continue
        if _reader(entry) or is_run(entry) or (entry / "summary.json").exists():
            yield entry
        else:
            yield from outputs_below(entry)


def _each(
    folders: Sequence[Path], runs: Mapping[Path, RunStatus]
) -> tuple[list[Findings], Missing]:
    """Return the findings of each folder, and the reasons why some folders are left out.

    All plain runs share one section of the report. If there are several sections, the title of each
    section names its folder.
    """
    findings, plain_runs, missing = [], [], Missing()
    for folder in folders:
        try:
            if reader := _reader(folder):
                findings.append(_read(reader, folder))
            elif run := runs.get(folder):  # an unfinished run is only drawn with the others
                if run.damage:
                    raise InputError(run.damage)
                plain_runs += [run] if (folder / "summary.json").exists() else []
        except Unfinished as error:
            missing.unfinished.append(str(error))
        except InputError as error:
            missing.left_out.append(str(error))
    if len(findings) + bool(plain_runs) > 1:
        findings = [replace(entry, title=f"{entry.title} ({entry.name})") for entry in findings]
    return [*findings, *([of_runs(plain_runs)] if plain_runs else [])], missing


def _is_plain(folder: Path) -> bool:
    """Return whether the folder contains a finished run without neighbours."""
    return (folder / "summary.json").exists() and is_run(folder) and not _reader(folder)


def _read(reader: Callable[[Path], Findings], folder: Path) -> Findings:
    """Return the findings of the folder, or raise an error if a necessary file is missing."""
    if reader is of_neighbours and not (
        (folder / "bound.json").exists() or "bound.json" in sums_of(folder)  # written last
    ):
        run = RunStatus(folder)
        if run.damage:
            raise InputError(run.damage)
        word, _, holder = run.state.partition(": ")
        unfinished = f"{folder}: the runs on neighbouring data sets are not finished"
        if word == "unfinished":
            raise Unfinished(f"{unfinished}, resume with: {run.again}")
        if word == "running":
            raise Unfinished(
                f"{unfinished}, and {holder} is still running them. Wait until that process ends. "
                f"If the process stops early, resume with: {run.again}"
            )
        raise Unfinished(f"{folder}: {run.state}")
    with as_written(folder):
        findings = reader(folder)
    if reader is of_neighbours:  # the rounds of this run are drawn together with those of others
        RunDirectory(folder).require_unchanged()
        findings = replace(findings, pictures=[*findings.pictures, *clients_picture(folder)])
        findings = with_certificates(findings, folder, run_status(folder).risk)
    return findings


def _reader(folder: Path) -> Callable[[Path], Findings] | None:
    """Return the function that reads a folder of this kind.

    The files in the folder show what kind it is. The result is None if the kind is unknown.
    """
    if any((folder / name).exists() for name in SUITE):
        return of_suite
    return of_neighbours if any((folder / name).exists() for name in RUN) else None


def of_suite(folder: Path) -> Findings:
    """Return the findings of a suite folder.

    The `kind` in suite.json determines which module reads the folder.
    """
    file = folder / "suite.json"
    content = read_json(file, SHARED)
    kind = str(content["kind"])
    if kind not in KINDS:
        raise InputError(f"{file} contains the unknown kind of suite {kind!r}: {RUN_AGAIN}")
    return KINDS[kind].findings(folder, content)


# The same results in a terminal.

COLOURS = {"holds": "green", "refuted": "red", "inconclusive": "yellow"}


def suite_tables(found: Findings) -> list[Table | Text]:
    """Return tables of a suite: claims with verdicts, commands for open claims, and numbers.

    For each claim, the table starts with the effect in the least favourable setting, the interval
    of this effect, and the threshold of the claim. The effects in all settings follow.
    """
    claims = []
    for claim in found.claims:
        effect, ends = claim.shown
        reach = f", {ends} (95%)" if ends else ""
        worst = f"{effect}{reach}, claim allows: {claim.accepted}" if effect else ""
        by_how_much = "; ".join(filter(None, (worst, claim.in_words)))
        verdict = f"[{COLOURS.get(claim.verdict, 'dim')}]{claim.verdict}[/]"
        claims.append((_escaped(claim.sentence), verdict, _escaped(by_how_much)))
    parts: list[Table | Text] = []
    if claims:
        title = f"{_escaped(found.title)}: {tally(found.claims)}"
        parts.append(columns(title, ("claim", "verdict", "details"), claims, left=3))
        parts.append(Text(f"{SCOPE}\n"))
    if found.caution:
        parts.append(Text(f"{plain(found.caution, None)}\n"))
    commands = dict.fromkeys(claim.command for claim in found.claims if claim.command)
    parts += [Text(f"To decide open claims: {plain(command, None)}\n") for command in commands]
    numbers = [[_escaped(cell) for cell in row] for row in found.numbers]
    head = [_escaped(name) for name in found.head]
    return [*parts, columns(found.numbers_title, head, numbers)]


def _escaped(text: str) -> str:
    """Escape the text of a file, so that a table shows it without markup and control characters."""
    return escape(plain(text, None))
