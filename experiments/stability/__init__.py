"""Train a run on neighbouring data sets, and compare the perturbations with certificates."""
