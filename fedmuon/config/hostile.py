"""The hostile clients of [attacks], and errors about their numbers."""

from collections.abc import Iterator
from typing import Any

Config = Any  # `fedmuon.config.load.Config`, which imports this module


def numbers(clients: str) -> tuple[int, ...]:
    """Return the numbers in [attacks] clients, which are sorted."""
    return tuple(int(number) for number in clients.split(",") if number)


def hostile_count(share: float, clients: int) -> int:
    """Return how many of the clients are hostile if a share of them is."""
    return round(share * clients)


def hostile_clients(config: Config) -> tuple[int, ...]:
    """Return the sorted numbers of the hostile clients, or no numbers without an attack."""
    # Reading a config does not need numpy.
    from fedmuon.core.rng import Draw, generator

    table, federation = config.attacks, config.federation
    if table.kind == "none":
        return ()
    if table.clients:
        return numbers(table.clients)
    order = generator(federation.seed, Draw.HOSTILE).permutation(federation.clients)
    return tuple(sorted(order[: hostile_count(table.share, federation.clients)].tolist()))


def problems(config: Config) -> Iterator[str]:
    """Yield errors for hostile clients that do not exist, or that leave no honest client."""
    table, clients = config.attacks, config.federation.clients
    if table.kind == "none":
        return
    if table.clients and table.share:
        yield (
            f"[attacks] clients = '{table.clients}' and share = {table.share:g} both choose the "
            "hostile clients. Leave one of the two keys out."
        )
        return
    if not table.clients and not table.share:
        yield (
            f"[attacks] kind = '{table.kind}' has no hostile clients. Set share, such as 0.2, or "
            "the numbers of the hostile clients, such as clients = '0, 3'."
        )
        return
    rounds = config.federation.rounds
    if table.from_round >= rounds:
        yield (
            f"[attacks] from-round = {table.from_round} is after the last round, so no client "
            f"attacks. The {rounds} rounds have the numbers 0 to {rounds - 1}. Use a number in "
            "this range."
        )
    named = numbers(table.clients)
    hostile = len(named) or hostile_count(table.share, clients)
    if not hostile:
        yield (
            f"[attacks] share = {table.share:g} of {clients} clients is less than half a client, "
            f"so no client is hostile. Set share to {1 / clients:.3g} or more."
        )
    elif named and named[-1] >= clients:
        yield (
            f"[attacks] clients contains the number {named[-1]}, but the {clients} clients have "
            f"the numbers 0 to {clients - 1}. Use numbers in this range."
        )
    elif hostile == clients:
        yield (
            f"[attacks] makes all {clients} clients hostile, so no client is honest. Lower share, "
            "or leave a client out of clients."
        )
