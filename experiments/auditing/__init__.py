"""Audits of private training with canaries."""
