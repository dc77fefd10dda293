"""The code blocks of a page, and what the comments before them ask of the test that runs them.

<!-- test: skip REASON -->          shown only; the reason is a sentence
<!-- test: replace A => B -->       run with B in A's place (fewer steps, say); A must be there
<!-- test: exit N -->               the block must end with this exit code
<!-- test: prints TEXT -->          the block's output must hold this text
<!-- test: goes on -->              a python block that continues the one before it
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DIRECTIVE = re.compile(r"<!-- test: (skip|replace|exit|prints|goes on) ?(.*?) ?-->")
# `text` is output or a picture: nothing to run.
LANGUAGES = ("bash", "python", "toml", "text")


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str
    directives: tuple[tuple[str, str], ...]

    def asked(self, name: str) -> list[str]:
        return [argument for directive, argument in self.directives if directive == name]

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def runnable(self) -> str:
        """The text with its replacements made."""
        text = self.text
        for argument in self.asked("replace"):
            old, arrow, new = argument.partition(" => ")
            assert arrow and old in text, f"{self.where}: nothing to replace for {argument!r}"
            text = text.replace(old, new)
        return text


def pages() -> list[Path]:
    """Every page that people read."""
    found = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    return [*found, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "skills").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """Its fenced blocks in order, each with the directives that stand right before it."""
    found: list[Block] = []
    directives: list[tuple[str, str]] = []
    opened: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and opened is None:
            opened, lines = (number, line[3:].strip()), []
        elif line.startswith("```") and opened is not None:
            found.append(Block(page, opened[0], opened[1], "\n".join(lines) + "\n", tuple(directives)))
            opened, directives = None, []
        elif opened is not None:
            lines.append(line)
        elif match := DIRECTIVE.fullmatch(line.strip()):
            directives.append((match[1], match[2]))
        elif line.strip():
            assert "<!-- test:" not in line, f"{page}:{number}: unknown directive {line!r}"
            directives = []
    assert opened is None, f"{page}:{opened}: a block that never ends"
    return found
