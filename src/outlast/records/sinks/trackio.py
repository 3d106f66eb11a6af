"""trackio, Hugging Face's tracker without a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outlast.errors import OutlastError
from outlast.records.sinks.curves import Curves, notes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outlast.records.events import Event


class TrackioSink:
    """Sends the curves to a trackio project (extra ``trackio``).

    trackio keeps it below TRACKIO_DIR, or its own default folder.
    """

    def __init__(
        self,
        project: str,
        name: str,
        config: Mapping[str, Any],
        counts: Mapping[str, int] | None = None,
    ) -> None:
        try:
            import trackio
        except ImportError as error:
            raise OutlastError(
                f'log.trackio_project = "{project}" needs a package that is missing ({error}); '
                "pip install 'outlast[trackio]', or remove log.trackio_project"
            ) from None
        # With one name, all attempts of a run are one curve.
        try:
            self._run: Any = trackio.init(
                project=project, name=name, config=dict(config), resume="allow"
            )
        except Exception as error:  # of the network, the disk, or trackio's own kinds
            raise OutlastError(
                f'log.trackio_project = "{project}" does not work ({error}); set TRACKIO_DIR to a '
                "folder that can be written, or remove log.trackio_project"
            ) from None
        self._curves = Curves(counts)

    def write(self, event: Event) -> None:
        """Log the curves and notes of the event at its step."""
        if found := {**self._curves.points(event), **notes(event)}:
            self._run.log(found, step=getattr(event, "step", 0))

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()
