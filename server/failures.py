"""Errors that clients raise, shown where the server runs: the first whole, the others counted."""

import logging
import traceback

from flwr.app import Error, Message

from fedmuon.core.errors import plain
from fedmuon.core.guard import OwnError

OWN, SENTENCE = "OwnError: ", 800  # what the reason begins with where a custom object is at fault
FRAMES, LINES, WIDTH = 3, 20, 200  # of a traceback: calls, lines, and characters of a line


def raised(message: Message, error: BaseException) -> str:
    """The reason of a reply: a line with the error, and below it the end of its traceback."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" ({one.filename}:{one.lineno} in {one.name})" for one in last)
    what = next((line for line in str(error).splitlines() if line.strip()), "").strip()
    head = plain(": ".join(filter(None, (type(error).__name__, what))), WIDTH)
    if isinstance(error, OwnError):  # which says itself where it was
        head, place = f"{OWN}{plain(what, SENTENCE)}", ""
    whole = "".join(traceback.format_exception(error, limit=-FRAMES)).splitlines()[-LINES:]
    told = [f"{message.metadata.message_type}{_round(message)}", *whole]
    return "\n".join([f"{head}{place}", *(plain(one, WIDTH) for one in told)])


def _round(message: Message) -> str:
    """Which one, if the message says so as Flower's strategies do."""
    records = message.content.config_records.values() if message.has_content() else ()
    found = [one["server-round"] for one in records if "server-round" in one]
    number = found[0] if found else message.metadata.group_id
    return f" of round {number}" if number else ""


class Failures:
    """What a grid does with them: of every reply only the line with the error goes on."""

    def __init__(self, shown: bool) -> None:
        self._shown, self._count = shown, 0

    def take(self, reply: Message, partition: int | None) -> None:
        """Show the first reply whose client, with that partition, raised an error."""
        if not reply.has_error():
            return
        line, *below = (reply.error.reason or "").split("\n")
        reply.error = Error(reply.error.code, line)
        if below and self._shown:
            self._count += 1
            if self._count == 1:
                self._show(reply.metadata.src_node_id, partition, below)

    def close(self) -> None:
        """Say how many more there were."""
        if self._count > 1:
            logging.getLogger("fedmuon").warning("%d more replies were errors", self._count - 1)
        self._count = 0

    def _show(self, node: int, partition: int | None, below: list[str]) -> None:
        what, *lines = below
        logging.getLogger("fedmuon").warning(
            "the client app of node %d (partition %s) failed at %s; of later errors there will be "
            "the number alone:\n%s", node, partition, what, "\n".join(lines)
        )  # fmt: skip
