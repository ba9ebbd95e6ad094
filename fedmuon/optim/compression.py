"""Compressors, which reduce the bytes of a message.

A `Compressor` converts one tensor to the small tensors of a message, and back. C(x) is the tensor
that the receiver decodes. All compressors except `identity` lose information. For a contractive
compressor, E||C(x) - x||^2 <= e ||x||^2 with e < 1. For an unbiased compressor, the expectation of
C(x) is x. `Compression` defines the compressors of the clients and of the server in a run.
`Compression` also defines how clients later correct for the lost information (feedback).

Tensors have a leading axis of replicas [S, ...]. Each replica is compressed separately. All
replicas share the random draws, which come from the generator passed to the compressor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmuon.core.demands import Trait
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.optim.chain import States, zeros
from fedmuon.optim.encoding_stage import require_encoded_once
from fedmuon.optim.low_rank import factors, factors_fit
from fedmuon.optim.stage import MODEL, Broadcast, Reply, ServerState, Stage, Trees, require_finite
from fedmuon.tasks.base import Params, split_statistics

AnyTrees = Mapping[str, Params]  # like `Trees`, but read-only
DrawOf = Callable[[int, int], np.random.Generator]  # (tree number, tensor number) -> generator
Parts = dict[str, Tensor]  # the tensors of a message that encode one tensor, by kind
NO_MEMORY: Params = {}
WHOLE = ""  # the part of an uncompressed tensor
FEEDBACK = "compression"  # name of the state that a client stores about its own updates
ESTIMATE = "ef21-"  # prefix of a tree's name: the server's mean of the clients' estimates


@dataclass(frozen=True)
class Compressor:
    """A method for writing tensors in messages.

    Attributes:
        name: Name of the compressor in the config table [compression].
        encode: Function that receives a tensor [S, ...] and a random generator, and returns the
            parts of the message. If `kept` names a part, `encode` also accepts this part of the
            sender's last message.
        decode: Function that receives the parts of a message and a tensor like the original, and
            returns C(x).
        template: Function that receives a tensor, and returns parts with the shapes and dtypes of
            the tensor's message.
        error: Function that receives a tensor, and returns the bound e on E||C(x) - x||^2 / ||x||^2
            for tensors of this shape.
        unbiased: Whether the mean of C(x) equals x.
        kept: Name of the part that a sender stores for its next message, or "" if no part is
            stored.
    """

    name: str
    encode: Callable[..., Parts]
    decode: Callable[[Parts, Tensor], Tensor]
    template: Callable[[Tensor], Parts]
    error: Callable[[Tensor], float] = field(default=lambda like: 0.0)
    unbiased: bool = False
    kept: str = ""


def identity() -> Compressor:
    """Return a compressor that sends tensors uncompressed."""
    return Compressor(
        "none",
        lambda value, rng: {WHOLE: value},
        lambda parts, like: parts[WHOLE],
        lambda like: {WHOLE: like},
        unbiased=True,
    )


# Compressors that send some entries or rows


def _count(share: float, size: int) -> int:
    """Return how many of `size` entries or rows to send: the given share, and at least 1."""
    return max(1, min(size, round(share * size)))


def _index_type(size: int) -> torch.dtype:
    """Return the smallest integer type for positions below `size`."""
    return torch.int16 if size <= 1 << 15 else torch.int32 if size <= 1 << 31 else torch.int64


def _pays(like: Tensor, count: int, size: int) -> bool:
    """Return whether sending `count` entries or rows needs fewer bytes than sending all.

    Args:
        like: The tensor to send.
        count: Number of entries or rows that are sent with their positions.
        size: Number of all entries or rows.
    """
    piece = like[0].numel() // size * like.element_size()
    return count * (piece + _index_type(size).itemsize) < size * piece


def _positions(indices: Tensor, size: int) -> Tensor:
    """Check that all positions in a message are below `size`, and return the positions."""
    positions = indices.long()
    if positions.numel() and not (int(positions.min()) >= 0 and int(positions.max()) < size):
        raise InputError(
            f"a compressed tensor in a message has positions outside the range 0 to {size - 1}. "
            "Use the same model and the same [compression] on the server and on all clients."
        )
    return positions


def _require_share(name: str, share: float) -> None:
    if not 0 < share <= 1:
        raise InputError(
            f"share of the compressor {name} is {share}, but it must be above 0 and at most "
            "1. Use share = 0.1, for example."
        )


def _largest(sizes: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest sizes of each replica, in ascending order.

    Among equal sizes, the first positions are chosen, so that all machines agree.
    """
    order = sizes.sort(dim=1, descending=True, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _sparse(
    name: str,
    share: float,
    encode: Callable[[Tensor, np.random.Generator], Parts],
    error: Callable[[Tensor], float],
    unbiased: bool,
) -> Compressor:
    """Make a compressor that sends some entries of a tensor together with their positions.

    The whole tensor is sent if the selected entries and their positions need at least as many
    bytes.
    """
    _require_share(name, share)

    def count(like: Tensor) -> int:
        """Return the number k of sent entries, or 0 if the whole tensor is sent."""
        k, size = _count(share, like[0].numel()), like[0].numel()
        return k if _pays(like, k, size) else 0

    def encode_or_whole(value: Tensor, rng: np.random.Generator) -> Parts:
        return encode(value, rng) if count(value) else {WHOLE: value}

    def decode(parts: Parts, like: Tensor) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        flat = like.new_zeros(like.flatten(1).shape)
        where = _positions(parts["indices"].to(like.device), flat.shape[1])
        return flat.scatter_(1, where, parts["values"].to(like.device)).view(like.shape)

    def template(like: Tensor) -> Parts:
        if not (k := count(like)):
            return {WHOLE: like}
        values = like.new_empty((len(like), k))
        return {"values": values, "indices": values.to(_index_type(like[0].numel()))}

    def error_or_none(like: Tensor) -> float:
        return error(like) if count(like) else 0.0

    return Compressor(name, encode_or_whole, decode, template, error_or_none, unbiased)


def top_k(share: float) -> Compressor:
    """Return a compressor that sends the entries with the largest absolute values.

    The message contains these entries and their positions. `share` is the number of sent entries
    divided by the number of all entries. The whole tensor is sent if the selected entries and their
    positions need at least as many bytes.
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        where = _largest(flat.abs(), _count(share, flat.shape[1]))
        return {"values": flat.gather(1, where), "indices": where.to(_index_type(flat.shape[1]))}

    def error(like: Tensor) -> float:
        return 1 - _count(share, like[0].numel()) / like[0].numel()

    return _sparse("top-k", share, encode, error, unbiased=False)


def random_k(share: float) -> Compressor:
    """Return a compressor that sends k random entries of a tensor.

    The entries are multiplied by d / k, where d is the number of all entries.

    The message contains these entries and their positions.
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
    """Return a compressor that sends the rows with the largest Euclidean norms.

    A tensor [S, m, ...] is a stack of matrices with m rows. The message contains the largest rows
    and their positions. `share` is the number of sent rows divided by m. Vectors are sent
    uncompressed. A matrix is sent whole if its largest rows and their positions need at least as
    many bytes. Dion2 (arXiv:2512.16928) selects rows of the momentum in the same way, with error
    feedback.
    """
    _require_share("rows", share)

    def count(like: Tensor) -> int:
        """Return the number k of sent entries, or 0 if the whole tensor is sent."""
        k = _count(share, like.shape[1]) if _is_matrix(like) else 0
        return k if k and _pays(like, k, like.shape[1]) else 0

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        if not (k := count(value)):
            return {WHOLE: value}
        matrix = value.flatten(2)
        where = _largest(matrix.square().sum(2), k)
        largest = matrix.gather(1, where[..., None].expand(-1, -1, matrix.shape[2]))
        return {"rows": largest, "indices": where.to(_index_type(matrix.shape[1]))}

    def decode(parts: Parts, like: Tensor) -> Tensor:
        if WHOLE in parts:
            return parts[WHOLE]
        matrix = like.new_zeros(like.flatten(2).shape)
        where = _positions(parts["indices"].to(like.device), matrix.shape[1])
        where = where[..., None].expand(-1, -1, matrix.shape[2])
        return matrix.scatter_(1, where, parts["rows"].to(like.device)).view(like.shape)

    def template(like: Tensor) -> Parts:
        if not (k := count(like)):
            return {WHOLE: like}
        m, n = like.shape[1], like[0, 0].numel()
        values = like.new_empty((len(like), k, n))
        return {"rows": values, "indices": values[..., 0].to(_index_type(m))}

    def error(like: Tensor) -> float:
        return 1 - k / like.shape[1] if (k := count(like)) else 0.0

    return Compressor("rows", encode, decode, template, error)


# Compressors that send all entries with few bits


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack integers below 2^bits into bytes, separately for each replica."""
    places = torch.arange(bits, device=codes.device)
    planes = ((codes.unsqueeze(-1) >> places) & 1).to(torch.uint8).flatten(1)
    planes = torch.nn.functional.pad(planes, (0, -planes.shape[1] % 8)).unflatten(1, (-1, 8))
    weights = 1 << torch.arange(8, device=codes.device)
    return (planes * weights).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return the `size` integers of each replica that `pack` has packed into bytes."""
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
    """Make a compressor that sends one scale per tensor, and `bits` bits per entry."""

    def decode(parts: Parts, like: Tensor) -> Tensor:
        codes = unpack(parts["codes"].to(like.device), bits, like[0].numel())
        return (value_of(codes).to(like.dtype) * parts["scale"].to(like.device)).view(like.shape)

    def template(like: Tensor) -> Parts:
        length = -(-like[0].numel() * bits // 8)
        codes = torch.empty((len(like), length), dtype=torch.uint8, device=like.device)
        return {"scale": like.new_empty((len(like), 1)), "codes": codes}

    return Compressor(name, encode, decode, template, error, unbiased)


def _norms(flat: Tensor) -> Tensor:
    """Return the Euclidean norm of each row.

    If the squares of finite numbers overflow or underflow, the norm is computed from scaled
    numbers. A norm that is too large for the dtype becomes the largest number of the dtype.
    """
    norm = torch.linalg.vector_norm(flat, dim=1, keepdim=True)
    if (sound := (norm > 0) & norm.isfinite()).all():
        return norm
    wide = flat.double()
    largest = wide.abs().amax(1, keepdim=True)
    scaled = wide / torch.where(largest > 0, largest, 1)
    scaled_norm = largest * torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    scaled_norm = scaled_norm.clamp(max=torch.finfo(flat.dtype).max).to(flat.dtype)
    return torch.where(sound | ~largest.isfinite(), norm, scaled_norm)


def qsgd(levels: int) -> Compressor:
    """Return QSGD, a compressor that rounds each entry to one of a few levels at random.

    The compressor sends the norm of the tensor, and the sign and the level of each entry. For an
    entry x_j, |x_j| / ||x|| lies between two multiples of 1/s. The compressor draws one of these
    two multiples, so that the expected value is |x_j| / ||x|| (Alistarh et al. 2017, section 3.1).
    An entry needs ceil(log2(2 s + 1)) bits. If the norm overflows, the largest number of the dtype
    is sent instead.

    Args:
        levels: The number s of levels.
    """
    if not isinstance(levels, int) or not 1 <= levels < 1 << 15:
        raise InputError(
            f"levels of the compressor qsgd is {levels}, but it must be an integer from 1 to "
            f"{(1 << 15) - 1}. Use levels = 4, for example."
        )
    bits = (2 * levels).bit_length()

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        scale = _norms(flat)
        ratio = (flat / torch.where(scale > 0, scale, 1)).double()
        drawn = torch.from_numpy(rng.random(flat.shape[1])).to(flat.device)
        level = (ratio.abs() * levels + drawn).floor().clamp(max=levels)
        codes = (level * ratio.sign()).long() + levels
        return {"scale": scale, "codes": pack(codes, bits)}

    def error(like: Tensor) -> float:
        size = like[0].numel()
        return min(size / levels**2, math.sqrt(size) / levels)

    def value_of(codes: Tensor) -> Tensor:
        return (codes - levels).double() / levels

    return _scaled_codes("qsgd", bits, encode, value_of, error, unbiased=True)


def sign() -> Compressor:
    """Return a compressor that sends the signs of all entries and the mean absolute value.

    The receiver multiplies the signs by the mean absolute value. For a tensor x with d entries, the
    squared error ||C(x) - x||^2 is ||x||^2 - ||x||_1^2 / d (Karimireddy et al. 2019,
    arXiv:1901.09847).
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        flat = value.flatten(1)
        scale = flat.abs().mean(1, keepdim=True)
        return {"scale": scale, "codes": pack((flat >= 0).long(), 1)}

    def error(like: Tensor) -> float:
        return 1 - 1 / like[0].numel()

    return _scaled_codes("sign", 1, encode, lambda codes: 2.0 * codes - 1, error, unbiased=False)


def svd(rank: int) -> Compressor:
    """Return a compressor that sends the nearest matrix of rank r as two factors.

    Vectors are sent uncompressed. A matrix is compressed only if its factors have fewer entries.

    Args:
        rank: The rank r.
    """

    def encode(value: Tensor, rng: np.random.Generator) -> Parts:
        if factors_fit(value, rank) is None:
            return {WHOLE: value}
        left, right = factors(value.flatten(2), rank)
        return {"left": left, "right": right}

    return _factored("low-rank", rank, encode)


def power(rank: int, iterations: int = 1) -> Compressor:
    """Return PowerSGD, a compressor that sends a matrix as two factors of rank r.

    The factors L and R are found by power iteration. One iteration computes L = orth(M R^T) and R =
    L^T M. The receiver computes L R, which is a projection of M. The iterations for a message start
    with the matrix R of the sender's last message (Vogels et al. 2019, arXiv:1905.13727). If M
    changes little between rounds, L R approaches the nearest matrix of rank r. In the first round,
    R is drawn from a normal distribution. Later, rows of R that are 0 up to rounding are drawn
    again, because they contain no information about M. Vectors are sent uncompressed, and so are
    matrices that have no more entries than their factors.

    Args:
        rank: The rank r.
        iterations: Number of iterations per message.
    """
    if not isinstance(iterations, int) or iterations < 1:
        raise InputError(
            f"iterations of the compressor power is {iterations}, but it must be an integer of 1 "
            "or more. Use iterations = 1, for example."
        )

    def encode(value: Tensor, rng: np.random.Generator, kept: Tensor | None = None) -> Parts:
        if (size := factors_fit(value, rank)) is None:
            return {WHOLE: value}
        matrix = value.flatten(2)
        drawn = torch.from_numpy(rng.standard_normal((rank, size[1]))).to(matrix)
        right = drawn.expand(len(matrix), *drawn.shape)
        if kept is not None:
            norms = torch.linalg.vector_norm(kept.to(matrix), dim=2, keepdim=True)
            threshold = norms.amax(1, keepdim=True) * torch.finfo(matrix.dtype).eps * max(size)
            right = torch.where(norms > threshold, kept.to(matrix), right)
        left = matrix
        for _ in range(iterations):
            left = torch.linalg.qr(matrix @ right.mT).Q.contiguous()
            right = left.mT @ matrix
        return {"left": left, "right": right}

    return replace(_factored("power", rank, encode), kept="right")


def _factored(name: str, rank: int, encode: Callable[..., Parts]) -> Compressor:
    """Make a compressor that sends each matrix as two factors of rank r."""
    if not isinstance(rank, int) or rank < 1:
        raise InputError(
            f"rank of the compressor {name} is {rank}, but it must be an integer of 1 or more. Use "
            "rank = 4, for example."
        )

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
    """Return the compressor with this name in the config table [compression].

    Each compressor uses its own option, and ignores the options of other compressors.
    """
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
        raise InputError(f"the compressor {name!r} is unknown. Use one of {', '.join(makers)}.")
    return makers[name]()


# Trees of tensors: a model and the states of links


def _flat_name(name: str, part: str) -> str:
    return f"{name}:{part}" if part else name


def encoded(
    compressor: Compressor, trees: AnyTrees, like: Params, draw: DrawOf, memory: Params = NO_MEMORY
) -> Trees:
    """Compress trees (a model and states) to the tensors of a message.

    Only tensors with the names and shapes of `like` are compressed. Other tensors, such as
    BatchNorm statistics, step counts and scalars, are sent uncompressed. `memory` contains the
    parts that the sender has stored from its last message.
    """
    message: Trees = {}
    for number, (tree, tensors) in enumerate(sorted(trees.items())):
        message[tree] = {}
        for block, (name, value) in enumerate(sorted(tensors.items())):
            if not compressible(value, name, like):
                message[tree][name] = value
                continue
            previous = memory.get(f"{tree}.{_flat_name(name, compressor.kept)}")
            memory_part = () if previous is None or not compressor.kept else (previous,)
            parts = compressor.encode(value, draw(number, block), *memory_part)
            message[tree] |= {_flat_name(name, part): tensor for part, tensor in parts.items()}
    return message


def decoded(compressor: Compressor, trees: AnyTrees, like: Params) -> Trees:
    """Decompress the trees (a model and states) that a message contains."""
    decompressed: Trees = {}
    for tree, tensors in trees.items():
        remaining = dict(tensors)
        decompressed[tree] = {}
        for name, value in like.items():
            if not compressible(value, name, like):
                continue
            names = {part: _flat_name(name, part) for part in compressor.template(value)}
            if all(key in remaining for key in names.values()):
                parts = {part: remaining.pop(key) for part, key in names.items()}
                decompressed[tree][name] = compressor.decode(parts, value)
        decompressed[tree] |= remaining
    return decompressed


def templates(compressor: Compressor, trees: AnyTrees, like: Params) -> Trees:
    """Return tensors with the names and shapes of the message for the given model and states."""
    template_trees: Trees = {}
    for tree, tensors in trees.items():
        template_trees[tree] = {}
        for name, value in tensors.items():
            parts = compressor.template(value) if compressible(value, name, like) else {"": value}
            template_trees[tree] |= {
                _flat_name(name, part): tensor for part, tensor in parts.items()
            }
    return template_trees


def compressible(value: Tensor, name: str, like: Params) -> bool:
    """Return whether a tensor is like a learned parameter, and neither scalar nor empty."""
    if name not in like or value.ndim < 2 or not value.numel():
        return False
    return value.shape == like[name].shape and value.dtype == like[name].dtype


def draws_of(seed: int, what: Draw, round: int, client: int = 0) -> DrawOf:
    """Return a function that makes a separate random generator for each tensor in a message."""
    return lambda tree, block: generator(
        seed, what, round=round, client=client, step=tree, block=block
    )


# Compression on the clients and the server


@dataclass(frozen=True)
class Compression(Stage):
    """How the messages of a run are compressed.

    A client's update u is the returned tensor minus the received tensor. If a client returns a
    state that it did not receive, u is the state itself. A client sends the compressed update C(u).
    The server adds C(u) to the tensor that was sent, and passes the sum to its rule. With feedback,
    a client stores a memory e with the same shapes, which starts at 0:

    - "error" (EF14): the client sends c = C(u + e), and sets e <- u + e - c.
    - "ef21": the client sends c = C(u - e), and sets e <- e + c. The server stores g, the mean of e
      over all N clients. In each round, the server adds the sum of all c, divided by N, to g. The
      server's rule receives g plus the tensor that was sent.

    A client also stores the part that its compressor needs for the next message, such as the right
    factors of `power`.

    Sources: Seide et al. 2014 and Karimireddy et al. 2019 (arXiv:1901.09847) for "error"; Richtarik
    et al. 2021 (arXiv:2106.05203) and Fatkhullin et al. 2021 (arXiv:2110.03294) for "ef21", with
    partial participation.

    Attributes:
        uplink: Compressor of the clients.
        downlink: Compressor of the server, for the model and the states that it sends.
        feedback: "none", "error" or "ef21".
        seed: Seed of the random draws.
        clients: The number N of all clients, which "ef21" needs.
        direction: Whether clients return a direction as u, instead of a model.
    """

    uplink: Compressor = field(default_factory=identity)
    downlink: Compressor = field(default_factory=identity)
    feedback: str = "none"
    seed: int = 0
    clients: int = 0
    direction: bool = False

    def require(self, recipe: Any) -> None:
        """Raise an error if another stage compresses or encodes the same messages."""
        require_encoded_once(recipe.stages)

    @property
    def facts(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return what privacy, FedBuff and other compressors must know."""
        true = {
            Trait.COMPRESSES_REPLIES: self.up,
            Trait.COMPRESSES_MODEL: self.down,
            Trait.SUM_OF_ALL_CLIENTS: self.estimates and self.up,
        }
        return tuple(fact for fact in true if true[fact])

    @property
    def up(self) -> bool:
        """Whether the clients' messages are compressed."""
        return self.uplink.name != "none"

    @property
    def down(self) -> bool:
        """Whether the server's messages are compressed."""
        return self.downlink.name != "none"

    @property
    def keeps(self) -> bool:
        """Whether clients store tensors between their messages."""
        return self.feedback != "none" or bool(self.uplink.kept)

    @property
    def estimates(self) -> bool:
        """Whether the server stores the mean of the clients' memories."""
        return self.feedback == "ef21"

    @property
    def stores(self) -> tuple[str, ...]:  # type: ignore[override]
        """The name of the client's memory, if the clients store one."""
        return (FEEDBACK,) if self.keeps else ()

    @property
    def exact(self) -> bool:  # type: ignore[override]
        """Whether the server's messages are not compressed."""
        return not self.down

    def send(self, message: Trees, server: ServerState) -> Trees:
        """Compress the server's model and states."""
        return self.broadcast(message, server.round) if self.down else message

    def open(self, message: Trees, model: Callable[[], Params]) -> Trees:
        """Decompress the server's message."""
        if not self.down:
            return message
        return decoded(self.downlink, message, split_statistics(model())[0])

    def reply(self, reply: Reply, received: Broadcast, memory: States) -> Reply:
        """Compress a client's reply, and let the client store its next memory.

        Raises:
            NonFinite: If the reply contains NaN or infinity, which a compressor could hide.
        """
        if not self.up:
            return reply
        tensors = [tensor for tree in reply.trees.values() for tensor in tree.values()]
        require_finite(tensors, "update", reply.client, received.round)
        memory_before = memory.get(FEEDBACK, {})
        message, memory_after = self.message(
            reply.trees, received.trees, memory_before, received.round, reply.client
        )
        sent = reply.with_trees(message)
        return sent.storing(FEEDBACK, memory_after) if self.keeps else sent

    def check(self, reply: Reply, server: ServerState) -> None:
        """Decompress a reply, which rejects positions that are out of range."""
        if self.up:
            decoded(self.uplink, reply.trees, split_statistics(server.params)[0])

    def read(
        self, replies: list[Reply], received: Callable[[], Broadcast], server: ServerState
    ) -> tuple[list[Reply], States]:
        """Decompress the replies. Also return the next g of the server for feedback "ef21"."""
        if not self.up:
            return replies, {}
        names = [name for name in server.states if name.startswith(ESTIMATE)]
        mean = {name.removeprefix(ESTIMATE): server.states[name] for name in names}
        messages = [reply.trees for reply in replies]
        trees_of_replies, mean = self.replies(messages, received().trees, mean)
        read = [
            reply.with_trees(trees) for reply, trees in zip(replies, trees_of_replies, strict=True)
        ]
        return read, {f"{ESTIMATE}{tree}": value for tree, value in mean.items()}

    def sent_like(self, message: Trees) -> Trees:
        """Return tensors like those of the server's compressed message."""
        like = split_statistics(message[MODEL])[0]
        return templates(self.downlink, message, like) if self.down else message

    def returned_like(self, message: Trees) -> Trees:
        """Return tensors like those of a client's compressed reply."""
        like = split_statistics(message[MODEL])[0]
        return templates(self.uplink, message, like) if self.up else message

    def initial(self, model: Params, returned: Sequence[str]) -> States:
        """Return zeros as the first g of each tree, for feedback "ef21"."""
        trees = (MODEL, *returned) if self.estimates else ()
        return {f"{ESTIMATE}{tree}": zeros(model) for tree in trees}

    def _base(self, sent: AnyTrees, tree: str) -> Params:
        """Return the tensors to which the receiver adds the updates.

        The result is empty if clients return the update itself.
        """
        return {} if self.direction and tree == MODEL else sent.get(tree, {})

    def message(
        self, returned: AnyTrees, received: AnyTrees, memory: Params, round: int, client: int
    ) -> tuple[Trees, Params]:
        """Return a client's compressed message, and the memory that the client stores.

        The memory is empty if the run has no feedback and the compressor stores no part.

        Args:
            returned: The client's model and states at the end of its round.
            received: The model and states that the client received.
            memory: The client's memory, with keys `tree.name` or `tree.name:part`. A missing entry
                counts as 0.
            round: The round, for the random draws.
            client: The client, for the random draws.
        """
        like, sign = split_statistics(received[MODEL])[0], 1 if self.feedback == "error" else -1
        target: Trees = {}
        for tree, tensors in returned.items():
            target[tree] = dict(tensors)
            for name, value in tensors.items():
                if not compressible(value, name, like):
                    continue
                before = self._base(received, tree).get(name)
                target[tree][name] = value if before is None else value - before
                if (stored := memory.get(f"{tree}.{name}")) is not None:
                    target[tree][name] = target[tree][name] + sign * stored.to(value)
        draw = draws_of(self.seed, Draw.COMPRESSION, round, client)
        message = encoded(self.uplink, target, like, draw, memory)
        after: Params = {
            f"{tree}.{name}": value
            for tree, tensors in message.items()
            for name, value in tensors.items()
            if self.uplink.kept and name.endswith(f":{self.uplink.kept}")
        }
        if self.feedback == "none":
            return message, after
        for tree, tensors in decoded(self.uplink, message, like).items():
            for name, sent in tensors.items():
                if not compressible(sent, name, like):
                    continue
                key = f"{tree}.{name}"
                if self.feedback == "error":
                    after[key] = target[tree][name] - sent
                else:
                    after[key] = memory[key].to(sent) + sent if key in memory else sent
        return message, after

    def replies(
        self, messages: Sequence[AnyTrees], sent: AnyTrees, mean: AnyTrees
    ) -> tuple[list[Trees], Trees]:
        """Decompress messages. Return the clients' models and states, and the server's next g.


        Args:
            messages: The clients' messages, in the order of the clients.
            sent: The model and states that the clients received.
            mean: The server's g before the round. The mapping is empty without feedback "ef21".
        """
        like = split_statistics(sent[MODEL])[0]
        share = len(messages) / self.clients if self.estimates else 1.0
        decompressed, after = [], {tree: dict(tensors) for tree, tensors in mean.items()}
        for message in messages:
            trees = decoded(self.uplink, message, like)
            for tree, tensors in trees.items():
                for name, change in tensors.items():
                    if not compressible(change, name, like):
                        continue
                    base = self._base(sent, tree).get(name)
                    if self.estimates:
                        g = mean[tree][name]
                        after[tree][name] = after[tree][name] + change / self.clients
                        change = g + share * change
                    tensors[name] = change if base is None else base + change
            decompressed.append(trees)
        return decompressed, after

    def broadcast(self, trees: AnyTrees, round: int) -> Trees:
        """Return the server's compressed message for this model and these states."""
        like = split_statistics(trees[MODEL])[0]
        return encoded(self.downlink, trees, like, draws_of(self.seed, Draw.BROADCAST, round))
