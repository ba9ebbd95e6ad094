"""Callbacks, which see each round and may end a run: early stopping, and experiment trackers.

Experiment trackers receive the records in rounds.jsonl. Each tracker needs its own package: run
`pip install '.[tensorboard]'`, `'.[mlflow]'` or `'.[wandb]'` in your clone of fedmuon.
"""

import copy
import importlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from fedmuon.core.errors import Guard, InputError, in_round
from fedmuon.core.extras import installing
from fedmuon.core.registry import Filled, Registry, required_parameters, unfit

__all__ = [
    "Callback",
    "EarlyStopping",
    "MLflow",
    "TensorBoard",
    "WandB",
    "early_stopping",
    "mlflow",
    "tensorboard",
    "wandb",
]

Listener = Callable[[Mapping[str, Any], Any], bool | str | None]


class Callback:
    """The base class of callbacks, which are called after each round and at the end of a run.

    Example:
        >>> import fedmuon
        >>> class Print(fedmuon.callbacks.Callback):
        ...     def on_round(self, record, state):
        ...         print("round", record["round"])
        >>> small = {"data": {"name": "synthetic", "train": 60, "test": 40, "dimension": 5},
        ...          "federation": {"clients": 3, "rounds": 2}}
        >>> result = fedmuon.run(small, callbacks=[Print()])
        round 1
        round 2
    """

    def on_round(self, record: Mapping[str, Any], state: Any) -> bool | str | None:
        """Handle a finished round.

        Args:
            record: A copy of this round's line in rounds.jsonl.
            state: A copy of the server's state after the round: `.round`, `.params`
                `[replicas, ...]` and `.states`.

        Returns:
            True, or a reason as a string, to end the run. With any other value, the run continues.
        """

    def on_end(self, result: Any) -> None:
        """Handle the end of the run.

        Args:
            result: A copy of the summary of the run.
        """


CALLBACKS: Registry[Callback] = Registry()


def as_callback(found: Any, guard: Guard | None = None) -> Callback:
    """Convert a callback, or a function of (record, state), to a guarded callback.

    If the callback fails, the guard raises an error that names the callback.
    """
    within = guard or Guard("callback", found)
    with within:
        kind = found.func if isinstance(found, Filled) else found  # arguments are missing
        if isinstance(kind, type):
            missing = ", ".join(required_parameters(kind))
            raise InputError(
                f"the callback {kind.__name__} needs a value for {missing}. Set {missing} in "
                "[output.options], or pass a callback object instead of the class."
            )
        if hasattr(found, "on_round") and hasattr(found, "on_end"):
            return _Guarded(found, within)
        if callable(found):
            return _Guarded(_Function(cast(Listener, found)), within)
        accepted = "a function (record, state) or a fedmuon.callbacks.Callback"
        raise unfit(found, "callback", accepted, within.named)


class _Guarded(Callback):
    """A callback that receives only copies, so that it cannot change the run or other callbacks."""

    def __init__(self, callback: Callback, guard: Guard) -> None:
        self._callback, self._guard = callback, guard

    def on_round(self, record: Mapping[str, Any], state: Any) -> str:
        params = {name: param.clone() for name, param in state.params.items()}
        states = {
            link: {name: tensor.clone() for name, tensor in tensors.items()}
            for link, tensors in state.states.items()
        }
        copied = replace(state, params=params, states=states)
        with in_round(record["round"] - 1), self._guard:
            answer = self._callback.on_round(copy.deepcopy(record), copied)
            if isinstance(answer, str):
                return answer
            return type(self._callback).__name__ if answer else ""

    def on_end(self, result: Any) -> None:
        with self._guard:
            self._callback.on_end(copy.deepcopy(result))


class _Function(Callback):
    def __init__(self, function: Listener) -> None:
        self._function = function

    def on_round(self, record: Mapping[str, Any], state: Any) -> bool | str | None:
        return self._function(record, state)


@CALLBACKS.add("early-stopping")
class EarlyStopping(Callback):
    """End a run when a measure no longer improves.

    In a resumed run, the evaluations are counted again from zero. fedmuon computes no stability
    certificate for a run that ends early because of its results.

    Args:
        measure: Name of a number in the record of each evaluated round, such as `test_loss`.
        patience: Number of evaluations without an improvement after which the run ends.
        least: Smallest change that counts as an improvement.
        rising: Whether larger values are better.

    Example:
        >>> import fedmuon
        >>> stop = fedmuon.callbacks.EarlyStopping("test_loss", patience=2)
        >>> [stop.on_round({"round": r, "test_loss": 1.0}, None) for r in (1, 2, 3)]
        [None, None, 'test_loss did not improve in 2 evaluations']
    """

    def __init__(
        self,
        measure: str = "test_loss",
        patience: int = 5,
        least: float = 0.0,
        rising: bool = False,
    ) -> None:
        self.measure, self.patience, self.least, self.rising = measure, patience, least, rising
        self._best, self._since = float("-inf"), 0

    def on_round(self, record: Mapping[str, Any], state: Any) -> str | None:
        """Compare the measure with its best value so far, if the round was evaluated.

        Args:
            record: The record of the round.
            state: Not used.

        Returns:
            The reason to end the run, or None.

        Raises:
            InputError: If no round records the measure.
        """
        if self.measure not in record:
            if "train_loss" in record:  # the round was evaluated
                raise InputError(
                    f"early-stopping uses the measure {self.measure}, but the rounds do not "
                    "record this measure. Set [output.options] measure to one of "
                    f"{', '.join(_numbers(record))}."
                )
            return None
        value = record[self.measure] if self.rising else -record[self.measure]
        self._since += 1
        if value > self._best + self.least:
            self._best, self._since = value, 0
        late = self._since >= self.patience
        return f"{self.measure} did not improve in {self.patience} evaluations" if late else None


@CALLBACKS.add("tensorboard")
class TensorBoard(Callback):
    """Write every number of each round as TensorBoard event files.

    This callback requires the package tensorboard. In your clone of fedmuon, run
    `pip install '.[tensorboard]'`.

    Args:
        folder: The folder of the event files.

    Raises:
        InputError: If TensorBoard is not installed.

    Example:
        >>> import tempfile
        >>> import fedmuon
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         tracker = fedmuon.callbacks.TensorBoard(folder)
        ...         tracker.on_end({})
        ...     except fedmuon.InputError:
        ...         tracker = None  # TensorBoard is not installed
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(folder))

    def on_round(self, record: Mapping[str, Any], state: Any) -> None:
        """Write every number of the record.

        Args:
            record: The record of the round.
            state: Not used.
        """
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, record["round"])

    def on_end(self, result: Any) -> None:
        """Write the remaining data and close the file.

        Args:
            result: Not used.
        """
        self._writer.close()


@CALLBACKS.add("mlflow")
class MLflow(Callback):
    """Log every number of each round as an MLflow metric.

    This callback requires the package mlflow. In your clone of fedmuon, run
    `pip install '.[mlflow]'`.

    Args:
        experiment: Name of the MLflow experiment.
        uri: Tracking URI, or a folder for a new database.
        run: Further arguments of `mlflow.start_run`, such as `run_name`.

    Raises:
        InputError: If MLflow is not installed.

    Example:
        >>> import tempfile
        >>> import fedmuon
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         tracker = fedmuon.callbacks.MLflow("mine", uri=folder)
        ...         tracker.on_end({})
        ...     except fedmuon.InputError:
        ...         tracker = None  # MLflow is not installed
    """

    def __init__(self, experiment: str = "fedmuon", uri: str | None = None, **run: Any) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        if uri is not None:
            if "://" not in uri:  # current MLflow does not support plain folders
                folder = Path(uri)
                folder.mkdir(parents=True, exist_ok=True)
                uri = f"sqlite:///{folder.resolve()}/mlflow.db"
            self._mlflow.set_tracking_uri(uri)
        self._mlflow.set_experiment(experiment)
        self._run = self._mlflow.start_run(**run).info.run_id
        self._mlflow.end_run("RUNNING")  # only in this process, so that no later run is blocked

    def on_round(self, record: Mapping[str, Any], state: Any) -> None:
        """Log every number of the record.

        Args:
            record: The record of the round.
            state: Not used.
        """
        self._mlflow.log_metrics(_numbers(record), step=record["round"], run_id=self._run)

    def on_end(self, result: Any) -> None:
        """End the MLflow run.

        Args:
            result: Not used.
        """
        self._mlflow.MlflowClient().set_terminated(self._run)


@CALLBACKS.add("wandb")
class WandB(Callback):
    """Log every number of each round to Weights & Biases.

    This callback requires the package wandb. In your clone of fedmuon, run
    `pip install '.[wandb]'`.

    Args:
        project: Name of the project.
        settings: Further arguments of `wandb.init`, such as `mode="offline"`.

    Raises:
        InputError: If wandb is not installed.

    Example:
        >>> import fedmuon
        >>> try:
        ...     tracker = fedmuon.callbacks.WandB("mine", mode="disabled")
        ... except fedmuon.InputError:
        ...     tracker = None  # wandb is not installed
    """

    def __init__(self, project: str = "fedmuon", **settings: Any) -> None:
        self._run = _package("wandb", "wandb").init(project=project, **settings)

    def on_round(self, record: Mapping[str, Any], state: Any) -> None:
        """Log every number of the record.

        Args:
            record: The record of the round.
            state: Not used.
        """
        self._run.log(_numbers(record), step=record["round"])

    def on_end(self, result: Any) -> None:
        """End the W&B run.

        Args:
            result: Not used.
        """
        self._run.finish()


early_stopping, tensorboard, mlflow, wandb = EarlyStopping, TensorBoard, MLflow, WandB


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name != "round"
    }


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise InputError(f"the package {name} is not installed. Run {installing(extra)}.") from None
