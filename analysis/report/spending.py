"""What the clients of private runs have spent, as columns: whether all keep to their target.

Columns are those of runs.csv and clients.csv: `epsilon` is the upper end of the joint bracket.
"""

import numpy as np

from fedmuon.analysis.report.claims import Claim, Columns


def kept(runs: Columns, clients: Columns) -> Claim:
    """Every run is certified, and no client of it spends more than the run's target."""
    sentence = "Every run is certified, and no client spends more than its target ε, jointly."
    if not (clients["target"] > 0).all():
        return Claim(sentence, None, "no target was given")
    certified = runs["certified"][~np.isnan(runs["epsilon"])] == "True"  # of the runs that ended
    over, share = clients["epsilon"] > clients["target"], clients["epsilon"] / clients["target"]
    detail = (
        f"{certified.sum()} of {len(certified)} runs are certified; {over.sum()} of {len(over)} "
        f"accounts are above their target, and the largest is {share.max():.2%} of it"
    )
    return Claim(sentence, bool(certified.all() and not over.any()), detail)


def several(clients: Columns) -> bool:
    """Whether any run had more than one client."""
    return len(np.unique(clients["client"])) > 1
