"""Compressors: how the update of a client is written in its message, with bytes that are counted.

A `Compressor` turns one tensor into the small tensors of a message, and back. All but `identity`
lose something: C(x) is what a receiver reads. A contractive compressor has
E||C(x) - x||^2 <= e ||x||^2 with e < 1, an unbiased one has E C(x) = x. `Compression` names
the compressors of a run's clients and server, and the clients' feedback for the part that is lost.

Tensors have a leading axis of replicas [S, ...]. Each is compressed by itself, and all share the
draws of a compressor, which come from the generator that it is given.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.low_rank import factors, factors_fit
from fedmuon.tasks.base import Params, split_statistics

Trees = Mapping[str, Params]  # "model", or the name of a link -> its tensors
DrawOf = Callable[[int, int], np.random.Generator]  # numbers of the tree and tensor -> its draws
Parts = dict[str, Tensor]  # the tensors of a message that stand for one tensor, by what they are
NO_MEMORY: Params = {}
WHOLE = ""  # the part of a tensor that is sent as it is
MODEL = "model"
FEEDBACK = "compression"  # the name of what a client keeps of its updates
ESTIMATE = "ef21-"  # and the name of a tree: the server's mean of the clients' estimates


@dataclass(frozen=True)
class Compressor:
    """A way to write tensors in messages.

    Attributes:
        name: What it is called in [compression].
        encode: (tensor [S, ...], generator) -> its parts. If the sender keeps a part, `encode` also
            takes this part of the sender's last message.
        decode: (parts, a tensor like the one that was sent) -> C(x).
        template: a tensor -> tensors like its parts.
        error: a tensor -> e, the bound on E||C(x) - x||^2 / ||x||^2 for tensors like it.
        unbiased: Whether E C(x) = x.
        kept: The part that a sender stores for its next message, if there is one.
    """

    name: str
    encode: Callable[..., Parts]
    decode: Callable[[Parts, Tensor], Tensor]
    template: Callable[[Tensor], Parts]
    error: Callable[[Tensor], float] = field(default=lambda like: 0.0)
    unbiased: bool = False
    kept: str = ""


def identity() -> Compressor:
    """Send tensors as they are."""
    return Compressor(
        "none",
        lambda value, rng: {WHOLE: value},
        lambda parts, like: parts[WHOLE],
        lambda like: {WHOLE: like},
        unbiased=True,
    )


# Some of the entries, or of the rows


def _count(share: float, size: int) -> int:
    """How many of so many a share is: at least one."""
    return max(1, min(size, round(share * size)))


def _index_type(size: int) -> torch.dtype:
    """The smallest type of positions below `size`."""
    return torch.int16 if size <= 1 << 15 else torch.int32 if size <= 1 << 31 else torch.int64


def _pays(like: Tensor, taken: int, of: int) -> bool:
    """Whether sending `taken` of `of` equal pieces with their positions takes fewer bytes than
    sending the tensor [S, ...] as it is."""
    piece = like[0].numel() // of * like.element_size()
    return taken * (piece + _index_type(of).itemsize) < of * piece


def _positions(indices: Tensor, size: int) -> Tensor:
    """Positions from a message, which may hold anything."""
    found = indices.long()
    if found.numel() and not (int(found.min()) >= 0 and int(found.max()) < size):
        raise InputError(f"a compressed tensor names entries outside its {size}")
    return found


def _require_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise InputError(f"the share of {name} is {share}: give a number above 0, at most 1")


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Positions [S, k] of the largest of sizes [S, d], in ascending order; of equal ones the first,
    on every machine."""
    order = sizes.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _sparse(
    name: str,
    share: float,
    encode: Callable[[Tensor, np.random.Generator], Parts],
    error: Callable[[Tensor], float],
    unbiased: bool,
) -> Compressor:
    """A compressor that sends k of d entries with their positions, or the whole tensor where this
    takes no more bytes."""
    _require_share(name, share)

    def count(like: Tensor) -> int:
        """k, or 0 for the whole tensor."""
        k, size = _count(share, like[0].numel()), like[0].numel()
        return k if _pays(like, k, size) else 0

    def encode_or_whole(value: Tensor, rng: np.random.Generator) -> Parts:
        return encode(value, rng) if count(value) else {WHOLE: value}

    def decode(parts: Parts, like: Tensor) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        found = like.new_zeros(like.flatten(1).shape)
        where = _positions(parts["indices"].to(like.device), found.shape[1])
        return found.scatter_(1, where, parts["values"].to(like.device)).view(like.shape)

    def template(like: Tensor) -> Parts:
        if not (k := count(like)):
            return {WHOLE: like}
        values = like.new_empty((len(like), k))
        return {"values": values, "indices": values.to(_index_type(like[0].numel()))}

    def error_or_none(like: Tensor) -> float:
        return error(like) if count(like) else 0.0

    return Compressor(name, encode_or_whole, decode, template, error_or_none, unbiased)


def top_k(share: float) -> Compressor:
    """Send the entries of largest absolute value, a share of all, with their positions.

    A tensor is sent as it is where this takes no more bytes.
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        where = _largest(flat.abs(), _count(share, flat.shape[1]))
        return {"values": flat.gather(1, where), "indices": where.to(_index_type(flat.shape[1]))}

    def error(like: Tensor) -> float:
        return 1 - _count(share, like[0].numel()) / like[0].numel()

    return _sparse("top-k", share, encode, error, unbiased=False)


def random_k(share: float) -> Compressor:
    """Send k of the d entries, drawn uniformly, times d / k, with their positions.

    A tensor is sent as it is where this takes no more bytes.
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        size, count = flat.shape[1], _count(share, flat.shape[1])
        drawn = np.sort(rng.choice(size, count, replace=False))
        where = torch.from_numpy(drawn).to(flat.device).expand(len(flat), count)
        values = flat.gather(1, where) * (size / count)
        return {"values": values, "indices": where.to(_index_type(size))}

    def error(like: Tensor) -> float:
        return like[0].numel() / _count(share, like[0].numel()) - 1

    return _sparse("random-k", share, encode, error, unbiased=True)


def _is_matrix(like: Tensor) -> bool:
    return like.ndim >= 3


def rows(share: float) -> Compressor:
    """Send the rows of largest Euclidean norm, a share of all, with their numbers.

    A tensor [S, m, ...] is a stack of matrices with m rows. Vectors are sent as they are, and
    matrices too, where this takes no more bytes. Dion2 (arXiv:2512.16928) selects rows of the
    momentum like this, and keeps the others for later steps, as error feedback does.
    """
    _require_share("rows", share)

    def count(like: Tensor) -> int:
        """k, or 0 for the whole tensor."""
        k = _count(share, like.shape[1]) if _is_matrix(like) else 0
        return k if k and _pays(like, k, like.shape[1]) else 0

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        if not (k := count(value)):
            return {WHOLE: value}
        matrix = value.flatten(2)
        where = _largest(matrix.square().sum(2), k)
        taken = matrix.gather(1, where[..., None].expand(-1, -1, matrix.shape[2]))
        return {"rows": taken, "indices": where.to(_index_type(matrix.shape[1]))}

    def decode(parts: Parts, like: Tensor) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        found = like.new_zeros(like.flatten(2).shape)
        where = _positions(parts["indices"].to(like.device), found.shape[1])
        where = where[..., None].expand(-1, -1, found.shape[2])
        return found.scatter_(1, where, parts["rows"].to(like.device)).view(like.shape)

    def template(like: Tensor) -> Parts:
        if not (k := count(like)):
            return {WHOLE: like}
        m, n = like.shape[1], like[0, 0].numel()
        taken = like.new_empty((len(like), k, n))
        return {"rows": taken, "indices": taken[..., 0].to(_index_type(m))}

    def error(like: Tensor) -> float:
        return 1 - k / like.shape[1] if (k := count(like)) else 0.0

    return Compressor("rows", encode, decode, template, error)


# All entries with few bits


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Whole numbers [S, d] below 2^bits as bytes [S, ceil(d bits / 8)]."""
    places = torch.arange(bits, device=codes.device)
    planes = ((codes.unsqueeze(-1) >> places) & 1).to(torch.uint8).flatten(1)
    planes = torch.nn.functional.pad(planes, (0, -planes.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = 1 << torch.arange(8, device=codes.device)
    return (planes * weights).sum(-1).to(torch.uint8)


def _unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """The numbers [S, size] that were packed."""
    places = torch.arange(8, device=packed.device)
    planes = ((packed.long().unsqueeze(-1) >> places) & 1).flatten(1)[:, : size * bits]
    weights = 1 << torch.arange(bits, device=packed.device)
    return (planes.unflatten(1, (size, bits)) * weights).sum(-1)


def _scaled_codes(
    name: str,
    bits: int,
    encode: Callable[[Tensor, np.random.Generator], Parts],
    value_of: Callable[[Tensor], Tensor],
    error: Callable[[Tensor], float],
    unbiased: bool,
) -> Compressor:
    """A compressor that sends one scale [S, 1] and a code of some bits for each entry."""

    def decode(parts: Parts, like: Tensor) -> Tensor:
        codes = _unpack(parts["codes"].to(like.device), bits, like[0].numel())
        return (value_of(codes).to(like.dtype) * parts["scale"].to(like.device)).view(like.shape)

    def template(like: Tensor) -> Parts:
        length = -(-like[0].numel() * bits // 8)
        codes = torch.empty((len(like), length), dtype=torch.uint8, device=like.device)
        return {"scale": like.new_empty((len(like), 1)), "codes": codes}

    return Compressor(name, encode, decode, template, error, unbiased)


def _norms(flat: Tensor) -> Tensor:
    """Norms [S, 1] of rows [S, d]. Where the squares of finite numbers overflow or vanish, the norm
    comes from scaled numbers, and is at most the largest number of the type."""
    norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    if (sound := (norm > 0) & norm.isfinite()).all():
        return norm
    wide = flat.double()
    largest = wide.abs().amax(1, keepdim=True)
    scaled = wide / torch.where(largest > 0, largest, 1)
    found = largest * torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    found = found.clamp(max=torch.finfo(flat.dtype).max).to(flat.dtype)
    return torch.where(sound | ~largest.isfinite(), norm, found)


def qsgd(levels: int) -> Compressor:
    """QSGD: send the norm, and each entry rounded at random to one of s levels and its sign.

    |x_j| / ||x|| lies between two multiples of 1/s, and one of them is drawn so that its mean is
    right (Alistarh et al. 2017, section 3.1). An entry has ceil(log2(2 s + 1)) bits. A norm that
    overflows is replaced by the largest number of the type, which keeps the means right.

    Args:
        levels: s.
    """
    if not isinstance(levels, int) or not 1 <= levels < 1 << 15:
        raise InputError(f"qsgd has {levels} levels: give a whole number from 1 to {(1 << 15) - 1}")
    bits = (2 * levels).bit_length()

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        scale = _norms(flat)
        ratio = (flat / torch.where(scale > 0, scale, 1)).double()
        drawn = torch.from_numpy(rng.random(flat.shape[1])).to(flat.device)
        level = (ratio.abs() * levels + drawn).floor().clamp(max=levels)
        codes = (level * ratio.sign()).long() + levels
        return {"scale": scale, "codes": _pack(codes, bits)}

    def error(like: Tensor) -> float:
        size = like[0].numel()
        return min(size / levels**2, math.sqrt(size) / levels)

    def value_of(codes: Tensor) -> Tensor:
        return (codes - levels).double() / levels

    return _scaled_codes("qsgd", bits, encode, value_of, error, unbiased=True)


def sign() -> Compressor:
    """Send the signs, and the mean absolute value as their one scale.

    ||C(x) - x||^2 = ||x||^2 - ||x||_1^2 / d (Karimireddy et al. 2019, arXiv:1901.09847).
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        scale = flat.abs().mean(1, keepdim=True)
        return {"scale": scale, "codes": _pack((flat >= 0).long(), 1)}

    def error(like: Tensor) -> float:
        return 1 - 1 / like[0].numel()

    return _scaled_codes("sign", 1, encode, lambda codes: 2.0 * codes - 1, error, unbiased=False)


def svd(rank: int) -> Compressor:
    """Send matrices as the two factors of their nearest matrix of rank r.

    Vectors, and matrices whose factors would be no smaller, are sent as they are.

    Args:
        rank: r.
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        if factors_fit(value, rank) is None:
            return {WHOLE: value}
        left, right = factors(value.flatten(2), rank)
        return {"left": left, "right": right}

    return _factored("low-rank", rank, encode)


def power(rank: int, iterations: int = 1) -> Compressor:
    """PowerSGD: send matrices as two factors of rank r, found by power iteration.

    An iteration is L = orth(M R^T), R = L^T M, and the receiver reads L R, a projection of M. R
    begins as that of the sender's last message, so for matrices that change little, L R approaches
    the nearest matrix of rank r from round to round (Vogels et al. 2019, arXiv:1905.13727). At
    first, R is drawn from a normal distribution; so are later those of its rows that are 0 up to
    rounding, because they tell nothing of M. Vectors, and matrices whose factors would be no
    smaller, are sent as they are.

    Args:
        rank: r.
        iterations: Iterations for each message.
    """
    if not isinstance(iterations, int) or iterations < 1:
        raise InputError(f"power has {iterations} iterations: give a whole number of 1 or more")

    def encode(value: Tensor, rng: np.random.Generator, kept: Tensor | None = None) -> Parts:
        if (size := factors_fit(value, rank)) is None:
            return {WHOLE: value}
        matrix = value.flatten(2)
        drawn = torch.from_numpy(rng.standard_normal((rank, size[1]))).to(matrix)
        right = drawn.expand(len(matrix), *drawn.shape)
        if kept is not None:
            norms = torch.linalg.vector_norm(kept.to(matrix), dim=2, keepdim=True)
            least = norms.amax(1, keepdim=True) * torch.finfo(matrix.dtype).eps * max(size)
            right = torch.where(norms > least, kept.to(matrix), right)
        left = matrix
        for _ in range(iterations):
            left = torch.linalg.qr(matrix @ right.mT).Q.contiguous()
            right = left.mT @ matrix
        return {"left": left, "right": right}

    return replace(_factored("power", rank, encode), kept="right")


def _factored(name: str, rank: int, encode: Callable[..., Parts]) -> Compressor:
    """A compressor that sends factors [S, m, r] and [S, r, n] of matrices [S, m, n]."""
    if not isinstance(rank, int) or rank < 1:
        raise InputError(f"the rank of {name} is {rank}: give a whole number of 1 or more")

    def decode(parts: Parts, like: Tensor) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        left, right = parts["left"].to(like.device), parts["right"].to(like.device)
        return (left @ right).view(like.shape)

    def template(like: Tensor) -> Parts:
        if (size := factors_fit(like, rank)) is None:
            return {WHOLE: like}
        left = like.new_empty((len(like), size[0], rank))
        return {"left": left, "right": like.new_empty((len(like), rank, size[1]))}

    def error(like: Tensor) -> float:
        size = factors_fit(like, rank)
        return 0.0 if size is None else 1 - rank / min(size)

    return Compressor(name, encode, decode, template, error)


def compressor(
    name: str, share: float = 0.1, levels: int = 7, rank: int = 4, iterations: int = 1
) -> Compressor:
    """The compressor of that name in [compression]; each reads its own argument."""
    makers: dict[str, Callable[[], Compressor]] = {
        "none": identity,
        "top-k": lambda: top_k(share),
        "random-k": lambda: random_k(share),
        "rows": lambda: rows(share),
        "qsgd": lambda: qsgd(levels),
        "sign": sign,
        "low-rank": lambda: svd(rank),
        "power": lambda: power(rank, iterations),
    }
    if name not in makers:
        raise InputError(f"there is no compressor {name!r}: name one of {', '.join(makers)}")
    return makers[name]()


# Trees of tensors: a model and the states of links


def _flat_name(name: str, part: str) -> str:
    return f"{name}:{part}" if part else name


def encoded(
    compressor: Compressor, trees: Trees, like: Params, draw: DrawOf, memory: Params = NO_MEMORY
) -> dict[str, Params]:
    """The tensors of a message that carries these trees, whose sender has that memory.

    Tensors of the names and shapes of `like` are compressed; all others, such as running statistics
    of BatchNorm, counts of steps or single numbers, are sent as they are.
    """
    found: dict[str, Params] = {}
    for number, (tree, held) in enumerate(sorted(trees.items())):
        found[tree] = {}
        for block, (name, value) in enumerate(sorted(held.items())):
            if not compressible(value, name, like):
                found[tree][name] = value
                continue
            kept = memory.get(f"{tree}.{_flat_name(name, compressor.kept)}")
            given = () if kept is None or not compressor.kept else (kept,)
            parts = compressor.encode(value, draw(number, block), *given)
            found[tree] |= {_flat_name(name, part): one for part, one in parts.items()}
    return found


def decoded(compressor: Compressor, trees: Trees, like: Params) -> dict[str, Params]:
    """The trees that a message carries."""
    found: dict[str, Params] = {}
    for tree, held in trees.items():
        rest = dict(held)
        found[tree] = {}
        for name, value in like.items():
            if not compressible(value, name, like):
                continue
            names = {part: _flat_name(name, part) for part in compressor.template(value)}
            if all(one in rest for one in names.values()):
                parts = {part: rest.pop(one) for part, one in names.items()}
                found[tree][name] = compressor.decode(parts, value)
        found[tree] |= rest
    return found


def templates(compressor: Compressor, trees: Trees, like: Params) -> dict[str, Params]:
    """Tensors like those of a message that carries trees like these."""
    found: dict[str, Params] = {}
    for tree, held in trees.items():
        found[tree] = {}
        for name, value in held.items():
            parts = compressor.template(value) if compressible(value, name, like) else {"": value}
            found[tree] |= {_flat_name(name, part): one for part, one in parts.items()}
    return found


def compressible(value: Tensor, name: str, like: Params) -> bool:
    """Whether a tensor of that name belongs to a learned parameter, and has axes and entries."""
    if name not in like or value.ndim < 2 or not value.numel():
        return False
    return value.shape == like[name].shape and value.dtype == like[name].dtype


def draws_of(seed: int, what: Draw, round: int, client: int = 0) -> DrawOf:
    """The draws of a message: each tensor has its own generator."""
    return lambda tree, block: generator(
        seed, what, round=round, client=client, step=tree, block=block
    )


# What clients and the server of a run do


@dataclass(frozen=True)
class Compression:
    """How the messages of a run are compressed.

    The update u of a client is what it returns minus what it received: of the model, and of each
    state that is sent and returned. A state that is only returned is an update itself. The server
    adds C(u) to what it sent, and its rule sees the sum. With feedback, a client keeps a memory e
    of the same shapes, which is 0 at first:

    - "error" (EF14): the message is c = C(u + e), and e <- u + e - c.
    - "ef21": the message is c = C(u - e), and e <- e + c. The server holds g, the mean of the e of
      all N clients: g <- g + (1/N) sum of the c, and its rule sees what it sent plus g.

    A client also keeps what its compressor needs for the next message: the right factors of power.

    Sources: Seide et al. 2014 and Karimireddy et al. 2019 (arXiv:1901.09847) for "error";
    Richtarik et al. 2021 (arXiv:2106.05203) and Fatkhullin et al. 2021 (arXiv:2110.03294) for
    "ef21", with partial participation.

    Attributes:
        uplink: Compressor of the clients.
        downlink: Compressor of the server, for the model and the states that it sends.
        feedback: "none", "error" or "ef21".
        seed: Seed of the draws.
        clients: N, the number of all clients, which "ef21" counts on.
        direction: Whether what returns as the model is a direction, which is an update itself.
    """

    uplink: Compressor = field(default_factory=identity)
    downlink: Compressor = field(default_factory=identity)
    feedback: str = "none"
    seed: int = 0
    clients: int = 0
    direction: bool = False

    @property
    def up(self) -> bool:
        """Whether the messages of clients are compressed."""
        return self.uplink.name != "none"

    @property
    def down(self) -> bool:
        """Whether the messages of the server are compressed."""
        return self.downlink.name != "none"

    @property
    def keeps(self) -> bool:
        """Whether clients keep something of their messages."""
        return self.feedback != "none" or bool(self.uplink.kept)

    @property
    def estimates(self) -> bool:
        """Whether the server keeps the mean of the clients' memories."""
        return self.feedback == "ef21"

    def _base(self, sent: Trees, tree: str) -> Params:
        """What the update of a tree is counted from."""
        return {} if self.direction and tree == MODEL else sent.get(tree, {})

    def message(
        self, returned: Trees, received: Trees, memory: Params, round: int, client: int
    ) -> tuple[dict[str, Params], Params]:
        """The trees of a client's message, and its memory after it (empty without feedback).

        Args:
            returned: The client's model and states at the end of its round.
            received: Those that it began with.
            memory: Its memory, by `tree.name` or `tree.name:part`; empty is 0.
            round: The round, for the draws.
            client: The client, for the draws.
        """
        like, sign = split_statistics(received[MODEL])[0], 1 if self.feedback == "error" else -1
        target: dict[str, Params] = {}
        for tree, held in returned.items():
            target[tree] = dict(held)
            for name, value in held.items():
                if not compressible(value, name, like):
                    continue
                before = self._base(received, tree).get(name)
                target[tree][name] = value if before is None else value - before
                if (kept := memory.get(f"{tree}.{name}")) is not None:
                    target[tree][name] = target[tree][name] + sign * kept.to(value)
        draw = draws_of(self.seed, Draw.COMPRESSION, round, client)
        message = encoded(self.uplink, target, like, draw, memory)
        after: Params = {
            f"{tree}.{name}": value
            for tree, held in message.items()
            for name, value in held.items()
            if self.uplink.kept and name.endswith(f":{self.uplink.kept}")
        }
        if self.feedback == "none":
            return message, after
        for tree, held in decoded(self.uplink, message, like).items():
            for name, found in held.items():
                if not compressible(found, name, like):
                    continue
                of = f"{tree}.{name}"
                if self.feedback == "error":
                    after[of] = target[tree][name] - found
                else:
                    after[of] = memory[of].to(found) + found if of in memory else found
        return message, after

    def replies(
        self, messages: Sequence[Trees], sent: Trees, mean: Trees
    ) -> tuple[list[dict[str, Params]], dict[str, Params]]:
        """The clients' models and states as the server reads them, and g after the round.

        Args:
            messages: The clients' messages, in the order of the clients.
            sent: What the clients received.
            mean: g before the round, by tree; empty without "ef21".
        """
        like = split_statistics(sent[MODEL])[0]
        share = len(messages) / self.clients if self.estimates else 1.0
        found, after = [], {tree: dict(held) for tree, held in mean.items()}
        for message in messages:
            trees = decoded(self.uplink, message, like)
            for tree, held in trees.items():
                for name, change in held.items():
                    if not compressible(change, name, like):
                        continue
                    base = self._base(sent, tree).get(name)
                    if self.estimates:
                        g = mean[tree][name]
                        after[tree][name] = after[tree][name] + change / self.clients
                        change = g + share * change
                    held[name] = change if base is None else base + change
            found.append(trees)
        return found, after

    def broadcast(self, trees: Trees, round: int) -> dict[str, Params]:
        """The trees of the server's message."""
        like = split_statistics(trees[MODEL])[0]
        return encoded(self.downlink, trees, like, draws_of(self.seed, Draw.BROADCAST, round))
