"""`python -m fedmuon` is the command `fedmuon`."""

if __name__ == "__main__":
    from fedmuon.experiments.cli import main

    main()
