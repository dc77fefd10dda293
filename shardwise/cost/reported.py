"""One line of a table of measured runs, as text and numbers; and why a line cannot be used."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import ShardwiseError


class Unusable(ShardwiseError):
    """A row that cannot be scored; the text is the reason."""


@dataclass(frozen=True)
class Reported:
    """A line: its number in the file, its cells by column, those that are numbers, and what earlier rows added."""

    line: int
    cells: Mapping[str, str]
    numbers: Mapping[str, float | None]
    earlier: tuple[str, ...] = ()

    def text(self, name: str) -> str:
        """The cell; empty where the column is absent."""
        return self.cells.get(name, "")

    def number(self, name: str) -> float | None:
        """The cell as a number; None where it is blank."""
        return self.numbers.get(name)

    def whole(self, name: str) -> int | None:
        """The cell as a count. Raises: Unusable where it has a fraction."""
        value = self.numbers.get(name)
        if value is not None and value != int(value):
            raise Unusable(f"{name} = {value} is not a whole number")
        return None if value is None else int(value)
