"""Logs to MLflow: to the server or place of mlflow.tracking_uri, else where MLflow itself would go."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from atomic_files import write_atomically
from report.formatting import well_formed
from report.logger import Logger, RunInfo, asked_for

LONGEST_VALUE = 500  # characters of a parameter, older servers' limit


class MlflowLogger(Logger):
    """One MLflow run, whose id the run's folder keeps, so that a resumed run goes on with it."""

    name = "mlflow"

    @classmethod
    def wanted(cls, settings: dict[str, Any]) -> bool:
        return asked_for(cls.name, settings)

    def start(self, run: RunInfo) -> None:
        self.run, self.options = run, run.settings["mlflow"]
        self.client: Any = None
        self.id = ""
        self._id_path = os.path.join(run.run_dir, "mlflow_id.txt")

    def metrics(self, values: dict[str, int | float], examples: int, updates: int, marks: list[str]) -> None:
        from mlflow.entities import Metric

        client, now = self._open(), int(1000 * time.time())
        every = {**values, "updates": updates}
        client.log_batch(self.id, metrics=[Metric(name, float(value), now, examples) for name, value in every.items()])

    def samples(self, rows: list[dict[str, Any]], examples: int, updates: int) -> None:
        text = well_formed(json.dumps(rows, indent=1, ensure_ascii=False))
        self._open().log_text(self.id, text, f"samples/{examples}.json")

    def finish(self, ok: bool, message: str | None) -> None:
        if self.client is not None:
            self.client.set_terminated(self.id, "FINISHED" if ok else "FAILED")

    def _open(self) -> Any:
        if self.client is not None:
            return self.client
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=self.options.get("tracking_uri"))
        self.id = self._recorded_id()
        if not self.id:
            name = self.options["experiment"]
            experiment = client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment else client.create_experiment(name)
            self.id = client.create_run(number, run_name=self.run.settings.get("exp_name")).info.run_id
            write_atomically(self._id_path, self.id.encode())
            settings = flat(self.run.settings)
            parameters = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in settings.items()]
            for start in range(0, len(parameters), 100):  # as many as a request may have
                client.log_batch(self.id, params=parameters[start : start + 100])
        self.client = client
        self.run.show(f"mlflow: run {self.id} of experiment {self.options['experiment']}")
        return client

    def _recorded_id(self) -> str:
        try:
            with open(self._id_path) as file:
                return file.read().strip()
        except OSError:
            return ""


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"loss.beta": 0.1, ...} of nested settings."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found
