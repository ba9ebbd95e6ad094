"""Set up the terminal and the threads, before the command `fedmuon` imports libraries."""

import codecs
import contextlib
import io
import os
import re
import sys
import unicodedata
from pathlib import Path

from fedmuon.core.cores import allowed_cores, usable_cores

LEAST, MOST = 20, 1000  # columns, or lines, of a terminal that output is laid out for
SPELLED = {
    **dict(zip("▁▂▃▄▅▆▇█", "_.-:=+*#", strict=True)), "│": "|", "┤": "|", "─": "-", "━": "-",
    "−": "-", "–": "-", "…": "...", "±": "+-", "·": "*", "×": "x", "√": "sqrt", "‖": "||",
    "≤": "<=", "≥": ">=", "≠": "!=", "′": "'", "∞": "inf", "∇": "grad ", "⠀": " ",
}  # fmt: skip


def require_room() -> None:
    """Correct values of COLUMNS and LINES that are unusable for output.

    Consoles read these variables when they are created.
    """
    for name in ("COLUMNS", "LINES"):
        text = os.environ.get(name, "")
        size = int(text) if re.fullmatch("[0-9]{1,9}", text) else 0
        if size < LEAST * (name == "COLUMNS") or size < 1:
            os.environ.pop(name, None)
        elif size > MOST:
            os.environ[name] = str(MOST)


def print_anywhere() -> None:
    """Replace characters that the encoding of the output does not contain by similar characters."""
    codecs.register_error("fedmuon.spelled", _spelled)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="fedmuon.spelled")


def _spelled(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = "".join(map(_in_ascii, error.object[error.start : error.end]))
    return re.sub(r"(?<=\^.)\^", "", text), error.end  # one sign for an exponent


def _in_ascii(sign: str) -> str:
    """Return the ASCII text for a character: `*` or `+` in pictures, otherwise its meaning."""
    if sign in SPELLED:
        return SPELLED[sign]
    name, kind = unicodedata.name(sign, ""), unicodedata.decomposition(sign)
    if name.startswith("GREEK"):
        word = name.rpartition(" ")[2].replace("LAMDA", "LAMBDA")
        return word.lower() if sign.islower() else word.capitalize()
    if name.startswith(("BRAILLE", "BOX DRAWINGS")):
        return "*" if name.startswith("BRAILLE") else "+"
    if kind.startswith(("<super>", "<sub>")):
        plain = map(_in_ascii, unicodedata.normalize("NFKC", sign))
        return "^" * kind.startswith("<super>") + "".join(plain)
    return sign.encode("ascii", "backslashreplace").decode()


def set_thread_defaults() -> None:
    """Set environment variables that numpy and torch read at import, unless the user has set them.

    On AMD processors with AVX-512, OpenBLAS uses AVX-512 instead of a narrower kernel. Threads of
    torch that wait for each other sleep after about 20 us. By default, they would spin for
    milliseconds. On a busy machine, they would then block the thread for which they wait. By
    default, both libraries start one thread per core, even if a container may use fewer cores.
    """
    if "torch" not in sys.modules and (cores := usable_cores()) < allowed_cores():
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    with contextlib.suppress(OSError):
        processor = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if "AuthenticAMD" in processor and "avx512f" in processor and "numpy" not in sys.modules:
            os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
