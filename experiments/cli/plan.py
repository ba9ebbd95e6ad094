"""`fedmuon plan`: what a run will cost."""

import time

import fedmuon.experiments.cli.options as options


def plan(
    config: options.ConfigFile = None,
    overrides: options.Overrides = None,
    engine: options.EngineName = None,
    ray_address: options.RayAddress = None,
    data: options.DataName = None,
    seed: options.Seed = None,
    as_json: options.AsJson = False,
) -> None:
    """Say what a run will cost, in seconds, memory and bytes: a few seconds of it are tried here.

    A plan takes about as long as a short run: it reads the data, starts the engine and ends it.
    Expect seconds within 25% on a machine that is idle otherwise; what others do counts as cost.
    Nothing is written. Example: [bold]fedmuon plan --engine ray --set federation.rounds=1000[/]
    """
    from fedmuon.experiments.planning.cost import plan as cost
    from fedmuon.experiments.planning.table import tables

    changes = options.changes_of(overrides, engine, ray_address, data, seed)
    chosen = options.chosen_config(config, changes, False)
    assert chosen is not None
    # The processor's seconds: whoever waited in this process before, as a wrapper, does not count.
    record = cost(chosen, time.process_time())
    options.tell(record, as_json, *tables(record))
