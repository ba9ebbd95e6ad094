"""What a user's shell may hold and a test must not see: folders, clusters, widths and colours.

Imported before anything that reads the environment, and inherited by every process of a test.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

FOREIGN = ("FEDMUON_", "RAY_", "FLWR_", "HYPOTHESIS_")
SLOW = "PYTHONDONTWRITEBYTECODE"  # hundreds of processes would compile everything anew
LOOKS = (SLOW, "COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "PYTHONWARNINGS")
HOME = Path(tempfile.gettempdir(), f"fedmuon-tests-{os.getpid()}")

for name in [*os.environ]:
    if name.startswith(FOREIGN) or name in LOOKS:
        del os.environ[name]
sys.dont_write_bytecode = False
os.environ |= {
    "OMP_NUM_THREADS": "1",  # in processes that tests start too: faster than two fighting
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_HOME": str(HOME),
}
if (found := importlib.util.find_spec("matplotlib")) is not None and found.origin is not None:
    os.environ["MATPLOTLIBRC"] = str(Path(found.origin).parent / "mpl-data" / "matplotlibrc")
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
