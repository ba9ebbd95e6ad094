"""`python -m fedmuon` is the command `fedmuon`."""


def main() -> None:
    """Imported here, as the library loads no command until one is given."""
    from fedmuon.experiments.cli import main as command

    command()


if __name__ == "__main__":
    main()
