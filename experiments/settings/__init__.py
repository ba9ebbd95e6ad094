"""Settings with a name, for `--setting NAME`: configs for which the theory says something useful.

The first line of each file is a comment that describes the setting.
"""

from pathlib import Path

from fedmuon.core.errors import InputError, instead

FOLDER = Path(__file__).parent


def descriptions() -> dict[str, str]:
    """Return what each setting shows, by name."""
    files = sorted(FOLDER.glob("*.toml"), key=lambda file: file.name, reverse=True)
    return {
        file.stem: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for file in files
    }


def path_of(name: str) -> Path:
    """Return the config file of a setting.

    Raises:
        InputError: If no setting has this name.
    """
    if name not in (known := descriptions()):
        raise InputError(f"there is no setting {name!r}: {instead(name, known)}")
    return FOLDER / f"{name}.toml"
