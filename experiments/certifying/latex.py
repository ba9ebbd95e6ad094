"""The certificates of a run as a LaTeX table, for the package booktabs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedmuon.analysis.report.latex import escaped, latex
from fedmuon.analysis.report.numbers import rounded_up
from fedmuon.core.errors import InputError
from fedmuon.core.files import Record
from fedmuon.experiments.certifying.groups import GroupCertificates
from fedmuon.experiments.certifying.rows import RiskCertificates

NO_LIMIT = "there is no limit to write: {}."


def of_run(certificates: RiskCertificates) -> str:
    """Return the limits of a run as a table, without the refused rows."""
    rows = [
        {
            "certificate": row.name,
            "loss": row.measure,
            "status": row.status,
            "method": row.method,
            "measured": row.beside,
            "at most": rounded_up(row.value),
        }
        for row in certificates.rows
        if row.value is not None
    ]
    model = "average of the last models" if certificates.average else "final model"
    caption = (
        f"Upper limits of the risk of the {model} ({certificates.samples:,} training samples, "
        f"{certificates.held_out:,} held out). Each certified limit holds with probability "
        f"{_confidence(certificates.confidence, certificates.settings)}. Estimated limits hold in "
        "expectation."
    )
    refusals = [row.refusal for row in certificates.rows]
    return _table(rows, caption, "tab:certificates", refusals)


def of_groups(certificates: GroupCertificates) -> str:
    """Return the limits of classes or clients as a table, worst group first."""
    rows = [
        {
            "source": row.source,
            certificates.per: row.group,
            "samples": row.samples,
            "error": row.error,
            "estimated at most": rounded_up(row.estimated),
            "certified at most": rounded_up(row.certified),
        }
        for row in certificates.rows
        if row.certified is not None
    ]
    if all(row["estimated at most"] is None for row in rows):
        for row in rows:
            del row["estimated at most"]
    caption = (
        f"Upper limits of the error of each {certificates.per}. The certified limits of one source "
        "hold together with probability "
        f"{_confidence(certificates.confidence, certificates.settings)}."
    )
    refusals = certificates.refused.values()
    return _table(rows, caption, f"tab:certificates-{certificates.per}", refusals)


def of_plan(record: Record) -> str:
    """Return the limits before training, the result of `planned.plan`, as a table."""
    rows = [
        {
            "train error": row["train_error"],
            "estimated at most": rounded_up(row["estimated"]),
            "certified at most": rounded_up(row["certified"]),
        }
        for row in record["rows"]
    ]
    caption = (
        f"Limits before training, for the noise multiplier {record['noise']:.4g} and "
        f"{record['units']:,} units ({record['unit']}). Each certified limit holds with "
        f"probability {_confidence(record['confidence'], record['settings'])}."
    )
    return _table(rows, caption, "tab:planned-certificates")


def _confidence(confidence: float, settings: int) -> str:
    paid = f" for all {settings} settings together" if settings > 1 else ""
    return f"{confidence:.4g}{paid}"


def _table(
    rows: Sequence[Mapping[str, Any]], caption: str, label: str, refusals: Iterable[str] = ()
) -> str:
    if not rows:
        raise InputError(NO_LIMIT.format("; ".join(dict.fromkeys(refusals)).rstrip(".")))
    return latex(rows, escaped(caption), label)
