"""Which lines and branches of the product the tests reach, also in the processes that they start.

    python -m tests.measure_coverage                # `make test`: no module may be below LEAST
    python -m tests.measure_coverage -m ""          # `make test-all`

Arguments are those of pytest.
"""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path("build", "coverage")
LEAST = 60.0  # percent of the lines of each module
WORST = 25  # modules that are listed


def main(arguments: list[str]) -> int:
    """Run the tests, print the figures, and fail if a test fails or a module is below `LEAST`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    python, report = sys.executable, FOLDER / "report.json"
    tests = [python, "-m", "pytest", "-n", "4", "--cov", "--cov-report=", *arguments]
    ended = subprocess.run(tests)
    subprocess.run([python, "-m", "coverage", "json", "--quiet", "-o", str(report)], check=True)
    found = json.loads(report.read_text(encoding="utf-8"))
    lines = {
        name: one["summary"]["percent_statements_covered"] for name, one in found["files"].items()
    }
    print(f"Lowest of {len(lines)} modules, in percent of their lines:")
    for name in sorted(lines, key=lambda name: lines[name])[:WORST]:
        print(f"  {lines[name]:5.1f}  {name}")
    total = found["totals"]
    print(f"Lines: {total['percent_statements_covered']:.1f}%; branches: "
          f"{total['percent_branches_covered']:.1f}%.")  # fmt: skip
    low = [name for name, one in lines.items() if one < LEAST]
    print(f"{len(low)} modules are below {LEAST:g}%.")
    return ended.returncode or bool(low)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
