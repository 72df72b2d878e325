"""One wandb run, of which no failure reaches the training."""

from __future__ import annotations

import netrc
import os
import secrets
from typing import Any
from urllib.parse import urlsplit

from report.formatting import excerpt, well_formed


class WandbRun:
    """One wandb run. Off when config.wandb.enabled is false or in debug mode: then wandb is not even imported. No
    failure leaves this class."""

    def __init__(self, config: dict[str, Any], run_dir: str, group: str | None, notice):
        self.config, self.run_dir, self.notice = config, run_dir, notice
        options = config.get("wandb") or {}
        self.enabled = bool(options.get("enabled", False)) and not config.get("debug", False)
        self.options, self.group = options, group or options.get("group")
        self.run = self.id = None
        self.where = ""
        self.tables: dict[str, list[list[Any]]] = {"policy": [], "reference": []}
        self._id_path = os.path.join(run_dir, "wandb_id.txt")

    def start(self, samples: list[dict[str, Any]]) -> None:
        """Begin the run, or go on with the one whose id the run folder remembers."""
        if not self.enabled:
            return
        try:
            with open(self._id_path) as file:
                self.id = file.read().strip() or None
        except OSError:
            pass
        self._begin(samples)

    def rewind(self, run_id: str | None, samples: list[dict[str, Any]]) -> None:
        """After load_state: the same run with the samples that remain. wandb itself ignores steps that it has already
        seen."""
        if not self.enabled:
            return
        if run_id and run_id != self.id:
            self.finish(ok=True)
            self.id = run_id
            self._begin(samples)
        self._fill(samples)

    def _begin(self, samples: list[dict[str, Any]]) -> None:
        self._fill(samples)
        try:
            import wandb
        except Exception as error:
            self.notice(
                f"wandb is not usable ({error}); metrics.jsonl has all numbers. wandb.enabled=false ends this note"
            )
            return
        self.id = self.id or secrets.token_hex(4)
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in() else "offline")
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                if wandb.run is not None:  # the job before in this process did not end it
                    wandb.finish()
                with open(self._id_path, "w") as file:
                    file.write(self.id)
                self.run = wandb.init(
                    project=self.options.get("project"),
                    entity=self.options.get("entity"),
                    name=self.config.get("exp_name") or os.path.basename(os.path.normpath(self.run_dir)),
                    group=self.group,
                    config=self.config,
                    dir=self.run_dir,
                    id=self.id,
                    resume="allow",
                    mode=attempt,
                    # It neither captures nor writes the console: both are ours.
                    settings=wandb.Settings(silent=True, console="off"),
                )
                self.run.define_metric("examples")
                self.run.define_metric("*", step_metric="examples")
                address = self.run.url if attempt == "online" else None
                folder = os.path.join(self.run_dir, "wandb")
                self.where = f"wandb: {address}" if address else f"wandb: {attempt}, in {folder} (later: wandb sync)"
                return
            except Exception as error:
                self.notice(f"wandb could not start {attempt}: {type(error).__name__}: {excerpt(str(error), 300)}")
                self.run = None

    def _fill(self, samples: list[dict[str, Any]]) -> None:
        self.tables = {"policy": [], "reference": []}
        for row in samples:
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        for which, table in self.tables.items():
            if row.get(which) is not None:
                table.append([row.get("examples", 0), well_formed(row.get("prompt", "")), well_formed(row[which])])

    def log(self, values: dict[str, float], examples: int, updates: int) -> None:
        self._safely("log", lambda: self.run.log({**values, "examples": examples}, step=updates))

    def samples(self, rows: list[dict[str, Any]], updates: int) -> None:
        """Log the tables policy_samples and reference_samples, each with all of the run's rows so far; `step` counts
        examples."""
        for row in rows:
            self._add(row)

        def send():
            import wandb

            columns = ["step", "prompt", "sample"]
            tables = {
                f"{which}_samples": wandb.Table(columns=columns, data=rows)
                for which, rows in self.tables.items()
                if rows
            }
            self.run.log(tables, step=updates)

        self._safely("log samples", send)

    def finish(self, ok: bool) -> None:
        self._safely("finish", lambda: self.run.finish(exit_code=0 if ok else 1))
        self.run = None

    def _safely(self, what: str, action) -> None:
        if self.run is None:
            return
        try:
            action()
        except Exception as error:
            self.notice(f"wandb failed to {what}: {type(error).__name__}: {excerpt(str(error), 300)}; training goes on")


def logged_in() -> bool:
    """Whether wandb would find credentials without asking: in the environment, in netrc, or in its settings."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    for path in (os.environ.get("NETRC"), os.path.expanduser("~/.netrc"), os.path.expanduser("~/_netrc")):
        try:
            if path and netrc.netrc(path).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    try:
        import wandb

        return bool(wandb.setup().settings.api_key)
    except Exception:
        return False
