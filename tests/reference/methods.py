"""Each federated method, written from its paper. The arguments are the keys of [local]."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from fedmuon.core.rng import Draw, generator
from reference.compressors import low_rank
from reference.rounds import MODEL, Answered, Method, Visit
from reference.trees import Tree, Trees, each, is_statistic, zeros

Direction = Callable[[Tree, Tree, int], Tree]  # (x, gradient at x, step) -> direction


def local_steps(
    visit: Visit, x: Tree, lr: float, weight_decay: float, direction: Direction
) -> Tree:
    """E steps x <- x - lr (direction + weight_decay x). A batch also moves running statistics."""

    def descended(x: np.ndarray, d: np.ndarray) -> np.ndarray:
        return x - lr * visit.factor * (d + weight_decay * x)

    for k in range(visit.steps):
        moved = visit.statistics(x, k)
        learned = {name: value for name, value in x.items() if not is_statistic(name)}
        D = direction(learned, visit.gradient(x, k), k)
        x = {**each(descended, learned, D), **moved}
    return x


def plain(x: Tree, G: Tree, k: int) -> Tree:
    return G


def sgd_client(lr: float, weight_decay: float) -> Callable[[Visit, Trees, Trees], Trees]:
    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        return {MODEL: local_steps(visit, received[MODEL], lr, weight_decay, plain)}

    return client


# Servers


def outer_step(server_lr: float, server_momentum: float, nesterov: bool) -> Callable[..., Trees]:
    """The server's momentum v on the mean change D."""

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        D = each(np.subtract, means[MODEL], server[MODEL])
        v = each(lambda v, d: server_momentum * v + d, server["momentum"], D)
        step = each(lambda d, v: d + server_momentum * v, D, v) if nesterov else v
        X = each(lambda x, s: x + server_lr * s, server[MODEL], step)
        return {MODEL: X, "momentum": v}

    return server


def adaptive(
    lr: float, weight_decay: float, server_lr: float, tau: float, memory: float, square: Callable
) -> Method:
    """Adam, Yogi and Adagrad on the server, without bias correction (Reddi et al. 2021)."""

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        D = each(np.subtract, means[MODEL], server[MODEL])
        m = each(lambda m, d: memory * m + (1 - memory) * d, server["momentum"], D)
        v = each(square, server["square"], D)
        X = each(lambda x, m, v: x + server_lr * m / (np.sqrt(v) + tau), server[MODEL], m, v)
        return {MODEL: X, "momentum": m, "square": v}

    def first(model: Tree) -> Trees:
        return {"momentum": zeros(model), "square": each(lambda x: 0 * x + tau**2, model)}

    return Method(sgd_client(lr, weight_decay), server, first)


def zero_momentum(model: Tree) -> Trees:
    return {"momentum": zeros(model)}


# Methods with SGD steps


def fedavg(lr: float, weight_decay: float = 0.0) -> Method:
    return Method(sgd_client(lr, weight_decay))


def fedavgm(lr: float, server_momentum: float = 0.9, weight_decay: float = 0.0) -> Method:
    server = outer_step(1.0, server_momentum, nesterov=False)
    return Method(sgd_client(lr, weight_decay), server, zero_momentum)


def fedprox(lr: float, proximal: float = 0.01, weight_decay: float = 0.0) -> Method:
    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        X = received[MODEL]

        def pulled(x: Tree, G: Tree, k: int) -> Tree:
            return each(lambda g, x, X: g + proximal * (x - X), G, x, X)

        return {MODEL: local_steps(visit, X, lr, weight_decay, pulled)}

    return Method(client)


def fedper(lr: float, personal: str, weight_decay: float = 0.0) -> Method:
    return Method(sgd_client(lr, weight_decay), personal=personal)


def ditto(lr: float, personal_weight: float = 0.1, weight_decay: float = 0.0) -> Method:
    """FedAvg, and a personal model v that follows the client's gradients and is pulled to X."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        X, first = received[MODEL], visit.problem.start
        v = own.get("personal", first)

        def pulled(v: Tree, G: Tree, k: int) -> Tree:
            return each(lambda g, v, X: g + personal_weight * (v - X), G, v, X)

        own["personal"] = local_steps(visit, v, lr, weight_decay, pulled)
        return {MODEL: local_steps(visit, X, lr, weight_decay, plain)}

    return Method(client)


def fednova(lr: float, weight_decay: float = 0.0) -> Method:
    """Clients return their mean step, and the server takes the mean number of steps."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        X = received[MODEL]
        x = local_steps(visit, X, lr, weight_decay, plain)
        return {MODEL: each(lambda X, x: X + (x - X) / visit.steps, X, x)}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        steps = sum(w * t for w, t in zip(answered.weights, answered.steps, strict=True))
        return {MODEL: each(lambda X, m: X + steps * (m - X), server[MODEL], means[MODEL])}

    return Method(client, server)


def scaffold(lr: float, clients: int, server_lr: float = 1.0, weight_decay: float = 0.0) -> Method:
    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        X, c = received[MODEL], received["server-control"]
        c_i = own.get("client-control", zeros(X))

        def corrected(x: Tree, G: Tree, k: int) -> Tree:
            return each(lambda g, c_i, c: g - c_i + c, G, c_i, c)

        x = local_steps(visit, X, lr, weight_decay, corrected)
        taken = visit.steps * lr * visit.factor
        if not taken:
            own["client-control"] = c_i
            return {MODEL: x, "control-change": zeros(X)}
        change = each(lambda X, x, c: (X - x) / taken - c, X, x, c)
        own["client-control"] = each(np.add, c_i, change)
        return {MODEL: x, "control-change": change}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        X = each(lambda X, m: X + server_lr * (m - X), server[MODEL], means[MODEL])
        share = len(answered.steps) / clients
        c = each(lambda c, d: c + share * d, server["server-control"], means["control-change"])
        return {MODEL: X, "server-control": c}

    return Method(
        client, server, lambda model: {"server-control": zeros(model)}, ("server-control",)
    )


def fedadam(
    lr: float,
    server_lr: float = 0.1,
    server_momentum: float = 0.9,
    server_memory: float = 0.99,
    tau: float = 1e-3,
    weight_decay: float = 0.0,
) -> Method:
    def square(v: np.ndarray, D: np.ndarray) -> np.ndarray:
        return server_memory * v + (1 - server_memory) * D**2

    return adaptive(lr, weight_decay, server_lr, tau, server_momentum, square)


def fedyogi(
    lr: float,
    server_lr: float = 0.1,
    server_momentum: float = 0.9,
    server_memory: float = 0.99,
    tau: float = 1e-3,
    weight_decay: float = 0.0,
) -> Method:
    def square(v: np.ndarray, D: np.ndarray) -> np.ndarray:
        return v - (1 - server_memory) * D**2 * np.sign(v - D**2)

    return adaptive(lr, weight_decay, server_lr, tau, server_momentum, square)


def fedadagrad(
    lr: float, server_lr: float = 0.1, tau: float = 1e-3, weight_decay: float = 0.0
) -> Method:
    return adaptive(lr, weight_decay, server_lr, tau, 0.0, lambda v, D: v + D**2)


# Methods with AdamW steps


def zero_moments(model: Tree) -> Tree:
    """The number of steps, and the averages of gradients and of their squares."""
    moments = {f"{kind} {name}": 0 * x for kind in ("mean", "square") for name, x in model.items()}
    return {"steps": np.zeros(()), **moments}


def adamw_client(lr: float, weight_decay: float, shared: bool) -> Callable[..., Trees]:
    """Steps of AdamW, whose moments are the server's, or start at 0 in each round."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        state = dict(received["adamw"]) if shared else zero_moments(received[MODEL])

        def adam(x: Tree, G: Tree, k: int) -> Tree:
            state["steps"] = t = state["steps"] + 1
            D = {}
            for name, g in G.items():
                state[f"mean {name}"] = m = 0.9 * state[f"mean {name}"] + 0.1 * g
                state[f"square {name}"] = v = 0.999 * state[f"square {name}"] + 0.001 * g**2
                D[name] = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
            return D

        x = local_steps(visit, received[MODEL], lr, weight_decay, adam)
        return {MODEL: x, "adamw": state} if shared else {MODEL: x}

    return client


def local_adamw(lr: float, weight_decay: float = 0.0) -> Method:
    return Method(adamw_client(lr, weight_decay, shared=False))


def adamw(lr: float, weight_decay: float = 0.0) -> Method:
    client = adamw_client(lr, weight_decay, shared=True)
    return Method(client, first=lambda model: {"adamw": zero_moments(model)}, sent=("adamw",))


def diloco(
    lr: float, server_lr: float = 0.7, server_momentum: float = 0.9, weight_decay: float = 0.0
) -> Method:
    server = outer_step(server_lr, server_momentum, nesterov=True)
    return Method(adamw_client(lr, weight_decay, shared=False), server, zero_momentum)


# Methods with a momentum, most of which orthogonalize it


def mixed(M: Tree, G: Tree, beta: float, form: str) -> tuple[Tree, Tree]:
    """The direction and the next momentum."""
    gain = 1 - beta if form.startswith("ema") else 1.0
    M = each(lambda m, g: beta * m + gain * g, M, G)
    ahead = each(lambda m, g: beta * m + gain * g, M, G)
    return (ahead if form.endswith("nesterov") else M), M


def momentum_client(
    lr: float,
    momentum: float,
    form: str,
    weight_decay: float,
    bend: Callable[[Visit, Trees, Tree, int], Tree],
    shared: bool,
) -> Callable[..., Trees]:
    """Steps along `bend` of the momentum, which is the server's, or starts at 0 in each round."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        M = received["momentum"] if shared else zeros(received[MODEL])

        def direction(x: Tree, G: Tree, k: int) -> Tree:
            nonlocal M
            D, M = mixed(M, G, momentum, form)
            return bend(visit, received, D, k)

        x = local_steps(visit, received[MODEL], lr, weight_decay, direction)
        return {MODEL: x, "momentum": M} if shared else {MODEL: x}

    return client


def orthogonal(visit: Visit, received: Trees, D: Tree, k: int) -> Tree:
    return visit.orthogonal(D, k)


def fedmuon(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, momentum_form: str = "ema"
) -> Method:
    client = momentum_client(lr, momentum, momentum_form, weight_decay, orthogonal, shared=True)
    return Method(client, first=zero_momentum, sent=("momentum",))


muon = fedmuon  # with several clients, the server averages the momentum


def local_muon(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, momentum_form: str = "ema"
) -> Method:
    client = momentum_client(lr, momentum, momentum_form, weight_decay, orthogonal, shared=False)
    return Method(client)


def fedmuon_svd(
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    momentum_form: str = "ema",
    rank: int = 8,
) -> Method:
    whole = fedmuon(lr, momentum, weight_decay, momentum_form)
    return replace(whole, codecs={"momentum": low_rank(rank)})


def fedmuon_aligned(
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    momentum_form: str = "ema",
    alignment: float = 0.5,
    steps: int = 5,
) -> Method:
    def bend(visit: Visit, received: Trees, D: Tree, k: int) -> Tree:
        own, of_all = visit.orthogonal(D, k), received["global-direction"]
        return each(lambda o, d: (1 - alignment) * o + alignment * d, own, of_all)

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        taken = lr * steps * answered.factor
        moved = each(np.subtract, server[MODEL], means[MODEL])
        return {**means, "global-direction": each(lambda m: m / taken if taken else 0 * m, moved)}

    def first(model: Tree) -> Trees:
        return {"momentum": zeros(model), "global-direction": zeros(model)}

    client = momentum_client(lr, momentum, momentum_form, weight_decay, bend, shared=True)
    return Method(client, server, first, ("momentum", "global-direction"))


def fedmuon_corrected(
    lr: float,
    clients: int,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    momentum_form: str = "ema",
) -> Method:
    """Each client keeps its momentum M, and returns how its correction C_i = M has changed."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        X, C = received[MODEL], received["server-correction"]
        M, C_i = (own.get(name, zeros(X)) for name in ("momentum", "client-correction"))

        def direction(x: Tree, G: Tree, k: int) -> Tree:
            nonlocal M
            D, M = mixed(M, G, momentum, momentum_form)
            return visit.orthogonal(each(lambda d, c_i, c: d - c_i + c, D, C_i, C), k)

        x = local_steps(visit, X, lr, weight_decay, direction)
        own |= {"momentum": M, "client-correction": M}
        return {MODEL: x, "correction-change": each(np.subtract, M, C_i)}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        share = len(answered.steps) / clients
        C = each(lambda c, d: c + share * d,
                 server["server-correction"], means["correction-change"])  # fmt: skip
        X = each(lambda X, m: X + share * (m - X), server[MODEL], means[MODEL])
        return {MODEL: X, "server-correction": C}

    name = "server-correction"
    return Method(client, server, lambda model: {name: zeros(model)}, (name,))


def ef21_muon(
    lr: float,
    orthogonalizer: Callable[[np.ndarray], np.ndarray],
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    momentum_form: str = "ema",
) -> Method:
    """Clients return momenta at the server's model, and the server orthogonalizes their mean."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        D = M = own.get("momentum", zeros(received[MODEL]))
        for k in range(visit.steps):
            D, M = mixed(M, visit.gradient(received[MODEL], k), momentum, momentum_form)
        own["momentum"] = M
        return {MODEL: D}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        D, rate = each(orthogonalizer, means[MODEL]), lr * answered.factor
        return {MODEL: each(lambda X, d: X - rate * (d + weight_decay * X), server[MODEL], D)}

    return Method(client, server, directional=True)


def ringmaster(
    lr: float,
    orthogonalizer: Callable[[np.ndarray], np.ndarray],
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    free: bool = False,
) -> Method:
    """Clients return mean gradients at the received model; the server has the only momentum."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        gradients = [visit.gradient(received[MODEL], k) for k in range(visit.steps)]
        return {MODEL: each(lambda *parts: np.mean(np.stack(parts), axis=0), *gradients)}

    def first(model: Tree) -> Trees:
        if not free:
            return {"momentum": zeros(model)}
        named = {f"momentum {name}": value for name, value in zeros(model).items()}
        return {"momentum": {"steps": np.zeros(()), **named}, "falling": {"steps": np.zeros(())}}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        kept, G, rate, beta = server["momentum"], means[MODEL], lr * answered.factor, momentum
        steps = kept.get("steps", np.zeros(())) + 1
        if free:
            beta, rate = 1 - float(steps) ** -0.5, rate * float(steps) ** -0.75
            kept = {name: kept[f"momentum {name}"] for name in G}
        M = each(lambda m, g: beta * m + (1 - beta) * g, kept, G)
        X = each(lambda X, m: X - rate * (orthogonalizer(m) + weight_decay * X), server[MODEL], M)
        if not free:
            return {MODEL: X, "momentum": M}
        named = {f"momentum {name}": value for name, value in M.items()}
        return {MODEL: X, "momentum": {"steps": steps, **named}, "falling": {"steps": steps}}

    return Method(client, server, first, directional=True)


def ringmaster_free(lr: float, orthogonalizer: Callable[[np.ndarray], np.ndarray]) -> Method:
    return ringmaster(lr, orthogonalizer, free=True)


def sign_muon(
    lr: float,
    seed: int,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    momentum_form: str = "ema",
    ties: bool = True,
) -> Method:
    """Clients return signs of orthogonalized momenta, and the server takes the majority.

    Zeros and ties are decided by coins. Without `ties`, the server leaves tied entries unchanged.
    """
    round = 0

    def coin(shape: tuple[int, ...], client: int, side: int, block: int) -> np.ndarray:
        key = {"round": round, "client": client, "step": side, "block": block}
        return 2.0 * generator(seed, Draw.VOTE, **key).integers(2, size=shape) - 1

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        nonlocal round
        round = visit.round
        D = M = own.get("momentum", zeros(received[MODEL]))
        for k in range(visit.steps):
            D, M = mixed(M, visit.gradient(received[MODEL], k), momentum, momentum_form)
        own["momentum"], votes = M, {}
        image = visit.orthogonal(D, visit.steps - 1)
        for block, name in enumerate(sorted(image)):
            tossed, votes[name] = (
                coin(image[name].shape, visit.client, 0, block),
                image[name].copy(),
            )
            for place, value in np.ndenumerate(image[name]):
                votes[name][place] = tossed[place] if value == 0 else (1 if value > 0 else -1)
        return {MODEL: votes}

    def elected(replies: Sequence[Trees], weights: Sequence[float]) -> Trees:
        signs: Tree = {}
        for block, name in enumerate(sorted(replies[0][MODEL])):
            count = np.sum([reply[MODEL][name] for reply in replies], axis=0)
            tossed, signs[name] = coin(count.shape, 0, 1, block), np.sign(count)
            for place, value in np.ndenumerate(count):
                if value == 0 and ties:
                    signs[name][place] = tossed[place]
        return {MODEL: signs}

    def server(server: Trees, means: Trees, answered: Answered) -> Trees:
        rate = lr * answered.factor
        moved = each(lambda X, s: X - rate * (s + weight_decay * X), server[MODEL], means[MODEL])
        return {MODEL: moved}

    return Method(client, server, combine=elected, directional=True)


def muloco(
    lr: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    momentum_form: str = "ema",
    server_lr: float = 0.7,
    server_momentum: float = 0.9,
) -> Method:
    inner = local_muon(lr, momentum, weight_decay, momentum_form)
    return Method(inner.client, outer_step(server_lr, server_momentum, True), zero_momentum)


def sgd(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, momentum_form: str = "ema"
) -> Method:
    def bend(visit: Visit, received: Trees, D: Tree, k: int) -> Tree:
        return D

    client = momentum_client(lr, momentum, momentum_form, weight_decay, bend, shared=True)
    return Method(client, first=zero_momentum, sent=("momentum",))


def normalized_sgd(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, momentum_form: str = "ema"
) -> Method:
    def bend(visit: Visit, received: Trees, D: Tree, k: int) -> Tree:
        norm = np.sqrt(sum((d**2).sum() for d in D.values()))
        return each(lambda d: d / norm, D)

    client = momentum_client(lr, momentum, momentum_form, weight_decay, bend, shared=True)
    return Method(client, first=zero_momentum, sent=("momentum",))


# Methods for low-rank adapters


def inverse_root(X: np.ndarray, floor: float = 1e-6) -> np.ndarray:
    """(X X^T)^(-1/2) from singular values, which count as at least sqrt(floor) of the largest."""
    U, values, _ = np.linalg.svd(X, full_matrices=False)
    return U / np.maximum(values, np.sqrt(floor) * values[0]) @ U.T if values[0] else 0 * U @ U.T


def lora_muon(
    lr: float, momentum: float = 0.9, weight_decay: float = 0.0, momentum_form: str = "ema"
) -> Method:
    """Steps of LoRA-Muon. Every parameter is a factor of an adapter."""

    def client(visit: Visit, received: Trees, own: Trees) -> Trees:
        x, M = received[MODEL], received["momentum"]
        eta = lr * visit.factor
        s = np.sqrt(1 - eta * weight_decay)
        for k in range(visit.steps):
            D, M = mixed(M, visit.gradient(x, k), momentum, momentum_form)
            after = {}
            for name_a in [name for name in x if "lora_A" in name]:
                name_b = name_a.replace("lora_A", "lora_B")
                A, B = x[name_a], x[name_b]
                R_A, R_B = inverse_root(A), inverse_root(B.T)
                white = {name_a: R_B @ D[name_a], name_b: D[name_b] @ R_A}
                images = visit.orthogonal(white, k)
                after[name_a] = s * A - eta / 2 * R_B @ images[name_a] / s
                after[name_b] = s * B - eta / 2 * images[name_b] @ R_A / s
            x = after
        return {MODEL: x, "momentum": M}

    return Method(client, first=zero_momentum, sent=("momentum",))
