"""Suites of one kind each, as small as they can be: tests run, disturb and misspell them."""

# Of synthetic samples at the small scale it is two runs of 60 samples.
TRAINING = """
kind = "training"
title = "Two recipes"
data = "digits"
seeds = [0, 1]
source = "a table"
note = "A note."

[base.federation]
clients = 5
per-round = 2
rounds = 5

[base.local]
steps = 1

[base.engine]
dtype = "float64"
device = "cpu"

[base.output]
evaluate-every = 2
checkpoint-every = 1

[variants."FedMuon, E = 1".local]
recipe = "fedmuon"
lr = 0.5

[variants.FedAvg.local]
recipe = "fedavg"
lr = 0.5

[claims.loss]
better = "FedMuon, E = 1"
than = "FedAvg"

[claims.reversed]
measure = "accuracy"
better = "FedAvg"
than = "FedMuon, E = 1"

[published.digits.FedAvg]
train_loss = 0.25

[for.mnist5k.variants.FedAvg.local]
lr = 0.25

[for.synthetic.base.data]
train = 60
test = 40
dimension = 5
classes = 3
minimum = 5

[small]
seeds = [0]
"""
STABILITY = """title = "Two by two"
data = "synthetic"
seeds = [0]
trials = 2

[grid]
train = [60, 90]
per-round = [2]
alpha = [0.5]
lr = [0.01, 0.05]
lambda = [0.1]

[base.data]
dimension = 5
classes = 3
test = 30
minimum = 5

[base.federation]
clients = 4
rounds = 3

[base.engine]
device = "cpu"
"""
STUDY = """
kind = "rank-dependence"
title = "Ranks"
ranks = [2, 4]
steps = [2, 4]
seeds = 2
inputs = 8
batch = 16
label-noise = 0.1
memory = 0.9
lr-sgd = 1.0
lr-muon = 0.02
"""
