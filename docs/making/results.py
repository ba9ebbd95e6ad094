"""What is kept of suites that ran: docs/results/SUITE.json, small enough to lie in the tree.

python -m docs.making.results runs/dp-bias        keeps what that folder holds
"""

import json
import sys
from pathlib import Path
from typing import Any

from fedmuon.experiments.report import of_suite

FOLDER = Path(__file__).resolve().parent.parent / "results"
FACTS = ("suite", "title", "kind", "data", "scale", "seconds", "again", "machine", "versions")


def keep(folder: Path, into: Path = FOLDER) -> Path:
    """Keep the claims of a finished suite's folder, with their verdicts and circumstances."""
    about = json.loads((folder / "suite.json").read_text(encoding="utf-8"))
    claims = [one.record() for one in of_suite(folder).claims]
    kept = {name: about[name] for name in FACTS if name in about} | {"claims": claims}
    into.mkdir(exist_ok=True)
    file = into / f"{about['suite']}.json"
    file.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def read(suite: str, folder: Path = FOLDER) -> dict[str, Any] | None:
    """What is kept of a suite; None if nothing is."""
    file = folder / f"{suite}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def verdict(claim: dict[str, Any]) -> str:
    """One of the four."""
    return claim["verdict"]


if __name__ == "__main__":
    for one in sys.argv[1:]:
        print(keep(Path(one)))
