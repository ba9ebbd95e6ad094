"""Neighbouring data sets: certificates, bounds, exact and predicted perturbations."""
