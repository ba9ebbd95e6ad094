"""A slow, obvious reference of federated rounds: plain loops in NumPy and float64.

Tests compare `fedmuon` with it. Only the random draws come from `fedmuon`: a draw is a function of
the seed, its purpose, the round, the client and the step (`fedmuon.core.rng`).

- `trees`: arithmetic on models, which are dictionaries of arrays.
- `gradients`: gradients of small models by hand.
- `orthogonal`: orthogonalizers by a dense singular value decomposition.
- `compressors`: C(x) for each compressor.
- `rounds`: Algorithm 1, client by client, with compression, late replies and clipping.
- `methods`: each federated method as one function.
"""
