"""What the Python scripts share: they may be started with any python3, and find the project's own."""

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def use_project_environment() -> None:
    """Start again with the interpreter of .venv when the present one has no torch and .venv exists."""
    if importlib.util.find_spec("torch") is not None:
        return
    interpreter = ROOT / ".venv" / "bin" / "python"
    if not interpreter.exists() or Path(sys.prefix).resolve() == interpreter.parent.parent.resolve():
        sys.exit("error: torch is not installed here. Run scripts/quickstart, or pip install -r requirements.txt")
    os.execv(interpreter, [str(interpreter), *sys.argv])
