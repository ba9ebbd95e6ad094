"""What touched the samples of a run besides its training, and what the certificates pay for it.

A certificate holds only if every choice that depends on the samples is paid for. `choices_of`
returns one sentence for each kind of choice. A choice that is neither free nor assumed becomes a
note of `fedmuon certify`.

A callback that did not end the run is free. The run is then the run without the callback, whose
certificates fail with probability b, so the event that a false certificate is issued has at most
this probability. If a callback ended the run, the number of rounds depends on the samples.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedmuon.core import files
from fedmuon.core.choices import OWN_FILES, is_own
from fedmuon.core.errors import InputError

if TYPE_CHECKING:  # `fedmuon show` reads stored certificates without pydantic
    from fedmuon.config.load import Config

Status = Literal["free", "assumed", "paid", "unpaid", "unknown", "refused"]
SILENT = ("free", "assumed")  # no note
RUNS = "runs"  # the folder of a sweep that contains its runs
# Values of [data] normalize and center, with the samples that each of them uses
SCALINGS = {
    "unit": "[data] normalize = 'unit' divides each sample by its own norm.",
    "ball": "[data] normalize = 'ball' divides a sample by its own norm.",
    "pixels": "[data] normalize = 'pixels' divides by the constant 255.",
    "tokens": "[data] normalize = 'tokens' leaves samples unchanged.",
}
CENTERS = {
    "none": "No vector is subtracted from the samples.",
    "public": "[data] center = 'public' is a mean of samples that the run does not use.",
}
NOT_KNOWN = (
    "[data] {} = '{}' may use other samples of the run, and then no limit from privacy holds. Set "
    "[data] {} = '{}'"
)
FEATURES = "[data] features = '{}' maps each image by itself."
COMPONENTS = "The principal components come from the public data '{}'."
OWN_DATA = (
    "fedmuon does not see how your data were prepared. If they were centered or scaled by "
    "statistics of the training samples, the limits that use n do not hold. Scale each sample by "
    "itself, or by public data."
)
OWN_MODEL = (
    "fedmuon does not see whether your model starts from trained weights. If samples of this run "
    "trained them, no limit holds. Start from random weights, or from weights that other data "
    "trained."
)
WEIGHTS = (
    "The run starts from the weights in {}, and fedmuon does not see which samples trained them. "
    "If samples of this run did, no limit holds. Use weights that other data trained."
)
FRESH = "The initial model does not depend on samples."
ALONE = (
    "The run is not part of a sweep, so no other settings are counted. If you chose its setting "
    "among k by results on the same samples, use --settings k."
)
COUNTED = (
    "The run is one of {} settings on the same samples in {}, so the limits pay for {}. If this "
    "setting and its seed were fixed before anybody saw the samples, use --settings 1."
)
PASSED = "The limits pay for {} settings, from --settings."
ENOUGH = "--settings {} covers the {} settings on the same samples in {}."
TOO_FEW = (
    "{} contains {} settings on the same samples, but the limits pay for {}. Use --settings {} or "
    "more, unless the setting and the seed of this run were fixed before anybody saw the samples."
)
TUNED = " ({} runs, and {} runs that tuned the step sizes)"
LOST = (
    "{} is damaged, so the number of settings that were tried on the same samples is unknown. Pass "
    "this number with --settings"
)
NOT_STOPPED = "No callback ended the run."
STOPPED = (
    "A callback ended the run early ({}). If it used held-out samples, their limits do not hold. "
    "Run without early stopping, or let it decide by validation samples."
)
STOPPED_APART = "A callback ended the run early by {}, which uses no held-out sample."
STOPPED_BY_TEST = (
    "the held-out samples decided when the run ended, because early stopping used {}. Set [data] "
    "validation, and let early stopping use validation_loss"
)
STOP_WORDS = " did not improve in "  # of the built-in early stopping, after the measure
APART = ("train", "validation", "client_loss")  # measures without held-out samples begin so
LAST_MODEL = "The final model is certified. No round was chosen by results."
AVERAGE = "The average covers the last rounds, and their share is fixed in the config."


@dataclass(frozen=True)
class DataChoice:
    """A choice that may depend on the samples.

    Attributes:
        name: What was chosen, such as "settings".
        status: "free" (it does not depend on the samples), "assumed" (free if the sentence is
            true), "paid" (the limits include its cost), "unpaid" (they do not include all of it),
            "unknown" (fedmuon cannot see whether it depends on the samples), or "refused" (it
            depends on them, so some rows have no limit).
        sentence: What happened, and what helps.
    """

    name: str
    status: Status
    sentence: str


@dataclass(frozen=True)
class TriedSettings:
    """The settings that were tried on the same samples.

    Attributes:
        settings: Their number, with the run itself. A run that is not part of a sweep has 1.
        place: The folder that contains them, with the number of runs that tuned them, in words.
        damaged: The damaged file that lists the settings, or "".
    """

    settings: int = 1
    place: str = ""
    damaged: str = ""

    def paid(self, settings: int | None) -> int:
        """Return the number of settings that limits pay for.

        Args:
            settings: The number that the caller passed, or None.
        """
        if settings is None and self.damaged:
            raise InputError(f"{LOST.format(self.damaged)}.")
        return self.settings if settings is None else settings


@dataclass(frozen=True)
class Choices:
    """All choices, and the reasons why sources of limits are refused.

    Attributes:
        listed: The choices.
        samples: Why limits from the training samples do not hold, or "".
        held_out: Why limits from held-out samples do not hold, or "".
    """

    listed: list[DataChoice]
    samples: str = ""
    held_out: str = ""

    @property
    def notes(self) -> list[str]:
        """The sentences about choices that are neither free nor assumed."""
        return [choice.sentence for choice in self.listed if choice.status not in SILENT]


def tried_settings(folder: Path) -> TriedSettings:
    """Return the settings in the folder of the sweep, suite, tuning or gap that contains a run.

    The folder lists the settings of all its runs, finished or not, before the first run begins.
    Runs with other seeds count as settings, because the best of them could have been chosen. Runs
    on another data set do not count.
    """
    place = folder.resolve()
    lock = place.parent.parent / files.SUITE_LOCK
    if place.parent.name != RUNS or not lock.is_file():
        return TriedSettings()
    try:
        cells = {str(name): tables for name, _, tables in json.loads(files.read_text(lock))[-1]}
        if place.name not in cells:
            return TriedSettings()
        samples = _samples(cells[place.name])
        runs = sum(_samples(tables) == samples for tables in cells.values())
        tuned = _tuned(lock.parent / "suite.json")
    except (ValueError, TypeError, LookupError, AttributeError):
        return TriedSettings(damaged=str(lock))
    words = str(lock.parent) + (TUNED.format(runs, tuned) if tuned else "")
    return TriedSettings(runs + tuned, words)


def _samples(tables: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what identifies the data set of a config."""
    data = tables["data"]
    return data["name"], data.get("folder"), json.dumps(data.get("options"))


def _tuned(summary: Path) -> int:
    """Return the number of runs that tuned the step sizes of a finished suite."""
    if not summary.is_file():
        return 0
    tuning = json.loads(files.read_text(summary)).get("tuning") or {}
    grids = {json.dumps([row["method"], row["values"]]): row for row in tuning.get("methods", ())}
    return sum(len(row["values"]) for row in grids.values()) * len(tuning.get("seeds") or [0])


def choices_of(
    config: "Config",
    stopped: str,
    tried: TriedSettings,
    settings: int | None = None,
    average: bool = False,
) -> Choices:
    """Return the choices that may depend on the samples of a run.

    Args:
        config: The config of the run.
        stopped: The reason why a callback ended the run, or "".
        tried: The settings that were tried on the same samples.
        settings: The number of settings that the caller passed, or None.
        average: Whether the average of the last models is certified.
    """
    stop = _early_stop(stopped)
    listed = [
        _settings(tried, settings),
        stop,
        *_prepared(config),
        _start(config),
        DataChoice("round", "free", AVERAGE if average else LAST_MODEL),
    ]
    by_test = stop.sentence.rstrip(".") if stop.status == "refused" else ""
    return Choices(listed, next(_refused(config), ""), by_test)


def _settings(tried: TriedSettings, settings: int | None) -> DataChoice:
    name, paid = "settings", tried.paid(settings)
    if tried.damaged:
        return DataChoice(name, "unknown", f"{LOST.format(tried.damaged)}.")
    if tried.settings == 1:
        return DataChoice(name, "assumed", ALONE if paid == 1 else PASSED.format(paid))
    if paid < tried.settings:
        sentence = TOO_FEW.format(tried.place, tried.settings, paid, tried.settings)
        return DataChoice(name, "unpaid", sentence)
    if settings is None:
        return DataChoice(name, "paid", COUNTED.format(tried.settings, tried.place, paid))
    return DataChoice(name, "assumed", ENOUGH.format(paid, tried.settings, tried.place))


def _early_stop(stopped: str) -> DataChoice:
    name = "early stopping"
    if not stopped:
        return DataChoice(name, "free", NOT_STOPPED)
    measure, words, _ = stopped.partition(STOP_WORDS)
    if not words:
        return DataChoice(name, "unknown", STOPPED.format(stopped))
    if measure.startswith(APART):
        return DataChoice(name, "free", STOPPED_APART.format(measure))
    return DataChoice(name, "refused", f"{STOPPED_BY_TEST.format(measure)}.")


def _prepared(config: "Config") -> Iterator[DataChoice]:
    data, name = config.data, "preparation of samples"
    for refusal in _refused(config):
        yield DataChoice(name, "refused", f"{refusal}.")
    for sentences, value in ((SCALINGS, data.normalize), (CENTERS, data.center)):
        if value in sentences:
            yield DataChoice(name, "free", sentences[value])
    if data.features != "none":
        yield DataChoice(name, "free", FEATURES.format(data.features))
    if data.public != "none":
        yield DataChoice(name, "free", COMPONENTS.format(data.public))
    if is_own(data.name) or data.name in OWN_FILES:
        yield DataChoice(name, "unknown", OWN_DATA)


def _refused(config: "Config") -> Iterator[str]:
    """Yield a reason for each value that is not known to be independent of other samples."""
    for key, sentences, value, safe in (
        ("normalize", SCALINGS, config.data.normalize, "unit"),
        ("center", CENTERS, config.data.center, "public"),
    ):
        if value not in sentences:
            yield NOT_KNOWN.format(key, value, key, safe)


def _start(config: "Config") -> DataChoice:
    name, task = "initial model", config.task
    if task.weights:
        return DataChoice(name, "unknown", WEIGHTS.format(task.weights))
    if is_own(task.name) or is_own(task.model):
        return DataChoice(name, "unknown", OWN_MODEL)
    return DataChoice(name, "free", FRESH)
