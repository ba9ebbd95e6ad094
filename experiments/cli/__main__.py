"""`python -m experiments.cli` is `fedmuon`."""

from experiments.cli import main

main()
