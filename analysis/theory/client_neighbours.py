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

**Participation gap.** The bound limits sum_i p_i (F_i - F_hat_i). F_i is the expected loss of the
model on a new data set of client i. If the clients are independent draws from one population, F_i
is the same for all clients: it is the expected loss F of a client that did not train. With
p_i = 1/N, the bound then limits the participation gap, F minus the mean train loss of the N
clients, and n_eff = N. The inequalities are those of Theorem 4.1 for N independent clients:
the branch G is McDiarmid's inequality for the gap, and the branch H follows from the moments of
McDiarmid's inequality and from Rio's inequality.

The certificate keeps n_i, so F_i must not depend on n_i: the number of samples of a client must say
nothing about its data. Exchangeable clients are not enough. If one data set is dealt among N
clients, the shares of a label sum to 1 over the clients (Dirichlet), so the clients depend on each
other, and no samples remain for an unseen client.

`participation_gap` estimates the gap from M unseen clients. Given the model, their losses are
independent draws with the mean F, in an interval of length B. So the intervals of `measured_gap`
hold, with one class and a client in place of a sample.
"""

from dataclasses import replace

import numpy as np

from fedmuon.analysis.theory import recursion
from fedmuon.analysis.theory.checks import sample_sizes
from fedmuon.analysis.theory.corollaries import Participation, Realized, Run, certificate
from fedmuon.analysis.theory.generalization import Interval, MeasuredGap, measured_gap

INDEPENDENT_CLIENTS = (
    "The data sets of the clients are independent, and the samples of one client may depend on "
    "each other. A client's data set keeps its distribution if it is drawn again."
)
PROTOCOL = (
    "The data of client i are replaced by the same number of any samples of norm at most 1. The "
    "client follows the protocol."
)
SAME_POPULATION = (
    "Training clients and unseen clients are independent draws from one population of clients. The "
    "number of samples of a client says nothing about its data. Clients that were made by dividing "
    "one data set by label are no such draws."
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


def participation_gap(
    training: np.ndarray,
    unseen: np.ndarray,
    interval: Interval = "shorter",
    loss_bound: float = 1.0,
    confidence: float = 0.95,
) -> MeasuredGap:
    """Estimate the loss on unseen clients minus the train loss of the clients that train.

    Each client has the same weight.

    Args:
        training: The mean train loss of each client that trains `[N]`.
        unseen: The mean loss of each unseen client `[M]`, at least one.
        interval: Method of the interval, as in `measured_gap`. "normal" needs two unseen clients.
        loss_bound: Length B of the interval that contains all losses. "normal" does not need B.
        confidence: Probability with which the interval holds.

    Returns:
        The gap and its interval, which holds for this model over draws of unseen clients.

    Raises:
        InputError: If a number is out of range, or there are too few unseen clients.

    Example:
        >>> import numpy as np
        >>> from fedmuon.analysis.theory.client_neighbours import participation_gap
        >>> found = participation_gap(np.array([0.25, 0.75]), np.array([0.5, 0.75, 1.0]))
        >>> found.gap, found.low < found.gap < found.high
        (0.25, True)
    """
    count = len(training)
    return measured_gap(
        training, np.full(count, 1 / count), np.ones((count, 1)), unseen,
        np.zeros(len(unseen), int), confidence=confidence, interval=interval, loss_bound=loss_bound,
    )  # fmt: skip
