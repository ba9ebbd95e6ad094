"""The letters that the papers have for keys of a config; a key without one stands for itself."""

SYMBOLS = {
    "data.train": "n",
    "data.alpha": "α",
    "federation.clients": "N",
    "federation.per-round": "K",
    "federation.rounds": "R",
    "local.steps": "E",
    "local.lr": "η",
    "local.momentum": "β",
    "orthogonalizer.lambda": "λ",
    "orthogonalizer.steps": "q",
    "orthogonalizer.rank": "r",
    "privacy.noise": "σ",
    "privacy.bound": "C",
}
