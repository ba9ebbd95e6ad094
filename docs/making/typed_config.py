"""Write fedmuon/config/typed.py: the tables of a config as types, so that editors complete keys.

python -m docs.making.typed_config fedmuon/config/typed.py
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from fedmuon.config.names import NAMES
from fedmuon.config.schema import FIELDS, TABLES_OF_A_CONFIG

HEAD = '''"""The tables of a config as types, from which editors complete keys and names.

`make reference` generates this file from the declarations in `schema.py`.
"""

# ruff: noqa: UP013

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

'''
LAST = '''

class Tables(TypedDict, total=False):
    """The settings of an experiment as nested dictionaries, with the tables of a config file.

    Editors complete the tables, keys and names. Every key has a default, so set only the keys that
    you want to change. The page "Config" describes every key.

    Example:
        >>> import fedmuon
        >>> settings: fedmuon.Tables = {"local": {"recipe": "fedavg", "lr": 0.1}}
        >>> fedmuon.Config.of(settings).local.recipe
        'fedavg'
    """

'''


def written() -> str:
    """Return the whole text of the generated file."""
    parts, members = [], []
    for table in TABLES_OF_A_CONFIG:
        name = f"{table.capitalize()}Keys"
        keys = [f'    "{key}": {kind(field.annotation, f"{table}.{key}")},'
                for key, field in FIELDS[table].items()]  # fmt: skip
        lines = [f"{name} = TypedDict(", f'    "{name}",', "    {"]
        lines += [f"    {line}" for line in keys] + ["    },", "    total=False,", ")"]
        parts.append("\n".join(lines))
        members.append(f"    {table}: {name}")
    return HEAD + "\n".join(parts) + "\n" + LAST + "\n".join(members) + "\n"


def kind(found: Any, key: str) -> str:
    """Return the type of a config key as Python source.

    If the key has built-in names, they are listed first.
    """
    if key in NAMES:
        return f"{_literal(NAMES[key])} | str"
    if get_origin(found) is Annotated:
        return kind(get_args(found)[0], "")
    if get_origin(found) is Literal:
        return _literal(get_args(found))
    if get_origin(found) in (Union, UnionType):
        return " | ".join(kind(one, "") for one in get_args(found))
    return found.__name__ if found in (int, float, str, bool) else "Mapping[str, Any]"


def _literal(values: Iterable[Any]) -> str:
    return f"Literal[{', '.join(json.dumps(one) for one in values)}]"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(written(), encoding="utf-8")
