"""From the composed command line to a launch or a worker: what is refused, and what either is told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from models.configuration import ConfigError
from pipelines.config import StageError
from pipelines.sweeping import launch as launching
from pipelines.sweeping import start as starting
from pipelines.sweeping.options import STATED
from pipelines.sweeping.plan import Local
from pipelines.sweeping.queue import Queue
from pipelines.sweeping.storage import open_storage
from tests.pipelines import sweeps
from tests.pipelines.settings import PARAMS

TUNED = {"tiny": sweeps.BUDGET | {"nuisance": {"pretrain": {"lr": [1.0, 2.0]}}}}


class Machine:
    """Hydra's loader and launcher, as far as a sweep uses them; jobs end as they are told to."""

    def __init__(self, base: dict[str, Any], jobs: Sequence[JobReturn] = ()) -> None:
        self.base, self.jobs = base, jobs

    def load_configuration(self, *_: Any) -> Any:
        return OmegaConf.create(self.base | {"model_name": "transformer_pp_tiny", "model": {}})

    def launch(self, told: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        assert len(told) == 2
        return self.jobs


def start(
    tokens: Path,
    *arguments: str,
    launcher: str = "basic",
    execution: dict[str, Any] | None = None,
    jobs: Sequence[JobReturn] = (),
    sweep: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """`start` with what Hydra would have composed."""
    params = yaml.safe_load(PARAMS.read_text("utf-8")) | {"models": {}, "students": {}}
    del params["defaults"]
    params["data"]["directory"] = str(tokens)
    params["execution"] |= {"threads": 4} | (execution or {})
    runtime = {"runtime": {"choices": {"sweep": "layers", "hydra/launcher": launcher}}}
    composed: Any = OmegaConf.create(params | STATED | sweeps.values(**sweep or {}) | options | {"hydra": runtime})
    machine: Any = Machine(params, jobs)
    starting.start(composed, arguments, machine, machine)


@pytest.fixture
def launched(monkeypatch) -> list[Any]:
    """What a launch is given: plan, local, options, jobs."""
    given: list[Any] = []
    monkeypatch.setattr(launching, "launch", lambda *told: given.extend(told))
    return given


@pytest.mark.parametrize(
    ("arguments", "sweep", "said"),
    [
        (["pretrain.tokens=1e6"], {}, r"pretrain.tokens: .*budgets\.tiny\.config\.pretrain\.tokens=\.\.\."),
        (["+evaluate={windows: 2, contexts: [64]}"], {}, r"evaluate.contexts: .*budgets\.tiny\.config\.evaluate"),
        (["pretrain.lr=1"], {"fixed": {"pretrain": {"lr": 2.0}}}, r"pretrain.lr: .* fixed\.pretrain\.lr=\.\.\."),
        (["pretrain.lr=1"], {"budgets": TUNED, "tune": True}, r"budgets\.tiny\.nuisance\.pretrain\.lr=\.\.\."),
        (
            ["data.held_out=0.1"],
            {"rows": {"a": {"data": {"held_out": 0.2}}, "b": {}}, "baseline": {"row": "a", "layers": 1}},
            r"data.held_out: .* rows\.a\.data\.held_out=\.\.\.",
        ),
    ],
)
def test_a_field_that_the_sweep_would_set_again_is_refused(arguments, sweep, said, token_folder, launched):
    with pytest.raises(ConfigError, match=said):
        start(token_folder, *arguments, sweep=sweep)
    assert not launched


def test_other_fields_are_taken(token_folder, launched):
    start(token_folder, "pretrain.lr=1", "evaluate={windows: 2}", "budgets.tiny.config.pretrain.tokens=1e6")
    assert launched


@pytest.mark.parametrize("worker", [False, True])
@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("devices", 2, r"execution\.devices=2, execution\.nodes=1: .*workers=2"),
        ("nodes", 3, r"execution\.devices=1, execution\.nodes=3: .*workers=2"),
        ("rerun", True, r"execution\.rerun=true: .*replicates=2"),
    ],
)
def test_what_a_run_of_a_sweep_cannot_have_is_refused(field, value, said, worker, token_folder, launched):
    with pytest.raises(ConfigError, match=said):
        start(token_folder, execution={field: value}, worker=worker)
    assert not launched


@pytest.mark.parametrize(
    ("launcher", "worker", "threads"),
    [("basic", False, 2), ("basic", True, 4), ("joblib", True, 2), ("submitit_slurm", True, 4)],
)
def test_workers_share_the_threads_of_one_machine_only(
    launcher, worker, threads, token_folder, launched, tmp_path, monkeypatch
):
    told: list[Local] = []
    monkeypatch.setattr(starting, "work", lambda settings: told.append(settings.local))
    storage = str(tmp_path / "queue.journal")
    Queue.launch(open_storage(storage), sweeps.plan())
    start(token_folder, launcher=launcher, worker=worker, workers=2, storage=storage)
    assert (told or launched[1:2])[0].execution.threads == threads


def test_jobs_that_fail_are_told(token_folder, launched):
    ended = [JobReturn(status=JobStatus.COMPLETED), JobReturn(status=JobStatus.FAILED)]
    ended[1].return_value = StageError("no token data in data/tokens")
    start(token_folder, launcher="submitit_slurm", workers=2, jobs=ended)
    assert launched[-1]() == ["a worker failed: no token data in data/tokens"]
