"""Under what licence each dependency comes, and which of them Apache-2.0 code may not rest on.

Nothing is bundled: wheel and sdist hold this project's files alone. So a licence is accepted that
lets others install the dependency beside Apache-2.0 code and import it; file-level copyleft
(MPL-2.0) is, the GPL, the AGPL, and what nobody has judged are not.
"""

import importlib.metadata
import re

from packaging.requirements import Requirement

from .pins import CUDA, normal

ACCEPTED = {
    *("0BSD", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC"),
    *("CNRI-Python", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Public-Domain", "Zlib"),
}
EXCEPTIONS = {"LLVM-exception"}
# How metadata spells them where it does not use SPDX.
SPELLINGS = {
    "Apache 2.0": "Apache-2.0", "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0", "Apache Software License": "Apache-2.0",
    "3-Clause BSD License": "BSD-3-Clause", "BSD License": "BSD", "ISC License (ISCL)": "ISC",
    "MIT License": "MIT", "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Public Domain": "Public-Domain", "Python Software Foundation License": "PSF-2.0",
}  # fmt: skip
NO_LICENCE = "DFSG approved"  # a classifier that names none
EXTRAS = ("", "lm", "llm", "text")


def licence(name: str) -> str:
    """What a package's metadata says: an SPDX expression as far as it can be told."""
    said = importlib.metadata.metadata(name).json
    if "license_expression" in said:
        return str(said["license_expression"])
    classes = [text.split(" :: ")[-1] for text in said.get("classifier", [])
               if text.startswith("License :: ")]  # fmt: skip
    named = [text for text in classes if text != NO_LICENCE]
    one = str(said.get("license", "unknown")).partition("\n")[0].strip()
    return " AND ".join(SPELLINGS.get(text, text) for text in named or [one])


def accepted(expression: str) -> bool:
    """Whether an SPDX expression without brackets leaves a choice of accepted licences."""
    return any(
        all(_known(part.strip()) for part in choice.split(" AND "))
        for choice in re.sub("[()]", "", expression).split(" OR ")
    )


def _known(part: str) -> bool:
    name, _, exception = part.partition(" WITH ")
    return name in ACCEPTED and (not exception or exception in EXCEPTIONS)


def needed(extra: str = "", of: str = "fedmuon") -> set[str]:
    """All that a package and one of its extras rest on, as it is installed here, itself aside."""
    found: set[tuple[str, str]] = set()
    open_ = [(of, extra)]
    while open_:
        name, wanted = open_.pop()
        for text in importlib.metadata.requires(name) or []:
            one = Requirement(text)
            if one.marker and not one.marker.evaluate({"extra": wanted}):
                continue
            new = {(normal(one.name), more) for more in ("", *one.extras)} - found
            found |= new
            open_ += sorted(new)
    return {name for name, _ in found} - {of}


def judged() -> dict[str, str]:
    """Each dependency that a user gets, and its licence; torch's CUDA libraries aside.

    Those come under NVIDIA's terms with the build of torch that a user has chosen.
    """
    names = set().union(*(needed(extra) for extra in EXTRAS))
    return {name: licence(name) for name in sorted(names) if not name.startswith(CUDA)}


def refused(licences: dict[str, str]) -> list[str]:
    return [
        f"{name} comes under {terms}, which is not among the accepted licences."
        for name, terms in licences.items()
        if not accepted(terms)
    ]


def table() -> str:
    first, direct = needed(), _direct()
    lines = ["| package | version | licence | needed |", "|---|---|---|---|"]
    for name, terms in judged().items():
        how = "directly" if name in direct else "indirectly" if name in first else "by an extra"
        lines.append(f"| {name} | {_version(name)} | {terms} | {how} |")
    return "\n".join(lines) + "\n"


def _version(name: str) -> str:
    return importlib.metadata.version(name).partition("+")[0]


def _direct() -> set[str]:
    wanted = [Requirement(text) for text in importlib.metadata.requires("fedmuon") or []]
    return {normal(one.name) for one in wanted if not one.marker}


if __name__ == "__main__":
    print(table(), end="")
    raise SystemExit("\n".join(refused(judged())) or 0)
