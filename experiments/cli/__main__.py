"""`python -m fedmuon.experiments.cli` is `fedmuon`."""

from fedmuon.experiments.cli import main

main()
