"""Two processes train what one trains, whether the weights are copied (ddp) or cut (fsdp, stopped on the way)."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest

from tests.pipelines.trainings import metrics, query, steps_logged, tiny, train
from tests.workspace import PROJECT, environment

pytestmark = pytest.mark.slow
STEPS = 150  # enough to be stopped on the way


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes_train_what_one_trains(token_folder, ledger_file, strategy):
    folder = ledger_file.parent
    pretrain = {"tokens": STEPS * 64, "log_every": 10, "validate_every": 100, "checkpoint_every": 10}
    config = tiny(token_folder, pretrain=pretrain, output="alone")
    code, said = train(config, folder)
    assert code == 0, said
    shutil.copy(PROJECT / "params.yaml", folder)
    fields = {
        "model": "transformer_pp_tiny",
        "output": "out",
        "data.directory": token_folder,
        "data.vocab_size": 257,
        **{f"model.{name}": value for name, value in vars(config.model).items()},
        **{f"pretrain.{name}": value for name, value in vars(config.pretrain).items() if name != "betas"},
        **{"execution.accelerator": "cpu", "execution.threads": 1, "execution.rerun": "true"},
        **{"execution.devices": 2, "execution.strategy": strategy},
    }
    arguments = [f"{name}={'null' if value is None else value}" for name, value in fields.items()]
    command = [sys.executable, "-m", "pipelines.pretrain", *arguments]
    surroundings = environment() | {"PYTHONPATH": str(PROJECT)}
    if strategy == "fsdp":
        stop_on_the_way(command, folder, surroundings)
    ran = subprocess.run(command, cwd=folder, env=surroundings, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    alone, together = (pd.read_csv(folder / name / "loss.csv") for name in ("alone", "out"))
    pd.testing.assert_frame_equal(alone, together, rtol=2e-3)
    run = metrics(folder)["run_id"]
    assert query(folder, f"select status from runs where run_uuid = '{run}'") == [("FINISHED",)]
    recorded = list(range(10, STEPS + 1, 10))
    assert sorted(set(steps_logged(folder, "train/loss"))) == recorded
    assert len(steps_logged(folder, "train/loss")) == 2 * len(recorded)


def stop_on_the_way(command: list[str], folder: Path, surroundings: dict[str, str]) -> None:
    stopped = subprocess.Popen(command, cwd=folder, env=surroundings, stderr=subprocess.PIPE, text=True)
    while not list(folder.rglob("step-00000010.ckpt")):
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=120)
    assert stopped.returncode == 128 + signal.SIGTERM, said
    assert said.count("\n") == 1
