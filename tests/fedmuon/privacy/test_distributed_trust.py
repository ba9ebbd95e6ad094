"""Distributed trust: shares of discrete noise on integers, masks that cancel, sums alone."""

import hashlib
import hmac
import math
import re
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import quick
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from mpmath import mp, mpf
from test_client_level import REPEATABLE, clients, exact_square, tree

from fedmuon.clients.client_app import Clients
from fedmuon.config.load import Config
from fedmuon.core.errors import InputError
from fedmuon.core.rng import Draw, generator
from fedmuon.experiments.run import execute
from fedmuon.experiments.tables import standing
from fedmuon.federated.build import build_plan, resolve
from fedmuon.privacy.accounting.composition import epsilon
from fedmuon.privacy.audit import Setting, both_bounds, trials
from fedmuon.privacy.ledger import Ledger
from fedmuon.privacy.mechanisms import distributed
from fedmuon.privacy.mechanisms.client_level import ClientLevel, leaves
from fedmuon.privacy.mechanisms.discrete import gaussian
from fedmuon.privacy.mechanisms.lattice import BITS, DEVIATION
from fedmuon.privacy.noise import words_of
from fedmuon.runs.loop import train
from fedmuon.runs.prepare import prepare
from fedmuon.server.strategy import FlowerEngine

SHARED: dict[str, Any] = {"cohorts": "fixed", "trust": "distributed", "honest": 1.0}
RECIPES = ("fedavg", "fedavgm", "fedmuon", "local-muon", "fedmuon-aligned", "muon")


def level(noise: float = 1.3, cohort: int = 3, **more: Any) -> ClientLevel:
    return ClientLevel(0.3, noise, cohort, 10, "distributed", False, **{"seed": 7, **more})


# What a client sends, and what is made of the sum.


def drawn(client: int, block: int, count: int) -> np.ndarray:
    """A client's share of the noise of a tensor, of round 4 and seed 7."""
    rng = generator(7, Draw.NOISE, round=4, client=client, block=block)
    return gaussian(words_of(rng), count, BITS)


@pytest.mark.parametrize("size", [1e-9, 0.01, 5.0])
def test_what_is_sent_is_a_shortened_update_and_a_share_in_exact_arithmetic(size: float) -> None:
    """Rationals: no entry is further from 0 than v / g, none is a whole step nearer, and the norm
    is at most C / g, but for one rounding of the quotient."""
    rng, own = np.random.default_rng(0), level()
    held, found = tree(rng, 1.0), tree(rng, size)
    g = Fraction(distributed.spacing(0.3, 1.3, 3))
    sent, v = leaves(own.perturbed(held, found, 4, 1)), leaves(own.clipped(held, found))
    for s in range(2):
        square = Fraction(0)
        for block, (one, clipped) in enumerate(zip(sent, v, strict=True)):
            z = one[s].flatten().numpy() - drawn(1, block, one[s].numel())
            for whole, x in zip(z.tolist(), clipped[s].flatten().tolist(), strict=True):
                exact = abs(Fraction(x)) / g
                assert exact - 1 < abs(whole) <= exact * (1 + Fraction(1, 2**53))
                assert whole * x >= 0
                square += whole**2
        assert square <= (Fraction(0.3) / g * (1 + Fraction(1, 2**53))) ** 2
    assert exact_square(own.clipped(held, found), 0) <= Fraction(0.3) ** 2


def masked(plain: list[Any], count: int) -> list[Any]:
    """What each of these clients sends, each with its mask of `count` entries."""
    keys = [bytes([k + 1]) * 32 for k in range(len(plain))]
    roster = {k: distributed.public_of(one) for k, one in enumerate(keys)}
    masks = [distributed.mask(one, k, roster, count) for k, one in enumerate(keys)]
    return [distributed.masked(*pair) for pair in zip(plain, masks, strict=True)]


def test_what_is_released_is_the_sum_of_integers_modulo_the_masks() -> None:
    """Python's integers, and masks that each wrap around many times."""
    rng, own = np.random.default_rng(1), level(weight=8.0)
    held = tree(rng, 1.0, dtype=torch.float64)
    plain = [own.perturbed(held, tree(rng, 1.0, dtype=torch.float64), 0, k) for k in range(3)]
    hidden = masked(plain, sum(one.numel() for one in leaves(held)))
    after, same = (own.released(held, what, 0) for what in (hidden, plain))
    assert all(torch.equal(a, b) for a, b in zip(leaves(after), leaves(same), strict=True))
    g = distributed.spacing(0.3, 1.3, 3)
    for place, (a, b) in enumerate(zip(leaves(after), leaves(held), strict=True)):
        each = [leaves(one)[place].flatten().tolist() for one in plain]
        sums = np.array([float(sum(entries)) for entries in zip(*each, strict=True)])
        weight = 8.0 if place == 2 else 1.0  # the momentum's
        moved = (a - b).flatten().numpy()
        np.testing.assert_allclose(moved, g * sums / weight / 3, rtol=1e-9, atol=1e-14)


def test_the_variance_of_a_sum_and_of_the_shares_that_count() -> None:
    """(sigma C / K)^2 of K shares, and H / K of it of H. 40,000 entries: 3% is 4 deviations."""
    own = level(1.3, 4, honest=0.5)
    held = {"model": {"a": torch.zeros(1, 200, 200)}}
    sent = [own.perturbed(held, held, 0, k) for k in range(4)]
    after = own.released(held, sent, 0)["model"]["a"]
    assert float(after.var()) == pytest.approx((1.3 * 0.3 / 4) ** 2, rel=0.03)
    g = distributed.spacing(0.3, 1.3, 4)
    honest = torch.stack([one["model"]["a"].double() for one in sent[: own.shares]]).sum(0) * g
    assert own.shares == 2 and own.counted == math.sqrt(0.5)
    assert float(honest.var()) == pytest.approx((1.3 * own.counted * 0.3) ** 2, rel=0.03)


class Honest:
    """What all but the honest and the server know leaves of releases: the sum of H clients' sent
    integers, along an update longer than C that one of them has, or has not; in units of C."""

    def __init__(self, own: ClientLevel) -> None:
        self.own, self.number = own, 0
        self.held = {"model": {"a": torch.zeros(1, 2, 2)}}

    def observe(self, shape: tuple[int, int], present: bool) -> np.ndarray:
        found, g = np.empty(shape), distributed.spacing(0.3, self.own.noise, self.own.cohort)
        for place in np.ndindex(shape):
            self.number += 1  # as a round, which has draws of its own
            update = {"model": {"a": torch.full((1, 2, 2), 0.5 * present)}}
            updates = [update, *[self.held] * (self.own.shares - 1)]
            sent = [self.own.perturbed(self.held, one, self.number, k) for k, one in
                    enumerate(updates)]  # fmt: skip
            total = sum(one["model"]["a"].double().sum().item() for one in sent)
            found[place] = total * g / 2 / 0.3
        return found


def test_an_audit_of_a_client_among_colluders() -> None:
    """One honest share of nine is what the account says, and is not what all nine would be."""
    delta, own = 0.01, level(1.0, 9, honest=0.12)
    setting = Setting(own.noise * own.counted, 1.0, 1, 1)
    seen = trials(setting, Honest(own).observe, 400)
    counted, _ = both_bounds(seen, delta, np.random.default_rng(0))
    true, naive = (epsilon(one, 1.0, 1, delta).upper for one in (1 / 3, 1.0))
    assert naive + 0.3 < counted.epsilon <= true


# The sum of discrete Gaussians.


def lawful(s: float, count: int, reach: int = 60) -> list[Any]:
    """The law of a sum of `count` discrete Gaussians, by convolution, at -reach, ..., reach."""
    one = [mp.exp(-(mpf(y) ** 2) / (2 * mpf(s) ** 2)) for y in range(-reach, reach + 1)]
    one = [value / mp.fsum(one) for value in one]
    found = one
    for _ in range(count - 1):
        found = [
            mp.fsum(found[x] * one[y - x + reach] for x in range(len(one)) if abs(y - x) <= reach)
            for y in range(len(one))
        ]
    return found


def theta(t: Any) -> Any:
    """h(t)."""
    return 2 * mp.fsum(mp.exp(-2 * mp.pi**2 * t**2 * k**2) for k in range(1, 30))


def edges(s: float, count: int) -> tuple[Any, Any]:
    """(3) of `fedmuon.privacy.mechanisms.client_level`."""
    t = [mpf(s) * mp.sqrt(mpf(k) / (k + 1)) for k in range(1, count)]
    low = high = (1 + theta(mpf(s))) ** -count
    for one in t:
        low, high = low * (1 - theta(one)), high * (1 + theta(one))
    return low, high


SUMS = [(s, count) for count in (2, 3) for s in (0.5, 0.75, 1.0)]


@pytest.mark.parametrize(("s", "count"), quick(SUMS, [(0.5, 3), (1.0, 2)]))
def test_a_sum_of_discrete_gaussians_is_within_its_bound(s: float, count: int) -> None:
    """By exact convolution; with a tenth less of what the last share adds, it is not."""
    with mp.workdps(40):
        reach = 30
        law, wide = lawful(s, count, reach), mpf(s) * mp.sqrt(count)
        ratio = [
            law[y + reach] * wide * mp.sqrt(2 * mp.pi) * mp.exp(mpf(y) ** 2 / (2 * wide**2))
            for y in range(-5, 6)
        ]
        low, high = edges(s, count)
        slack = mpf(10) ** -25  # of the sum's ends, and of 40 digits
        assert low * (1 - slack) <= min(ratio) < max(ratio) <= high * (1 + slack)
        if count == 2:
            h = theta(mpf(s) / mp.sqrt(2))
            assert max(ratio) > high / (1 + h) * (1 + h * mpf("0.9"))
            assert min(ratio) < low / (1 - h) * (1 - h * mpf("0.9"))


def test_at_our_deviation_the_bound_is_beneath_every_number() -> None:
    """log10 of eta of a million shares in 10^9 entries and 10^6 rounds."""
    worst = math.log(3e6 * 2 * 1.01 * 1e15) - 2 * math.pi**2 * 64**2  # h(64) is the largest term
    assert DEVIATION / math.sqrt(2) > 64 and worst / math.log(10) < -35000


# The modulus.


def test_a_wrap_around_or_a_missing_mask_is_noticed() -> None:
    own = level()
    held = {"model": {"a": torch.zeros(1, 40)}}
    sent = [own.perturbed(held, held, 0, k) for k in range(3)]
    own.released(held, sent, 0)
    full = {"model": {"a": torch.full((1, 40), 2**62 + 1)}}
    with pytest.raises(InputError, match="larger than any sum of clipped updates"):
        own.released(held, [full] * 3, 0)  # 3 (2^62 + 1) = -2^62 + 3
    hidden = masked(sent, 40)
    own.released(held, hidden, 0)
    with pytest.raises(InputError, match="A mask is missing"):
        own.released(held, [*hidden[:2], sent[2]], 0)
    with pytest.raises(InputError, match="2 of 3 clients sent"):
        own.released(held, hidden[:2], 0)


def test_there_is_room_for_every_sum_or_none_is_begun() -> None:
    """All of a cohort with entries of full length and noise of 40 deviations stay below 2^60. The
    noise that is named is enough, and a hundredth less is not."""
    g = Fraction(distributed.spacing(0.3, 0.01, 10**4))
    most = distributed.reach(0.01, 10**4)
    assert 10**4 * Fraction(0.3) / g + 40 * 2**32 * 100 <= most <= 2**60
    for noise, cohort in ((1e-3, 10**4), (0.0, 3), (1.0, 10**6)):
        with pytest.raises(InputError, match=r"wrap around. Set noise = .* or more, or") as error:
            distributed.spacing(0.3, noise, cohort)
        least = float(re.findall(r"Set noise = (\S+)", str(error.value))[0])
        distributed.reach(least, cohort)
        with pytest.raises(InputError, match="could wrap around"):
            distributed.reach(0.99 * least, cohort)


# The masks.


# RFC 7748, section 6.1
BOB = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
BOBS = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
ALICES = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
SECRET = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"
PRIVATE = [BOB, *(hashlib.sha256(bytes([k])).digest() for k in range(4))]
ROSTER = {10 * k: distributed.public_of(one) for k, one in enumerate(PRIVATE)}


def exchanged(private: bytes, public: bytes) -> bytes:
    key = X25519PublicKey.from_public_bytes(public)
    return X25519PrivateKey.from_private_bytes(private).exchange(key)


def naive(client: int, count: int) -> list[int]:
    """M_k, by Python's integers, HMAC and AES block by block."""
    found = [0] * count
    for other in ROSTER:
        if other == client:
            continue
        low, high = sorted((client, other))
        secret = exchanged(PRIVATE[client // 10], ROSTER[other])
        extracted = hmac.new(bytes(32), secret, "sha256").digest()
        about = b"fedmuon masks" + ROSTER[low] + ROSTER[high] + b"\x01"
        key = hmac.new(extracted, about, "sha256").digest()
        blocks = b"".join(k.to_bytes(16, "big") for k in range(count // 2 + 1))
        cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
        stream, sign = cipher.update(blocks), 1 if client == low else -1
        for k in range(count):
            found[k] += sign * int.from_bytes(stream[8 * k : 8 * k + 8], "little")
    return [(one + 2**63) % 2**64 - 2**63 for one in found]


def test_masks_are_what_three_standards_make_of_the_keys() -> None:
    assert distributed.public_of(BOB).hex() == BOBS
    assert exchanged(BOB, bytes.fromhex(ALICES)).hex() == SECRET
    for client in (0, 20, 40):
        own = distributed.mask(PRIVATE[client // 10], client, ROSTER, 7)
        assert own.tolist() == naive(client, 7)


def uniformity(vector: np.ndarray) -> float:
    """The largest chi-square, over the eight bytes of an entry, in deviations from what is fair."""
    bytes_of = vector.view(np.uint8).reshape(-1, 8)
    fair = len(vector) / 256
    found = [((np.bincount(one, minlength=256) - fair) ** 2 / fair).sum() for one in bytes_of.T]
    return (max(found) - 255) / math.sqrt(2 * 255)


def test_a_masked_vector_looks_uniform_and_a_bare_one_does_not() -> None:
    """Of noise of 2^32, the upper bytes tell at once. What three clients tell the server leaves the
    vectors of the two others uniform, and their sum known."""
    count = 2**14
    sent = [drawn(k, 0, count) for k in range(5)]
    every = [distributed.mask(PRIVATE[k], 10 * k, ROSTER, count) for k in range(5)]
    hidden = [one + mask for one, mask in zip(sent, every, strict=True)]
    assert all(uniformity(one) < 5 for one in hidden)
    assert min(uniformity(one) for one in sent) > 1000
    assert np.array_equal(sum(hidden), sum(sent))
    pair = {client: ROSTER[client] for client in (0, 10)}
    own = [distributed.mask(PRIVATE[k], 10 * k, pair, count) for k in range(2)]
    left = [hidden[k] - (every[k] - own[k]) for k in range(2)]  # three agreed on the difference
    assert all(uniformity(one) < 5 for one in left)
    assert np.array_equal(left[0] + left[1], sent[0] + sent[1])


# Runs.


@pytest.mark.parametrize("recipe", quick(RECIPES, RECIPES[::2]))
def test_a_run_of_every_recipe_counts_the_honest_shares(recipe: str, tmp_path: Path) -> None:
    """Of three shares two: sigma sqrt(2/3) is what the ledger and epsilon have."""
    what = clients(recipe, rounds=2, **SHARED | {"honest": 0.7})
    spent = execute(what, tmp_path)["privacy"]
    ledger = Ledger.read(tmp_path / "ledger.jsonl")
    counted = math.sqrt(2 / 3)
    assert {one.noise_multiplier for one in ledger.entries} == {counted}
    said = {"trust": "distributed", "honest": 2, "shares": 3, "modulus": "2^64"}
    assert said.items() <= ledger.about.items() and said.items() <= spent.items()
    taken = max(np.bincount(np.load(tmp_path / "schedule.npy").ravel()))
    assert spent["upper"] == epsilon(counted, 1.0, int(taken), 1e-5).upper
    assert spent["upper"] > epsilon(1.0, 1.0, int(taken), 1e-5).upper
    assert spent["certified"] and spent["adjacency"] == "zero-out" and spent["noise"] == 1.0
    assert "2 of 3 shares of noise count" in standing(spent)
    assert "client_loss" not in (tmp_path / "rounds.jsonl").read_text()


def test_noise_is_found_for_a_target_of_the_honest_shares(tmp_path: Path) -> None:
    found = {}
    for honest in (1.0, 0.34):
        what = clients("fedavg", noise=0.0, epsilon=3.0, **{**SHARED, "honest": honest})
        spent = execute(what, tmp_path / str(honest))["privacy"]
        assert 2.9 < spent["epsilon"] <= 3.0
        found[honest] = spent["noise"]
    assert found[0.34] == pytest.approx(found[1.0] * math.sqrt(3), rel=1e-9)
    with pytest.raises(InputError, match=r"more than \[privacy\] epsilon = 3"):
        what = clients("fedavg", noise=found[1.0] * 1.1, epsilon=3.0, **{**SHARED, "honest": 0.34})
        execute(what, tmp_path / "loud")


def test_a_client_always_counts_its_own_share() -> None:
    assert [level(cohort=10, honest=h).shares for h in (0.01, 0.29, 0.7, 1.0)] == [1, 2, 7, 10]


# Messages.


@pytest.fixture(autouse=True)
def _somebody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages have a sender, which Flower's own processes are told at their start."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Nodes(Grid):
    """Clients of this process, and all that the server saw; `before` sees what a client is sent
    first, and may change it, or end the client."""

    def __init__(self, count: int, before: Callable[[Message], Message] = lambda one: one) -> None:
        self.app, self.before = Clients(), before
        self.state = {node: RecordDict() for node in range(count)}
        self.waiting: dict[str, Message] = {}
        self.seen: list[Message] = []
        self.asked = 0

    def get_node_ids(self):  # type: ignore[override]
        return list(self.state)

    def push_messages(self, messages):  # type: ignore[override]
        return [self._ask(one) for one in messages]

    def _ask(self, message: Message) -> str:
        self._number(message)
        try:
            reply = self.app(self.before(message), self._context(message))
        except InputError as error:
            reply = Message(Error(0, str(error)), reply_to=message)
        return self._keep(reply)

    def _number(self, message: Message) -> None:
        self.asked += 1
        message.metadata.__dict__["_message_id"] = str(self.asked)

    def _context(self, message: Message) -> Any:
        node = message.metadata.dst_node_id
        place: Any = {"partition-id": node}
        return Context(1, node, place, self.state[node], {})

    def _keep(self, reply: Message) -> str:
        self.seen.append(reply)
        self.waiting[name := reply.metadata.reply_to_message_id] = reply
        return name

    def pull_messages(self, message_ids):  # type: ignore[override]
        return [self.waiting.pop(one) for one in list(message_ids) if one in self.waiting]

    create_message = send_and_receive = set_run = run = None  # type: ignore[assignment]


Nodes.__abstractmethods__ = frozenset()


class Stacked(Nodes):
    """Clients that are asked at once, as workers of Ray's are."""

    def push_messages(self, messages):  # type: ignore[override]
        asked = list(messages)
        if any(one.content is not asked[0].content for one in asked):  # who holds which partition
            return super().push_messages(asked)
        for one in asked:
            self._number(one)
        found = self.app.together(asked, [self._context(one) for one in asked])
        return [self._keep(reply) for reply in found]


def remote(rounds: int = 2, **privacy: Any) -> Config:
    base = clients("fedmuon", rounds=rounds, **SHARED | REPEATABLE | privacy)
    faults = base.faults.model_copy(update={"retries": 0})
    named = base.engine.model_copy(update={"name": "deployment"})
    return base.model_copy(update={"engine": named, "faults": faults})


def run(grid: Nodes, out: Path, what: Config) -> Any:
    prepared = prepare(resolve(what), out)
    return train(prepared, FlowerEngine(prepared.config, grid))


def replies(grid: Nodes) -> list[Message]:
    return [one for one in grid.seen if one.metadata.message_type == "train"]


def test_over_messages_the_server_sees_masked_integers_and_makes_the_same_model(
    tmp_path: Path,
) -> None:
    """Masks are drawn in secret, the noise here from the seed: two runs see other vectors, and end
    at one model, that of a run without messages. Clients answer one by one, or at once."""
    models, first = [], []
    for name, kind in (("a", Nodes), ("b", Stacked)):
        grid = kind(6)
        summary = run(grid, tmp_path / name, remote())
        models.append((tmp_path / name / "model.safetensors").read_bytes())
        sent = [one.content.array_records["arrays"] for one in replies(grid)]
        assert {array.dtype for one in sent for array in one.values()} == {"int64"}
        whole = np.concatenate([array.numpy().ravel() for one in sent for array in one.values()])
        assert np.abs(whole.astype(float)).mean() > 2**60  # of noise alone it is 2^32
        first.append(whole)
        assert not any(grid.state.values())  # no key is kept
        assert summary["privacy"]["trust"] == "distributed"
    assert not (first[0] == first[1]).any()
    execute(clients("fedmuon", rounds=2, **SHARED | REPEATABLE), tmp_path / "inline")
    assert models[0] == models[1] == (tmp_path / "inline" / "model.safetensors").read_bytes()


def _ended(kind: str, client: int = 3) -> Callable[[Message], Message]:
    def before(message: Message) -> Message:
        if (message.metadata.message_type, message.metadata.dst_node_id) == (kind, client):
            raise InputError("it is gone")
        return message

    return before


@pytest.mark.parametrize(("kind", "why"), [
    ("query.key", "client 3 sent no key for its mask \\(it is gone\\)"),
    ("train", "no valid reply from 1 of 3 participants"),
])  # fmt: skip
def test_a_client_that_drops_out_ends_the_round_and_nothing_is_unmasked(
    kind: str, why: str, tmp_path: Path
) -> None:
    """What the others sent stays masked, the attempt is spent, and a new one has other masks."""
    what = remote(honest=0.5)
    ids = np.flatnonzero([3 in one for one in build_plan(what).schedule()])
    assert ids[0] == 0  # client 3 takes part at once
    grid = Nodes(6, _ended(kind))
    with pytest.raises(InputError, match=why):
        run(grid, tmp_path / "a", what)
    assert len(replies(grid)) == (3 if kind == "train" else 0)
    ledger = Ledger.read(tmp_path / "a" / "ledger.jsonl")
    assert [one.round for one in ledger.entries] == [0]
    prepared = prepare(resolve(what), tmp_path / "a", resume=True)
    train(prepared, FlowerEngine(prepared.config, Nodes(6)))
    ledger = Ledger.read(tmp_path / "a" / "ledger.jsonl")
    assert [one.attempt for one in ledger.entries if one.round == 0] == [0, 1]


def _rewritten(change: Callable[[dict], dict]) -> Callable[[Message], Message]:
    def before(message: Message) -> Message:
        if message.metadata.message_type == "train":
            held = dict(message.content.config_records["roster"])
            own = {**message.content, "roster": ConfigRecord(change(held))}
            message.content = RecordDict(own)  # others have theirs in common
        return message

    return before


def fewer(held: dict) -> dict:
    return {name: list(value)[:-1] for name, value in held.items()}


def twice(held: dict) -> dict:
    return {**held, "keys": [held["keys"][0]] * 3}


def others(held: dict) -> dict:
    return {**held, "keys": [distributed.key_pair()[1] for _ in held["keys"]]}


def weak(held: dict) -> dict:
    """The point of order 2 in place of the last key, of which every secret is 0."""
    return {**held, "keys": [*held["keys"][:-1], bytes(32)]}


@pytest.mark.parametrize(("change", "why"), [
    (fewer, "one public key for each of the 3"), (twice, "one public key for each of the 3"),
    (others, "is not the key that this client sent"), (weak, "malformed"),
    (lambda held: {}, "malformed"),
])  # fmt: skip
def test_a_client_masks_with_the_keys_of_all_others_or_not_at_all(
    change: Callable[[dict], dict], why: str, tmp_path: Path
) -> None:
    grid = Nodes(6, _rewritten(change))
    with pytest.raises(InputError, match=why):
        run(grid, tmp_path, remote())
    assert not all(one.has_content() for one in replies(grid))


def test_a_key_masks_once(tmp_path: Path) -> None:
    """A node that is asked again with the same keys answers nothing: two vectors under one mask
    would tell their difference."""
    again: list[Message] = []
    grid = Nodes(6, lambda one: again.append(one) or one)  # type: ignore[func-returns-value]
    run(grid, tmp_path, remote(rounds=1))
    asked = next(one for one in again if one.metadata.message_type == "train")
    grid._ask(asked)
    assert "has no private key for its mask" in str(grid.seen[-1].error.reason)


@pytest.mark.parametrize("key", [b"short", "text", None])
def test_a_server_takes_no_key_that_is_none(key: Any, tmp_path: Path) -> None:
    class Odd(Nodes):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            found = super().pull_messages(message_ids)
            for one in found:
                if one.has_content() and "key" in one.content.config_records["who"]:
                    who = dict(one.content.config_records["who"])
                    who |= {} if key is None else {"key": key}
                    if key is None:
                        del who["key"]
                    one.content["who"] = ConfigRecord(who)
            return found

    with pytest.raises(InputError, match=r"invalid public key for its mask|malformed"):
        run(Odd(6), tmp_path, remote())
