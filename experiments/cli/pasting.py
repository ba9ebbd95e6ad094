"""The examples of a command's help, apart from its prose: they are printed last, by themselves, as
a table of rich's would break them anywhere and fill their lines with spaces."""

import re
import shutil

WIDE = 79  # characters of a line at most
TYPED = re.compile(r"\[bold\](.*?)\[/\]", re.DOTALL)
LEAD = re.compile(r"(.*[.])?\s*([^.]*:)", re.DOTALL)  # sentences, and what introduces a command


def apart(text: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """A docstring's prose, and its commands with the words before them; markup is left out. A
    command that nothing introduces stays in its sentence."""
    prose: list[str] = []
    examples: list[tuple[str, list[str]]] = []
    for paragraph in text.split("\n\n"):
        line = " ".join(paragraph.split())
        before, *others = TYPED.split(line)
        if not (others and (found := LEAD.fullmatch(before.strip()))):
            prose.append(TYPED.sub(r"\1", line))
            continue
        examples.append((found[2], others[::2]))
        prose.append(" ".join(filter(None, (found[1], others[-1].lstrip(" .,;")))))
    return "\n\n".join(filter(None, prose)), examples


def broken(command: str) -> str:
    """The command on lines that fit, an option beside its value; a shell joins them again."""
    lines, wide = [""], min(WIDE, shutil.get_terminal_size().columns - 1)
    for word in re.split(r" (?=-)", command):
        if lines[-1] and len(f"{lines[-1]} {word} \\") > wide:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] = f"{lines[-1]} {word}".removeprefix(" " * (len(lines) == 1))
    return "\n".join(lines)
