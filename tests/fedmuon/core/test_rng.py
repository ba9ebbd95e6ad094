"""Keyed draws: each part of a key names another stream, as NumPy's own spawning of seeds does."""

import numpy as np

from fedmuon.core.rng import Draw, generator

KEY = {"round": 2, "client": 3, "step": 1, "block": 4}


def first(seed: int, what: Draw, **key: int) -> float:
    return generator(seed, what, **key).random()


def test_a_key_is_a_path_of_spawned_seeds():
    seeds = np.random.SeedSequence(7)
    for child in (int(Draw.BATCH), *KEY.values()):
        seeds = seeds.spawn(child + 1)[child]
    expected = np.random.Generator(np.random.PCG64(seeds)).random()
    assert first(7, Draw.BATCH, **KEY) == expected


def test_every_part_of_a_key_matters():
    others = [{**KEY, name: KEY[name] + 1} for name in KEY]
    draws = [first(7, Draw.BATCH, **KEY), first(8, Draw.BATCH, **KEY), first(7, Draw.LOT, **KEY)]
    draws += [first(7, Draw.BATCH, **key) for key in others]
    assert len(set(draws)) == 3 + len(KEY)
    assert len(set(map(int, Draw))) == len(Draw)
