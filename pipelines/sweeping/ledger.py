"""Sweeps in the ledger: one experiment per table, a parent run for the whole of it, a child run per cell and seed.

Special here: the run that holds a cell's numbers carries its key. That is how another machine, or another sweep, finds
it finished.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric
from mlflow.entities import Run as Entry
from mlflow.exceptions import MlflowException

from pipelines.addresses import masked
from pipelines.config import StageError, TrackingConfig
from pipelines.ledger import Run, connect, one_line, open_run
from pipelines.role import Role

CELL_KEY, CELL_CODE, FINISHED = "cell.key", "cell.code", "cell.finished"  # tags
PROVENANCE = {  # ours -> tag
    "commit": "commit",
    "dirty": "dirty",
    "data_digest": "data.digest",
    "fingerprint": "cell.fingerprint",
    "family": "family",
    "code": CELL_CODE,
}


Found = tuple[dict[str, float], dict[str, str]]  # values, provenance


def finished_runs(tracking: TrackingConfig, key: str | None = None) -> dict[str, Found]:
    """Values and provenance of the finished runs in every experiment, by key; of one key only if it is given."""
    database = re.fullmatch(r"sqlite:///(.+)", tracking.uri)
    if database and not Path(database[1]).exists():
        return {}
    client, _ = connect(tracking)
    wanted = f"tags.`{FINISHED}` = 'true'" + (f" and tags.`{CELL_KEY}` = '{key}'" if key else "")
    found: dict[str, Found] = {}
    with one_line("read", tracking.uri):
        experiments = [experiment.experiment_id for experiment in client.search_experiments()]
        token = None
        while token != "":
            page = client.search_runs(experiments, wanted, max_results=1000, page_token=token)
            for entry in page:
                tags = entry.data.tags
                known = {name: tags[tag] for name, tag in PROVENANCE.items() if tag in tags}
                found[tags[CELL_KEY]] = dict(entry.data.metrics), {"run_id": entry.info.run_id, **known}
            token = page.token or ""
    return found


def own_run(tracking: TrackingConfig, key: str, role: Role, training: Mapping[str, Any]) -> str:
    """The id of the run that holds a cell's numbers: the training's own, or one more where that is another cell's."""
    entry = entry_of(tracking, training["run_id"])
    if entry is not None and entry.data.tags.get(CELL_KEY) == key:
        return entry.info.run_id
    known = {tag: str(training[name]) for name, tag in PROVENANCE.items() if name in training}
    tags = known | {"trained.by": training["run_id"], "seed": str(training["seed"])}
    data = {"name": "tokens", "digest": training["data_digest"]}
    named = {name: training[name] for name in ("model", "family", "seed")}
    params = entry.data.params if entry is not None else named  # what the UI compares runs by
    return open_run(tracking, f"cell/{key}", role.name or key, {**tags, **role.tags}, params, data).run_id


def mark_finished(tracking: TrackingConfig, run_id: str, values: Mapping[str, float]) -> None:
    """Everything the table reads is in the run, and nobody needs to run this cell again."""
    entry = entry_of(tracking, run_id)
    if entry is None:
        return
    client, _ = connect(tracking)
    now = int(time.time() * 1000)
    missing = [Metric(name, value, now, 0) for name, value in values.items() if name not in entry.data.metrics]
    with one_line("write to", tracking.uri):
        client.log_batch(run_id, metrics=missing)
        client.set_terminated(run_id, "FINISHED")
        client.set_tag(run_id, FINISHED, "true")


def entry_of(tracking: TrackingConfig, run_id: str) -> Entry | None:
    """A run with its tags and the latest value of every metric; None when the ledger has no such run."""
    client, _ = connect(tracking)
    try:
        entry = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code == "RESOURCE_DOES_NOT_EXIST":
            return None
        reason = error.message.splitlines()[0]
        raise StageError(masked(f"cannot read the ledger {tracking.uri}: {reason}")) from None
    return entry if entry.info.lifecycle_stage == "active" else None


def open_parent(tracking: TrackingConfig, study: str, title: str, tags: Mapping[str, str], data_digest: str) -> Run:
    """The run of a whole sweep, made when there is none."""
    data = {"name": "tokens", "digest": data_digest}
    return open_run(tracking, f"sweep/{study}", title, tags, {"sweep": study}, data)
