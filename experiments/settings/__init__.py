"""Settings with a name, for `--setting NAME`: configs for which the theory says something useful.

The first line of each file is a comment that describes the setting.
"""

from pathlib import Path
from typing import TypeVar

from fedmuon.core.errors import InputError, instead

FOLDER = Path(__file__).parent
Given = TypeVar("Given")


def descriptions() -> dict[str, str]:
    """Return what each setting shows, by name."""
    files = sorted(FOLDER.glob("*.toml"), key=lambda file: file.name, reverse=True)
    return {
        file.stem: file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        for file in files
    }


def instead_of(config: Given, setting: str | None) -> Given | Path:
    """Return the file of the named setting, or the config if no setting is named.

    Raises:
        InputError: If both are given, or no setting has this name.
    """
    if setting is None:
        return config
    if config is not None:
        raise InputError(
            f"the setting {setting!r} and the config both describe the run. Leave one of them out."
        )
    return path_of(setting)


def path_of(name: str) -> Path:
    """Return the config file of a setting.

    Raises:
        InputError: If no setting has this name.
    """
    if name not in (choices := descriptions()):
        raise InputError(f"there is no setting {name!r}: {instead(name, choices)}")
    return FOLDER / f"{name}.toml"
