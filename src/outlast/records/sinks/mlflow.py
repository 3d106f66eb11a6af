"""MLflow."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

from outlast.errors import OutlastError
from outlast.records.events import AttemptEnded
from outlast.records.sinks.curves import Curves, notes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.records.events import Event

_NAME_TAG = "outlast.run"
_LONGEST_TEXT = 500
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "to_be_continued": "SCHEDULED"}


class MlflowSink:
    """Sends curves, settings and notes to an MLflow experiment (extra ``mlflow``).

    Args:
        experiment: Its name; made if there is none.
        uri: Where MLflow keeps it: a server's URL, ``sqlite:///FILE`` or a folder; None: what
            MLFLOW_TRACKING_URI says, or MLflow's own default.
        name: Of the run; attempts with one name go on with one MLflow run.
        config: The settings, by section.
        counts: Faults of earlier attempts; see `Curves`.

    Raises:
        OutlastError: When MLflow is missing or its store cannot be reached.
    """

    def __init__(
        self,
        experiment: str,
        uri: str | None,
        name: str,
        config: Mapping[str, Any],
        counts: Mapping[str, int] | None = None,
    ) -> None:
        try:
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
        except ImportError as error:
            raise OutlastError(
                f'log.mlflow_experiment = "{experiment}" needs a package that is missing '
                f"({error}); pip install 'outlast[mlflow]', or remove log.mlflow_experiment"
            ) from None
        self._metric, self._tag = Metric, RunTag
        self._curves = Curves(counts)
        try:
            self._client: Any = MlflowClient(tracking_uri=uri)
            number = _experiment(self._client, experiment)
            earlier = self._client.search_runs([number], f"tags.`{_NAME_TAG}` = '{name}'")
            if earlier:
                self._run = earlier[0].info.run_id
                self._client.set_terminated(self._run, "RUNNING")
                return
            tags = {_NAME_TAG: name}
            self._run = self._client.create_run(number, tags=tags, run_name=name).info.run_id
            settings = [Param(key, value) for key, value in _flat(config).items()]
            self._client.log_batch(self._run, params=settings)
        except (MlflowException, OSError) as error:
            raise OutlastError(
                f'log.mlflow_experiment = "{experiment}" does not work with log.mlflow_uri = '
                f'"{uri or ""}" ({error}); give the URL of a server that runs or '
                "sqlite:///FILE, or remove log.mlflow_experiment"
            ) from None

    def write(self, event: Event) -> None:
        """Log the curves and notes of the event at its step."""
        now, step = int(1000 * time.time()), getattr(event, "step", 0)
        points = [
            # Names of a loop's own figures may hold what MLflow takes in none.
            self._metric(re.sub(r"[^\w\-. :/]", "_", name), value, now, step)
            for name, value in self._curves.points(event).items()
        ]
        words = [self._tag(name, text[:_LONGEST_TEXT]) for name, text in notes(event).items()]
        if points or words:
            self._client.log_batch(self._run, metrics=points, tags=words)
        if isinstance(event, AttemptEnded):
            self._client.set_terminated(self._run, _STATUS.get(event.outcome, "FAILED"))

    def close(self) -> None:
        """All is written already."""


def _experiment(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(found.experiment_id if found is not None else client.create_experiment(name))


def _flat(config: Mapping[str, Any]) -> dict[str, str]:
    """``{section.key: value}`` of what is set."""
    return {
        f"{section}.{key}": str(value)[:_LONGEST_TEXT]
        for section, settings in config.items()
        if isinstance(settings, dict)
        for key, value in settings.items()
        if value is not None
    }
