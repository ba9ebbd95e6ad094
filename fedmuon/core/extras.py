"""How to install optional packages. fedmuon is installed from a clone of its source."""


def installing(extra: str) -> str:
    """Return the command that installs an extra of fedmuon, and where to run it.

    Args:
        extra: Name of the extra in `pyproject.toml`, such as `llm`.
    """
    return f"pip install '.[{extra}]' in your clone of fedmuon"
