"""The ledger: every training is one MLflow run, in SQLite by default or on any server.

Special here:
- a resumed training goes on with its own run, and what the ledger already has is not written twice;
- metrics are written in batches; the database is made once, under a lock, whoever comes first;
- the status tells the truth: FINISHED, FAILED with the reason, KILLED when someone stopped it.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, Experiment, Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from pipelines.addresses import masked
from pipelines.config import StageError, StoppedError, TrackingConfig
from pipelines.files import atomic_path

BATCH = 1000  # metrics in one request, at most
KEY = "run.key"  # tag
ACTIVE = "active"  # not deleted, in MLflow's words

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("alembic").setLevel(logging.WARNING)


class Run:
    """One run of the ledger; made by `open_run` or `find_run`."""

    def __init__(self, client: MlflowClient, run_id: str, uri: str) -> None:
        self.run_id = run_id
        self._client = client
        self._uri = uri
        names = client.get_run(run_id).data.metrics
        points = (metric for name in names for metric in client.get_metric_history(run_id, name))
        ordered = sorted(points, key=lambda metric: metric.timestamp)
        self._logged = {(metric.key, metric.step): metric.value for metric in ordered}

    def record(self, rows: Iterable[tuple[int, Mapping[str, float]]], correct: bool = False) -> None:
        """Write metrics by step, those apart that the ledger already has for that step.

        With `correct`, a value that differs from the ledger's is written too: the later one is the one that counts.
        """
        now = int(time.time() * 1000)
        new = [
            Metric(_allowed(name), value, now, step)
            for step, metrics in rows
            for name, value in metrics.items()
            if (known := self._logged.get((_allowed(name), step))) is None or (correct and known != value)
        ]
        with one_line("write to", self._uri):
            for start in range(0, len(new), BATCH):
                self._client.log_batch(self.run_id, metrics=new[start : start + BATCH])
        self._logged |= {(metric.key, metric.step): metric.value for metric in new}

    def artifact(self, name: str, content: Mapping[str, Any]) -> None:
        """Keep a JSON file with the run."""
        with one_line("write to", self._uri):
            self._client.log_text(self.run_id, json.dumps(content, indent=2) + "\n", _allowed(name))

    @contextmanager
    def running(self) -> Iterator[None]:
        """RUNNING inside the block, which ends with `finish`; KILLED or FAILED with the tag `reason` if it does not."""
        with one_line("write to", self._uri):
            self._client.update_run(self.run_id, status="RUNNING")
        try:
            yield
        except BaseException as error:
            stopped = isinstance(error, (StoppedError, KeyboardInterrupt, SystemExit))
            self._fail("KILLED" if stopped else "FAILED", f"{type(error).__name__}: {error}")
            raise

    def finish(self) -> None:
        """FINISHED."""
        with one_line("write to", self._uri):
            if "reason" in self._client.get_run(self.run_id).data.tags:  # of an earlier interruption
                self._client.delete_tag(self.run_id, "reason")
            self._client.set_terminated(self.run_id, "FINISHED")

    def _fail(self, status: str, reason: str) -> None:
        """Say how it ended, if the ledger can be written to: the error that ended it matters more."""
        try:
            self._client.set_tag(self.run_id, "reason", reason[:1000])
            self._client.set_terminated(self.run_id, status)
        except (MlflowException, SQLAlchemyError, OSError) as error:
            print(masked(f"the ledger does not know that the run ended: {error}"), file=sys.stderr)


def open_run(
    tracking: TrackingConfig,
    key: str,
    name: str,
    tags: Mapping[str, str],
    params: Mapping[str, Any],
    data: Mapping[str, str],
) -> Run:
    """The run with the tag `run.key=<key>`, made when the ledger has none.

    Args:
        key: known before the run is made, so that a kill in between leaves no second run.
        name: shown in the UI.
        tags: what the run is identified and filtered by.
        params: flat; the same for every part of an interrupted run, as MLflow does not let them change.
        data: `name` and `digest` of the token data.
    Raises:
        StageError: when the ledger cannot be reached or written.
    """
    client, experiment = connect(tracking)
    with one_line("open a run in", tracking.uri), _alone(tracking.uri):
        found = client.search_runs([experiment.experiment_id], f"tags.`{KEY}` = '{key}'", max_results=1)
        if found:
            run_id = found[0].info.run_id
        else:
            run_tags = {**tags, KEY: key}
            run_id = client.create_run(experiment.experiment_id, tags=run_tags, run_name=_allowed(name)).info.run_id
        dataset = Dataset(data["name"], data["digest"][:36], "tokens", json.dumps({"digest": data["digest"]}))
        client.log_inputs(run_id, [DatasetInput(dataset, [])])
        client.log_batch(
            run_id,
            params=[Param(_allowed(name), str(value)) for name, value in params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        return Run(client, run_id, tracking.uri)


def find_run(tracking: TrackingConfig, run_id: str) -> Run | None:
    """An existing run, to add to it; None when the ledger has no such run."""
    client, _ = connect(tracking)
    with one_line("read", tracking.uri):
        return Run(client, run_id, tracking.uri) if _has(client, run_id) else None


def connect(tracking: TrackingConfig) -> tuple[MlflowClient, Experiment]:
    """A client and the experiment, both made when missing. Several processes may come at the same moment."""
    with one_line("open", tracking.uri), _alone(tracking.uri) as file, warnings.catch_warnings(action="ignore"):
        if file is not None and not file.exists():
            with atomic_path(file) as partial:  # every table or no ledger: MLflow cannot go on with a part of them
                MlflowClient(f"sqlite:///{partial}").search_experiments(max_results=1)
        artifacts = None if file is None else (file.parent / "mlartifacts").as_uri()
        client = MlflowClient(tracking.uri)  # it warns about the libraries it uses
        return client, _experiment(client, tracking.experiment, artifacts)


@contextmanager
def _alone(uri: str) -> Iterator[Path | None]:
    """Nobody else looks what is missing and makes it, where the ledger is a file, which is yielded."""
    database = re.fullmatch(r"sqlite:///(.+)", uri)
    if database is None:
        yield None
        return
    file = Path(database[1]).resolve()
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        yield file


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> Experiment:
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            client.create_experiment(name, artifacts)
        except MlflowException:  # on a server, another process was faster
            if client.get_experiment_by_name(name) is None:
                raise
        experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    if experiment.lifecycle_stage != ACTIVE:
        raise StageError(f"tracking.experiment={name} was deleted in the ledger: restore it or choose another name")
    return experiment


def _has(client: MlflowClient, run_id: str) -> bool:
    try:
        return client.get_run(run_id).info.lifecycle_stage == ACTIVE
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return False
        raise


@contextmanager
def one_line(what: str, uri: str) -> Iterator[None]:
    """Errors of MLflow as a `StageError`; passwords in URIs are not shown."""
    try:
        yield
    except (MlflowException, SQLAlchemyError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StageError(masked(f"cannot {what} the ledger {uri}: {reason}")) from None


def _allowed(name: str) -> str:
    """A name MLflow and every file system take: letters, digits and `_-./`, nothing relative."""
    return re.sub(r"\.{2,}", ".", re.sub(r"[^\w\-./]", "_", name, flags=re.ASCII)).strip("/.") or "_"
