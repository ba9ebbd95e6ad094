"""How far one client can move the final model: certificates with a client as the neighbour.

**Replacement.** Consider two coupled runs in which all samples of client i differ, and the client
follows the protocol. At step (s, k), the gradients of client i in the two runs are the means of
sample gradients of two data sets, at two models X and X'. Insert the mean of the second data set at
X:

    ||grad F(X) - grad F'(X')|| <= ||grad F(X) - grad F'(X)|| + Lg ||X - X'||.

Both means lie in the convex hull of all sample gradients at X, whose diameter is at most diam_{s,k}
<= 2 G_max. For one sample, the first term is diam_{s,k} / n_i. The recursion of the Stability note
therefore holds with Delta_i = 2 G_max in place of 2 G_max / n_i, and with the same exposure:

    ||X^R(S) - X^R(S')||_F <= 2 G_max Y_i(C).

A mini-batch is also a mean of sample gradients, so the batches of client i may be any rows. The
client keeps its number of samples n_i, so the weights of the server and the number of local steps
do not change.

**Removal.** A removed client keeps its place in the schedule, and its gradient is 0. The zero
function has Lg = 0, and the first term is ||grad F(X)|| <= g_{s,k} <= G_max. So Delta_i = G_max. A
client that returns the model that it received, or a server that averages fewer replies, is another
change: the first skips the momentum of the client, and the second changes the weights of the
others. The certificate does not cover them.

**Bound.** Theorem 4.1 uses independent samples. Take the whole data set of a client as one sample,
whose loss is the mean loss of the client. Then N replaces n, 1 / sum_i p_i^2 replaces n_eff, and
eps_i = min(B, L_loss 2 G_max Y_i). The clients' data sets must be independent, and samples of one
client may depend on each other.
"""

from dataclasses import replace

import numpy as np

from fedmuon.analysis.theory import recursion
from fedmuon.analysis.theory.checks import sample_sizes
from fedmuon.analysis.theory.corollaries import Participation, Realized, Run, certificate

INDEPENDENT_CLIENTS = (
    "The data sets of the clients are independent, and the samples of one client may depend on "
    "each other. A client's data set keeps its distribution if it is drawn again."
)
PROTOCOL = (
    "The data of client i are replaced by the same number of any samples of norm at most 1. The "
    "client follows the protocol."
)


def client_certificate(
    run: Run, l_orth: float, participation: Participation, removed: bool = False
) -> np.ndarray:
    """Return the maximum change of the final model if all samples of client i are replaced.

    The change is measured in the Frobenius norm. The client follows the protocol with any samples.

    Args:
        run: The run: its steps, clients and constants.
        l_orth: Lipschitz constant L of the orthogonalizer.
        participation: What is known about the participants: `Realized` or `Uniform`.
        removed: Whether the client has no samples instead, so its gradient is 0 at every step.

    Returns:
        The certificates `[N]`. The certificate of a client that never participates is 0.

    Raises:
        Uncertified: If no certificate is known for this participation.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis import Realized, Run, certificate, client_certificate
        >>> from fedmuon.tasks.constants import constants
        >>> sizes, weights = np.full(2, 100), np.full(2, 0.5)
        >>> run = Run(0.01, 0.9, 2, 1, sizes, weights, constants())
        >>> part = Realized(np.array([[0], [0]]))
        >>> ratio = client_certificate(run, 3.2, part) / certificate(run, 3.2, part).clip(1e-300)
        >>> round(float(ratio[0]))
        100
    """
    sizes = sample_sizes(run.sizes)
    if isinstance(participation, Realized):  # the rows of mini-batches have no effect
        participation = Realized(participation.schedule)
    share = 1.0
    if removed and run.reach is not None:
        run = replace(run, reach=replace(run.reach, diameters=run.reach.gradients))
    elif removed:
        share = 0.5
    of_sample = certificate(replace(run, batch=0), l_orth, participation)
    return recursion.product(of_sample, share * sizes)  # Δ_i of full batches is 2 G_max / n_i
