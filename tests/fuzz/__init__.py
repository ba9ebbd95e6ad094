"""Whole-program fuzzing: every case ends as done, or as one sentence with exit code 2.

A case is a JSON object; `python -m tests.fuzz` draws them at random, keeps those that end otherwise
in `found/`, and `tests/architecture/test_fuzz.py` replays these for ever.
"""
