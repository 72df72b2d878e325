"""Logs to Weights & Biases: online if the user is logged in, else offline in the run's folder."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import Any

from atomic_files import write_atomically
from report.files import SAMPLES, read_json_lines
from report.formatting import excerpt, well_formed
from report.logger import Logger, RunInfo, asked_for

# wandb's own limits are 90 seconds, and none at the end: without a network a run would seem to hang.
CONNECT_SECONDS, FINISH_SECONDS = 30, 60


class WandbLogger(Logger):
    """One wandb run. A resumed run goes on with the wandb run whose id its checkpoint or its folder has.

    wandb is started with the first record or the resume, so that a run which ends while it prepares leaves no wandb
    run behind.
    """

    name = "wandb"

    @classmethod
    def wanted(cls, settings: dict[str, Any]) -> bool:
        return bool((settings.get("wandb") or {}).get("enabled", False)) and asked_for(cls.name, settings)

    def start(self, run: RunInfo) -> None:
        self.run, self.options = run, run.settings["wandb"]
        self.wandb_run: Any = None  # wandb's own; None while there is none
        self.started = False
        self._id_path = os.path.join(run.run_dir, "wandb_id.txt")
        # Known from the start: a checkpoint may want it before wandb has answered.
        self.id = self._recorded_id() or secrets.token_hex(4)
        self.tables: dict[str, list[list[Any]]] = {"policy": [], "reference": []}

    def load_state(self, state: dict[str, Any]) -> None:
        self.id = state.get("wandb_id") or self.id
        self._add_to_tables(read_json_lines(os.path.join(self.run.run_dir, SAMPLES)))
        self._start_once()

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        self._start_once()
        if self.wandb_run is not None:
            self.wandb_run.log({**values, "examples": examples}, step=updates)

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        """Log the tables policy_samples and reference_samples, each with all of the run's rows so far; `step` counts
        examples."""
        self._start_once()
        self._add_to_tables([{"examples": examples, **row} for row in rows])
        if self.wandb_run is None:
            return
        import wandb

        columns: list[str | int] = ["step", "prompt", "sample"]
        tables = {
            f"{which}_samples": wandb.Table(columns=columns, data=rows) for which, rows in self.tables.items() if rows
        }
        self.wandb_run.log(tables, step=updates)

    def state(self) -> dict[str, Any]:
        return {"wandb_id": self.id}

    def finish(self, ok: bool, message: str | None) -> None:
        if self.wandb_run is not None:
            self.wandb_run.finish(exit_code=0 if ok else 1)

    def _add_to_tables(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            for which, table in self.tables.items():
                if row.get(which) is not None:
                    table.append([row.get("examples", 0), well_formed(row.get("prompt", "")), well_formed(row[which])])

    def _start_once(self) -> None:
        if self.started:
            return
        self.started = True
        try:
            import wandb
        except Exception as error:
            self.run.notice(
                f"wandb is not usable ({error}); metrics.jsonl has all numbers. wandb.enabled=false ends this note"
            )
            return
        if wandb.run is not None:  # the job before in this process did not end it
            wandb.finish()
        for mode in dict.fromkeys((self._mode(), "offline")):
            try:
                self.wandb_run = self._init(mode)
                break
            except Exception as error:
                self.run.notice(f"wandb could not start {mode}: {type(error).__name__}: {excerpt(str(error), 300)}")
                with contextlib.suppress(Exception):
                    wandb.teardown(1)  # its service goes on holding the id, and would refuse it to the next start

    def _init(self, mode: Any) -> Any:
        import wandb

        write_atomically(self._id_path, self.id.encode())
        if mode == "online":
            self.run.show("wandb: connecting, while the run goes on")
        # It neither captures nor writes the console, which ConsoleLogger has.
        settings: dict[str, Any] = {"silent": True, "console": "off"}
        if "WANDB_INIT_TIMEOUT" not in os.environ:
            settings["init_timeout"] = CONNECT_SECONDS
        if "WANDB_FINISH_TIMEOUT" not in os.environ and "finish_timeout" in getattr(wandb.Settings, "model_fields", ()):
            settings["finish_timeout"] = FINISH_SECONDS
        wandb_run = wandb.init(
            project=self.options.get("project"),
            entity=self.options.get("entity"),
            name=self.options.get("name")
            or self.run.settings.get("exp_name")
            or os.path.basename(os.path.normpath(self.run.run_dir)),
            group=self.options.get("group"),
            tags=list(self.options.get("tags") or ()) or None,
            notes=self.options.get("notes"),
            config=self.run.settings,
            dir=self.run.run_dir,
            id=self.id,
            resume="allow",
            mode=mode,
            settings=wandb.Settings(**settings),
        )
        wandb_run.define_metric("examples")
        wandb_run.define_metric("*", step_metric="examples")
        address = wandb_run.url if mode == "online" else None
        folder = os.path.join(self.run.run_dir, "wandb")
        self.run.show(f"wandb: {address}" if address else f"wandb: {mode}, in {folder} (later: wandb sync)")
        return wandb_run

    def _mode(self) -> str:
        if mode := os.environ.get("WANDB_MODE"):
            return mode
        try:
            return "online" if logged_in() else "offline"
        except Exception as error:  # such as an API key that is too short
            self.run.notice(f"wandb could not start online: {type(error).__name__}: {excerpt(str(error), 300)}")
            return "offline"

    def _recorded_id(self) -> str | None:
        try:
            with open(self._id_path) as file:
                return file.read().strip() or None
        except OSError:
            return None


def logged_in() -> bool:
    """Whether wandb has credentials for its server, in the environment, in netrc or in its settings.

    Neither asks for them nor uses the network.

    Raises:
        wandb.errors.AuthenticationError: they cannot be those of any user, such as a key that is too short.
    """
    import wandb

    # Unless it is silent, login() asks the server for the user's name, to print it.
    wandb.setup(wandb.Settings(silent=True))
    return wandb.login(prompt=False, verify=False)
