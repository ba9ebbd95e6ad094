"""Neighbouring data sets: certificates, bounds, and exact or predicted perturbations."""
