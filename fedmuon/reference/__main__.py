"""`python -m fedmuon.reference docs/config.md`: make the page's tables from the descriptions."""

import sys
from pathlib import Path

from fedmuon.reference.page import written

for name in sys.argv[1:]:
    page = Path(name)
    page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
