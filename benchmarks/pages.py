"""Pages of results: tables of rows as Markdown, and the same as JSON."""

from __future__ import annotations

import json
import os
import subprocess

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "docs", "benchmarks")


def version_of_code() -> str:
    """The commit, and whether files differ from it."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        except OSError:
            return ""

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    return commit + (" with uncommitted changes" if git("status", "--porcelain", "-uno") else "")


def shown(value) -> str:
    """A cell's text."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|")


def describe(row: dict) -> str:
    """A row in one line."""
    return "  ".join(f"{name}: {shown(value)}" for name, value in row.items() if value is not None)


def table(rows: list[dict]) -> str:
    """Rows as a Markdown table with the columns of all of them; `ok` and `note` come last."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = [name for name in names if name not in ("ok", "note")] + [n for n in ("ok", "note") if n in names]
    lines = ["| " + " | ".join(columns) + " |", "|" + len(columns) * "---|"]
    lines += ["| " + " | ".join(shown(row.get(name)) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


class Report:
    """Rows by section, of which each may hold a check: `ok` is True, False, or None where nothing is decided.

    Args:
        head: machine, commit and date.
        path: of the page without its suffix; None writes none.
        explanations: what each section's table shows.
    """

    def __init__(self, head: str, path: str | None, explanations: dict[str, str]):
        self.head, self.path, self.explanations = head, path, explanations
        self.sections: dict[str, list[dict]] = {}

    def add(self, section: str, row: dict) -> None:
        self.sections.setdefault(section, []).append(row)

    @property
    def failed(self) -> list[str]:
        """The checks that do not hold, in words."""
        return [
            f"{section}: {describe({name: value for name, value in row.items() if name != 'ok'})}"
            for section, rows in self.sections.items()
            for row in rows
            if row.get("ok") is False
        ]

    def verdict(self) -> str:
        n = sum(row.get("ok") is not None for rows in self.sections.values() for row in rows)
        if not self.failed:
            return f"All {n} checks hold."
        return "\n".join([f"{len(self.failed)} of {n} checks do not hold:", *(f"- {text}" for text in self.failed)])

    def write(self) -> None:
        """The page and the JSON, as far as there are results."""
        if self.path is None:
            return
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        parts = [f"# GPU check\n\n{self.head}.\n\nWritten by `scripts/check_gpu`. {self.verdict()}"]
        for section, rows in self.sections.items():
            explanation = self.explanations.get(section)
            parts.append("\n\n".join([f"## {section}", *([explanation] if explanation else []), table(rows)]))
        with open(self.path + ".md", "w") as file:
            file.write("\n\n".join(parts) + "\n")
        with open(self.path + ".json", "w") as file:
            json.dump({"head": self.head, "failed": self.failed, "sections": self.sections}, file, indent=1)
