"""Whatever stands in a fenced block of the README is done here, and what it says is printed must be printed."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    return [block for found, block in BLOCKS if found == language]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it after `make demo`, with the README's scenario in it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "scenarios").symlink_to(ROOT / "scenarios")
    command = folder / ".venv" / "bin" / "servesim"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sim "$@"\n')
    command.chmod(0o755)
    (scenario,) = blocks("yaml")
    (folder / "chat.yaml").write_text(scenario)
    return folder


@functools.cache
def printed_in(folder: Path) -> list[str]:
    """What all shell blocks print, one after the other; `make` lines are looked at elsewhere."""
    commands = "".join(block for block in blocks("bash") if not block.startswith("make "))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "80", "SERVESIM_SHARED": "/nonexistent"}
    done = subprocess.run(
        ["bash", "-e", "-c", commands], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return [line.rstrip() for line in done.stdout.splitlines()]


def test_every_block_is_of_a_kind_that_is_tested():
    assert {language for language, _ in BLOCKS} == {"bash", "python", "text", "yaml"}


def test_make_targets_exist():
    used = re.findall(r"\bmake ([a-z-]+)", " ".join(re.findall(r"`[^`]+`", README)) + "".join(blocks("bash")))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"demo", "test"} <= set(used) <= set(targets)


def test_shell_blocks_run_and_write_what_they_say(folder: Path):
    assert printed_in(folder)
    assert {path.name for path in (folder / "out" / "chat").iterdir()} >= {
        "summary.json",
        "requests.parquet",
        "timeline.png",
    }
    assert (folder / "scenario.schema.json").stat().st_size > 0


@pytest.mark.parametrize("shown", blocks("text"))
def test_what_it_shows_is_what_is_printed(folder: Path, shown: str):
    """Line by line and in one piece, but for `...`, which stands for any number of lines."""
    printed = "\n".join(printed_in(folder)) + "\n"
    pattern = re.escape(shown).replace(re.escape("...\n"), r"(?:.*\n)+?")
    assert re.search(f"^{pattern}", printed, re.MULTILINE), f"the README should show something else:\n{printed}"


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(folder: Path, code: str):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout
