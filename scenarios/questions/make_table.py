"""Write docs/questions.md: every question here with its answer and the command that gives it.

    python scenarios/questions/make_table.py

The headers of the scenarios are the source. A comment line `# Command:` stands in for the usual command.
"""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parents[1] / "docs" / "questions.md"
HEADING = """# Questions

Questions that users of real servers asked in public, each as a scenario that reproduces what they saw. Absolute figures
rest on data sheets and on constants that the reports do not state: signs, ratios and arithmetic are what to trust.
`tests/scenarios/test_questions.py` holds the answers to it. Written by `scenarios/questions/make_table.py`.

| | question | answer | command |
|---|---|---|---|
"""


def header(text: str) -> dict[str, str]:
    """The comment at the top of a scenario, by its keys; lines of one entry are joined."""
    entries: dict[str, str] = {}
    key = ""
    for line in text[: text.index("\nname:")].splitlines():
        start = re.match(r"# ([A-Z][a-z ]+): +", line)
        key = start[1] if start else key
        entries[key] = f"{entries.get(key, '')} {line[start.end() if start else 1 :].strip()}".strip()
    return entries


def table() -> str:
    """The page."""
    rows = []
    for path in sorted(FOLDER.glob("*.yaml"), key=lambda path: int(re.findall(r"\d+", path.stem)[0])):
        text = path.read_text(encoding="utf-8")
        entries = header(text)
        verb = "compare" if "\ncompare:" in text else "run"
        command = entries.get("Command", f"`servesim {verb} scenarios/questions/{path.name}`")
        name = f"[{path.stem.split('_')[0].upper()}](../scenarios/questions/{path.name})"
        rows.append(f"| {name} | {entries['Question']} | {entries['Answer']} | {command} |\n")
    return HEADING + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
