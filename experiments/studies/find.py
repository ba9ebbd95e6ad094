"""Find a suite by its name or by the path of its TOML file."""

from fedmuon.core.errors import InputError, instead
from fedmuon.data.readers import available
from fedmuon.experiments.studies import (
    attribution,
    bias,
    certified_error,
    certified_loss,
    certified_networks,
    disk_map,
    disk_regression,
    disk_stationarity,
    dp_bias,
    dp_muon_printed,
    dp_muon_steps,
    dp_stationarity,
    dp_text,
    dp_vanishing,
    federated_comparison,
    frontier,
    gap_bound,
    heavy_tail,
    language_models,
    layer_rank,
    poisoning,
    polar_error,
    rank_dependence,
    robust,
    stability,
    systems,
    table_2,
    training,
    wall_clock,
)
from fedmuon.experiments.studies.study import RunStudy, Study
from fedmuon.experiments.suites import contents
from fedmuon.experiments.suites.contents import SuiteRequest, Tables
from fedmuon.experiments.suites.suite import Work

OF_RUNS = ("stability", "training")
KINDS: dict[str, Study | RunStudy] = {  # the values that a suite's `kind` can have
    study.kind: study
    for study in (
        stability.STUDY,
        training.STUDY,
        attribution.STUDY,
        bias.STUDY,
        certified_error.STUDY,
        certified_loss.STUDY,
        certified_networks.STUDY,
        disk_map.STUDY,
        disk_regression.STUDY,
        disk_stationarity.STUDY,
        dp_bias.STUDY,
        dp_muon_printed.STUDY,
        dp_muon_steps.STUDY,
        dp_stationarity.STUDY,
        dp_text.STUDY,
        dp_vanishing.STUDY,
        federated_comparison.STUDY,
        frontier.STUDY,
        gap_bound.STUDY,
        heavy_tail.STUDY,
        language_models.STUDY,
        layer_rank.STUDY,
        poisoning.STUDY,
        polar_error.STUDY,
        rank_dependence.STUDY,
        robust.STUDY,
        systems.STUDY,
        table_2.STUDY,
        wall_clock.STUDY,
    )
}


def find(
    name: str,
    data: str | None,
    scale: str,
    changes: Tables,
    seed: int | None = None,
    seeds: int | None = None,
) -> Work:
    """Find the suite that the command line names.

    Args:
        name: The name of a built-in suite, or the path of a TOML file.
        data: The data set, or None for the suite's default.
        scale: `full` or `small`.
        changes: Config tables that override the suite's own.
        seed: A single seed, in place of the suite's seeds.
        seeds: The number of seeds, counted from 0, in place of the suite's seeds.

    Raises:
        InputError: If no suite has this name or path, or an option has no effect on the suite.
    """
    content = contents.read(name)
    kind, default = content.pop("kind", "stability"), content.pop("data", None)
    if isinstance(default, list) and default:  # use the first data set that is available
        present = {name for name, exists, _ in available() if exists}
        default = next((candidate for candidate in default if candidate in present), default[-1])
    for key, value in {"kind": kind, "data": default}.items():
        if not isinstance(value, str | None):
            raise InputError(
                f"{name} is not a suite, because the value of `{key}` is not a name in quotes. If "
                "this is a config file, use `fedmuon run`."
            )
    assert isinstance(kind, str)
    assert isinstance(default, str | None)
    if kind not in KINDS:
        advice = instead(kind, list(KINDS), "choose one of")
        raise InputError(f"kind = {kind!r} is not a kind of suite: {advice}")
    of_runs = kind in OF_RUNS
    if data and not default and not of_runs:
        raise InputError(f"the suite {name} has no data, so --data has no effect: leave --data out")
    data_name = data or default or (contents.DATA if of_runs else "")
    content = contents.at(content, data_name, scale)
    listed = content.get("seeds")
    if (seed is not None or seeds is not None) and listed is None:
        option = "--seed" if seeds is None else "--seeds"
        raise InputError(
            f"the suite {name} has no seeds, so {option} has no effect: leave {option} out"
        )
    if seeds is not None:
        if seed is not None:
            raise InputError(
                "--seed sets a single seed, but --seeds sets the number of seeds: leave one of "
                "the two options out"
            )
        content["seeds"] = seeds if isinstance(listed, int) else [*range(seeds)]
    elif seed is not None:
        if isinstance(listed, int):
            raise InputError(
                f"the suite {name} accepts only a number of seeds: use --seeds and leave --seed out"
            )
        content["seeds"] = [seed]
    repeats = {"told": contents.told(name), "seeds": content.get("seeds")}
    request = SuiteRequest(name, data_name, scale, changes, seed, seeds, repeats)
    return KINDS[kind].work(content, request)
