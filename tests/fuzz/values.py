"""Odd values: what users mistype, what overflows, and what other programs would obey."""

import datetime
from random import Random

TEXTS = (
    "", " ", "\t", "\n", "\r\n", "\0", "a\0b", "/", ".", "..", "../..", "~", "-", "--", "=", "'",
    '"', "\\", "#", "[", "]", "[/x]", "[bold]", "[/]", "[link=http://x]y[/link]",
    "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\u202egnp.exe", "\ufeff", "\ud7ff",
    "\U0001f600", "é" * 300, "名前", "x" * 5000, "$x^{$", "$\\frac{$", "%s%n", "{here}", "{0}",
    "nan", "inf", "-inf", "None", "true", "1e5", "=1+1", "+1", "-1", "@SUM(A1)",
    "=cmd|' /C calc'!A0", "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>',
    "</style><script>1</script>", "&lt;b&gt;", "javascript:1", "/etc/passwd", "/dev/null",
    "/dev/zero", "/proc/self/mem", "a/b/c", "con", "a" * 300 + "/b",
)  # fmt: skip
INTEGERS = (
    -1, 0, 1, 2, 3, 255, 256, 1025, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64,
    -(2**63), -(2**63) - 1, 10**12, 10**18, 10**19, 10**23, 10**400,
)  # fmt: skip
FLOATS = (
    -1.0, -0.0, 0.0, 5e-324, 1e-320, 1e-310, 1e-300, 1e-38, 1e-16, 1e-5, 0.5, 0.999999999999, 1.0,
    1.0000001, 3.4e38, 1e154, 1e300, 1.7e308, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
# Texts of numbers that no Python number is written as.
SPELLED = (
    "9" * 5000, "-" + "9" * 4400, "1e99999", "1e-99999", "0x" + "f" * 50, "0b101", "0o777",
    "1_000", "1__0", "+5", "-0", "1.", ".5", "1e5.5", "١٢", "0." + "1" * 5000, "nan", "-nan",
    "+inf", "1,5",
)  # fmt: skip


def text(rng: Random) -> str:
    """An odd text, or a short one at random."""
    if rng.random() < 0.8:
        return rng.choice(TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(1, 128), rng.randrange(128, 0xD800))))
        for _ in range(rng.randrange(1, 12))
    )


def toml(rng: Random) -> str:
    """The TOML text of an odd value of any type; not always valid TOML."""
    return rng.choice((_number, _number, _number, _quoted, _quoted, _nested, _rest))(rng)


def quoted(value: str) -> str:
    special = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    escaped = "".join(
        special.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 32 or ord(c) == 127 else c) for c in value
    )
    return f'"{escaped}"'


def written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return quoted(value) if isinstance(value, str) else repr(value)


def _number(rng: Random) -> str:
    pool = rng.choice((INTEGERS, FLOATS, SPELLED))
    value = rng.choice(pool)
    return value if isinstance(value, str) else repr(value)


def _quoted(rng: Random) -> str:
    return quoted(text(rng))


def _nested(rng: Random) -> str:
    deep = rng.choice((1, 3, 100, 2000))
    return rng.choice(
        (
            "[" * deep + "]" * deep, "{a=" * deep + "1" + "}" * deep, "[1, 2]", "{}", "[[]]",
            '["a", 1]', "{x = 1, y = 2}",
        )
    )  # fmt: skip


def _rest(rng: Random) -> str:
    stamp = datetime.datetime(1979, 5, 27, 7, 32).isoformat()
    return rng.choice(
        (
            "true", "false", "True", "null", "", "=", stamp, "1979-05-27", "07:32:00", "'raw'",
            '"""a\nb"""', "'''x'''", '"\\q"', '"open', "[", "{", "\0", "\ud7ff", "1 2",
        )
    )  # fmt: skip
