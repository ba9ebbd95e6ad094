"""A CSV file whose column `site` names the client of each row: `table.py [inline | ray]`."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

import fedmuon

ENGINE = {"name": (*sys.argv, "inline")[1], "dtype": "float64"}
SITES = {"clients": 3, "per-round": 2, "rounds": 5, "partition": "column"}

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        file, rng = Path(folder, "flowers.csv"), np.random.default_rng(0)
        rows = [
            f"{rng.normal((-1) ** k)},{rng.normal()},kind{k % 2},site{k % 3}" for k in range(90)
        ]
        file.write_text("\n".join(["length,width,flower,site", *rows]))
        data = {"name": "csv", "folder": str(file), "train": 75, "test": 15}
        data["options"] = {"label": "flower", "client": "site"}
        found = fedmuon.run({"data": data, "federation": SITES, "engine": ENGINE})
    print(f"accuracy {found.summary['accuracy']:.2f}, loss {found.summary['test_loss']:.3f}")
