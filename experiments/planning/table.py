"""A cost for people."""

from rich.table import Table

from fedmuon.experiments.tables import columns
from fedmuon.runs.directory import Record

WHAT = {
    "start": "to load Python's libraries",
    "set-up": "to deal samples, draw the schedule",
    "engine": "to start the engine, and to stop it",
    "first round": "the first round",
    "later rounds": "the others",
    "evaluations": "evaluations",
    "records": "records, checkpoints, the end",
    "all": "from command to prompt",
}

BUSY = 0.3  # cores that others had, from which on it is said


def tables(record: Record) -> list[Table | str]:
    """Seconds, and what is held and sent."""
    seconds, memory, sent = record["seconds"], record["memory"], record["bytes"]
    each = {"later rounds": "a round", "evaluations": "an evaluation"}
    rows = [
        (words, said(seconds[each[name]]) if name in each else "", said(seconds[name]))
        for name, words in WHAT.items()
    ]
    workers = f", {record['workers']} workers" if record["workers"] else ""
    title = f"{record['rounds']} rounds of {record['participants']} clients, {record['engine']}"
    title = "\n".join([title + workers, *_beside(record)])
    took = columns(title, ("seconds of this run", "each", "in all"), rows)
    held = [("most memory of this process", "", amount(memory["driver"]))]
    held += [("of a worker", "", amount(memory["worker"]))] if memory["worker"] else []
    held += [
        ("sent to clients a round", amount(sent["a client down"]), amount(sent["down"])),
        ("sent back", amount(sent["a client up"]), amount(sent["up"])),
    ]
    sizes = columns("memory, and bytes of messages", ("", "a client's arrays", "in all"), held)
    return [took, sizes, *_notes(record)]


def _notes(record: Record) -> list[str]:
    tried, asked = record["tried"], record["participants"]
    notes = [] if record["memory"]["worker"] else ["Inline, clients are in this process."]
    if tried < asked:
        notes.append(f"A round was tried with {tried} of its {asked} clients.")
    if record["engine"] == "ray":
        notes.append(
            "What a round's clients share goes once to a worker, or to a machine if large."
        )
    return [" ".join(notes)] if notes else []


def _beside(record: Record) -> list[str]:
    """Why the seconds may be too many, where they are."""
    others = record["others"]
    return [f"others had {others:.1f} cores meanwhile: alone it is faster"] * (others > BUSY)


def said(seconds: float) -> str:
    """Three digits, or whole seconds."""
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def amount(count: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} EB"
