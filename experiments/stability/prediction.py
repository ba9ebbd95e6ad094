"""The entries of bound.json and gap.csv about the predicted gap and its exact check."""

from fedmuon.analysis.report.numbers import count, number, written
from fedmuon.config.load import Config
from fedmuon.config.schema import biased_participation
from fedmuon.core.errors import InputError
from fedmuon.core.files import finite
from fedmuon.experiments.stability.finished_run import FinishedRun
from fedmuon.experiments.stability.influence import require_smooth
from fedmuon.experiments.stability.predicted_gap import PREDICTION, PROBES, predict, standard_error
from fedmuon.experiments.stability.replaced_gap import replace_samples
from fedmuon.federated.plan import BIASED
from fedmuon.runs.directory import Record

SECRET_COHORTS = (
    "replacements need the same participants in each round, but [privacy] cohorts = 'poisson' "
    "draws secret participants. Set cohorts = 'fixed'."
)


def require_prediction(config: Config) -> None:
    """Raise InputError if the config excludes a predicted gap."""
    require_smooth(config, None, PREDICTION)


def probes_of(config: Config) -> int:
    """Return the number of probes of a config, in which `auto` depends on the task."""
    probes = config.stability.probes
    if isinstance(probes, int):
        return probes
    return PROBES if config.task.name == "matrix" else 0


def prediction(run: FinishedRun) -> Record:
    """Return the predicted gap of a finished run at both ends, and its exact check.

    The numbers of probes and replacements are in [stability]. For each of the two, a number is
    None and `..._refusal` contains the reason if it does not exist.
    """
    table, record = run.config.stability, {}
    if probes := probes_of(run.config):
        record |= _predicted(run, probes)
    if table.replacements:
        record |= _replaced(run, table.replacements)
    return record


def _predicted(run: FinishedRun, probes: int) -> Record:
    try:
        gap = predict(run, probes, ends=True)
    except InputError as reason:
        return {"predicted_gap": None, "predicted_gap_refusal": str(reason)}
    entries: Record = {
        "predicted_gap": finite(gap.value),
        "predicted_gap_error": finite(gap.standard_error),
        "probes": probes,
    }
    for name, values in {"outside": gap.outside, "both_ends": gap.both_ends}.items():
        if values is not None:
            entries[f"predicted_gap_{name}"] = finite(float(values.mean()))
            entries[f"predicted_gap_{name}_error"] = finite(standard_error(values))
    return entries


def _replaced(run: FinishedRun, count: int) -> Record:
    try:
        if biased_participation(run.config):
            raise InputError(BIASED)
        if run.config.privacy.level == "client" and run.config.privacy.cohorts == "poisson":
            raise InputError(SECRET_COHORTS)
        gap = replace_samples(run, count)
    except InputError as reason:
        return {"replaced_gap": None, "replaced_gap_refusal": str(reason)}
    return {
        "replaced_gap": finite(gap.value),
        "replaced_gap_error": finite(gap.standard_error),
        "replacements": count,
    }


def rows_of(record: Record) -> list[tuple[str, object]]:
    """Return the entries as table rows. Results of old versions have no such entries."""
    probes = f" ({count(record['probes'], 'probe')})" if "probes" in record else ""
    names = {
        "predicted_gap": f"predicted gap{probes}",
        "predicted_gap_outside": "predicted at held-out samples",
        "predicted_gap_both_ends": "mean of both predictions",
        "replaced_gap": f"gap by {count(record.get('replacements', 0), 'exact replacement')}",
    }
    return [(words, _with_error(record, name)) for name, words in names.items() if name in record]


def _with_error(record: Record, name: str) -> str:
    """Return a number with its standard error, or the reason why there is none."""
    if record[name] is None:
        return str(record.get(f"{name}_refusal", number(None)))
    error = record[f"{name}_error"]
    return written(record[name], "+.4g") + ("" if error is None else f" (SE {number(error, 2)})")
