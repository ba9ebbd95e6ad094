"""The certificates of the risk of a run's final model, as values.

This module loads quickly, so that `fedmuon show` can read stored certificates.
"""

from dataclasses import asdict, dataclass, field

from fedmuon.core.files import Record
from fedmuon.experiments.certifying.choices import DataChoice

GUESS = 0.2  # the expected train error, if the caller expects nothing


@dataclass(frozen=True)
class RiskCertificate:
    """An upper limit of the risk of a model, or the reason why there is none.

    Attributes:
        name: What the limit stands on, such as "held-out samples".
        measure: "error", "loss", or "change of the loss" from X⁰.
        status: "certified", "estimated" or "refused".
        value: The upper limit, or None.
        beside: The measured value that the limit bounds from above, or from which it follows.
        confidence: The probability with which the limit holds, or None for a limit in expectation.
        cost: What the certificate costs.
        method: The inequality.
        assumptions: What must be true.
        refusal: Why there is no limit, and what helps.
    """

    name: str
    measure: str
    status: str
    value: float | None = None
    beside: float | None = None
    confidence: float | None = None
    cost: str = ""
    method: str = ""
    assumptions: tuple[str, ...] = ()
    refusal: str = ""


@dataclass(frozen=True)
class RiskCertificates:
    """The certificates of a run, with the measured values.

    Attributes:
        rows: The certificates.
        train: The mean losses on the training samples, by name.
        test: The mean losses on the held-out samples, by name.
        samples: Number of training samples.
        held_out: Number of held-out samples.
        settings: Number of settings that are paid for.
        confidence: The confidence of each certified row.
        divergence: If the run is private: the protected unit, KL_0 as `mean`, and the total
            variation distance if a unit is replaced.
        notes: Warnings.
        predicted: The gap of the loss that derivatives predict, with its standard error, if it was
            requested.
        output_noise: Standard deviation of the noise on the published model, or 0.
        average: Whether the model is the average of the last models.
        guess: The expected train error, for which certified limits from privacy are smallest.
        choices: What touched the samples, and how the limits pay for it.
        counted: Number of settings on the same samples in the folder of the sweep that contains
            the run, or 1.
        configured_noise: `stability.output-noise` of the run, the default of `output_noise`.

    Example:
        >>> import fedmuon
        >>> small = {"data": {"name": "synthetic", "train": 90, "test": 60, "dimension": 7},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> certificates = fedmuon.certify(fedmuon.run(small), confidence=0.9)
        >>> certificates.samples, certificates.held_out, len(certificates.rows)
        (90, 60, 6)
    """

    rows: list[RiskCertificate]
    train: dict[str, float]
    test: dict[str, float]
    samples: int
    held_out: int
    settings: int
    confidence: float
    divergence: Record = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    predicted: Record = field(default_factory=dict)
    output_noise: float = 0.0
    guess: float = GUESS
    average: bool = False
    choices: list[DataChoice] = field(default_factory=list[DataChoice])
    counted: int = 1
    configured_noise: float = 0.0

    def record(self) -> Record:
        """Return the certificates as one JSON object."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Record) -> "RiskCertificates":
        """Return the certificates that `record` returned as a JSON object."""
        rows = [
            RiskCertificate(**{**row, "assumptions": tuple(row["assumptions"])})
            for row in record["rows"]
        ]
        choices = [DataChoice(**choice) for choice in record["choices"]]
        return cls(**{**record, "rows": rows, "choices": choices})
