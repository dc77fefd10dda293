"""Every code block that a reader meets is run, in order, in a folder that looks like a checkout."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shardwise.inputs.recipe import from_keys
from tests.docs.blocks import LANGUAGES, ROOT, Block, blocks, pages
from tests.docs.started import Ended, Starter

LIMIT_SECONDS = 120
PAGES = {str(page.relative_to(ROOT)): page for page in pages()}


@pytest.mark.parametrize("name", [name for name, page in PAGES.items() if blocks(page)])
def test_every_block_of_a_page_runs(name: str, tmp_path: Path, starter: Starter) -> None:
    for folder in ("examples", "recipes"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    before = ""
    for block in blocks(PAGES[name]):
        assert block.language in LANGUAGES, f"{block.where}: say which of {LANGUAGES} it is"
        if block.asked("skip"):
            assert len(block.asked("skip")[0].split()) > 2, f"{block.where}: skipped without a reason"
            continue
        text = block.runnable()
        if block.language == "bash":
            judge(block, in_bash(text, tmp_path))
        elif block.language == "python":
            before = before + text if block.asked("goes on") else text
            judge(block, in_python(before, tmp_path, starter))
        elif block.language == "toml":
            from_keys(tomllib.loads(text), block.where)


def judge(block: Block, ended: Ended) -> None:
    expected = int((block.asked("exit") or ["0"])[0])
    assert ended.code == expected, f"{block.where} ended with {ended.code}:\n{ended.output}"
    assert "UserWarning" not in ended.output, f"{block.where}:\n{ended.output}"
    for text in block.asked("prints"):
        assert text in ended.output, f"{block.where} never printed {text!r}:\n{ended.output}"


def in_bash(text: str, folder: Path) -> Ended:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=folder, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    return Ended(ended.returncode, ended.stdout)


def in_python(text: str, folder: Path, starter: Starter) -> Ended:
    script = folder / "snippet.py"
    script.write_text(text, encoding="utf-8")
    return starter.run(script, folder)


@pytest.mark.parametrize("name", PAGES)
def test_every_link_to_a_file_leads_somewhere(name: str) -> None:
    page = PAGES[name]
    links = re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("name", PAGES)
def test_every_path_that_is_named_in_code_exists(name: str) -> None:
    named = re.findall(
        r"`((?:shardwise|tests|docs|recipes|examples|benchmarks|skills)/[\w./-]+)", PAGES[name].read_text()
    )
    missing = sorted({path for path in named if not (ROOT / path.rstrip(".")).exists()})
    assert not missing


def test_the_two_commands_of_the_readme_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    shown = "".join((ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md"))
    said = set(re.findall(r"^make ([a-z]+)", shown, flags=re.MULTILINE))
    assert {"quickstart", "test"} <= said <= set(targets)
