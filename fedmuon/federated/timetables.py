"""The simulated schedule of a run with `[devices]`, which is known before the first round."""

import numpy as np

from fedmuon.config.load import Config
from fedmuon.config.schema import ASYNCHRONOUS
from fedmuon.federated.clock import Timetable, awaited_rounds, devices_of
from fedmuon.federated.late_replies import late_replies


def timetable(
    config: Config, steps: np.ndarray, samples: np.ndarray, sizes: tuple[int, int]
) -> Timetable:
    """Simulate the rounds of a run with `[devices]`.

    Args:
        config: The config.
        steps: Number of local steps of each client [N].
        samples: Number of samples per step of each client [N].
        sizes: Bytes of a message to a client, and bytes of a reply.

    Raises:
        InputError: If a trace cannot be used, or if a round gets no reply.
    """
    devices = devices_of(config, steps * samples, sizes)
    late = config.devices.mode in ASYNCHRONOUS
    return late_replies(config, devices) if late else awaited_rounds(config, devices)
