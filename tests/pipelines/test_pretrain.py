"""The stage `pretrain`: interrupted equals uninterrupted, one ledger run per cell, and every failure in one line."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from models import load_model, preset
from models.configuration import ConfigError
from pipelines.data import TokenData
from pipelines.pretrain import Pretrain
from tests.pipelines.trainings import Fault, metrics, query, start, steps_logged, tiny, train, weights


@pytest.fixture(scope="module")
def finished(token_folder, _empty_ledger, tmp_path_factory) -> Path:
    """A folder in which a training ran without interruption. Tests only read it."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "mlflow.db").write_bytes(_empty_ledger.read_bytes())
    code, said = train(tiny(token_folder), folder)
    assert code == 0, said
    return folder


MOMENTS = [
    Fault("pipelines.training:Recorder.on_train_batch_end", call=7),  # validated at 6, the ledger ahead of step 4
    Fault("pipelines.checkpoints:Cell.add"),  # a checkpoint in place, not vouched for
    Fault("pipelines.ledger:Run.finish", after=True),  # the ledger says finished, the cell does not
    Fault("pipelines.cell_training:shutil.copyfile", call=2),  # exported half-way
]
MORE_MOMENTS = [
    Fault("pipelines.ledger:MlflowClient.create_run", after=True),
    Fault("pipelines.training:Recorder.on_train_start"),
    Fault("pipelines.training:Recorder.on_train_batch_end", call=3),  # before the first checkpoint
    Fault("pipelines.checkpoints:torch.save", after=True),  # a checkpoint written, not yet in place
    Fault("pipelines.checkpoints:Cell._sweep"),  # more checkpoints than are kept
    Fault("pipelines.ledger:Run.record", call=3),
    Fault("pipelines.cell_training:save_model", after=True),  # the result half-way
    Fault("pipelines.checkpoints:Cell.finish", after=True),  # finished, nothing exported
]


@pytest.mark.parametrize("moments", [MOMENTS, pytest.param(MORE_MOMENTS, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_goes_on_to_the_same_weights_and_the_same_run(
    finished, token_folder, ledger_file, moments
):
    folder, config = ledger_file.parent, tiny(token_folder)
    for moment in moments:
        code, said = train(config, folder, moment)
        assert code == -signal.SIGKILL, f"{moment} was never reached: {said}"
    code, said = train(config, folder)
    assert code == 0, said
    assert weights(folder) == weights(finished)
    assert (folder / "out" / "loss.csv").read_bytes() == (finished / "out" / "loss.csv").read_bytes()
    assert query(folder, "select run_uuid, status from runs") == [(metrics(folder)["run_id"], "FINISHED")]
    assert steps_logged(folder, "train/loss") == list(range(1, 25))
    assert steps_logged(folder, "validation/loss") == [6, 12, 18, 24]
    (cell,) = (folder / "checkpoints").iterdir()
    assert sorted(path.name for path in cell.iterdir()) == ["cell.json", "lock", "owner", "result"]


@pytest.mark.slow
def test_killed_at_random_times_it_goes_on_to_the_same_weights(finished, token_folder, ledger_file):
    folder, config, draw = ledger_file.parent, tiny(token_folder), random.Random(0)
    for _ in range(8):
        process = start(config, folder)
        process.join(draw.uniform(0.1, 1.5))
        process.kill()
        process.join()
    code, said = train(config, folder)
    assert code == 0, said
    assert weights(folder) == weights(finished)
    assert query(folder, "select status from runs") == [("FINISHED",)]
    assert steps_logged(folder, "train/loss") == list(range(1, 25))


@pytest.mark.slow
def test_compiled_it_trains_the_same_losses(finished, token_folder, ledger_file):
    folder = ledger_file.parent
    code, said = train(tiny(token_folder, execution={"compile": True}), folder, timeout=600)
    assert code == 0, said
    plain, compiled = (pd.read_csv(path / "out" / "loss.csv") for path in (finished, folder))
    pd.testing.assert_frame_equal(plain, compiled, rtol=1e-3)


def test_the_export_says_what_was_trained(finished, token_folder):
    config, said = tiny(token_folder), metrics(finished)
    assert said.keys() == {
        *("model", "family", "seed", "fingerprint", "run_id", "commit", "dirty", "data_digest", "code_digest"),
        *("parameters", "context", "steps", "tokens", "train_loss", "validation_loss", "tokens_per_second"),
        *("training_flops_per_token", "peak_memory_bytes", "seconds"),
    }
    assert said["fingerprint"] == Pretrain(config, TokenData.open(token_folder)).identity()["fingerprint"]
    model = load_model(finished / "out")
    assert model.config == config.model
    assert said["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert said["tokens"] == 24 * 4 * 16
    curve = pd.read_csv(finished / "out" / "loss.csv")
    assert curve.step.tolist() == list(range(1, 25))
    assert curve.tokens.tolist() == [64 * step for step in range(1, 25)]
    assert curve.train_loss[0] == pytest.approx(math.log(257), abs=1.5)
    assert curve.train_loss[23] == said["train_loss"] < curve.train_loss[0] - 0.5
    assert curve.step[curve.validation_loss.notna()].tolist() == [6, 12, 18, 24]


def test_the_held_out_loss_is_that_of_the_exported_model(finished, token_folder):
    windows = TokenData.open(token_folder).held_out_windows(context=16, tokens=256)
    with torch.inference_mode():
        loss, _ = load_model(finished / "out").training_loss(windows[:, :-1], windows[:, 1:])
    assert float(loss) == pytest.approx(metrics(finished)["validation_loss"], rel=1e-5)


def test_the_ledger_says_what_was_trained(finished):
    said = metrics(finished)
    tags = dict(query(finished, "select key, value from tags"))
    assert tags["cell.fingerprint"] == said["fingerprint"]
    assert (tags["seed"], tags["model"], tags["commit"]) == ("0", "transformer_pp_tiny", said["commit"])
    assert (tags["data.digest"], tags["code.digest"]) == (said["data_digest"], said["code_digest"])
    params = dict(query(finished, "select key, value from params"))
    assert params["model.width"] == "16"
    assert params["pretrain.lr"] == "0.003"
    assert query(finished, "select name, digest from datasets") == [("service_docs", said["data_digest"][:36])]
    stored = dict(query(finished, "select key, value from latest_metrics"))
    assert stored["train/loss"] == said["train_loss"]
    assert stored["validation/loss"] == said["validation_loss"]
    (artifacts,) = (finished / "mlartifacts").iterdir()
    assert {path.name for path in (artifacts / "artifacts").iterdir()} == {"config.json", "metrics.json"}


def test_a_finished_cell_is_exported_again_and_trained_only_on_demand(finished, token_folder, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "copy"))
    shutil.rmtree(folder / "out")
    code, said = train(tiny(token_folder, model_name="another"), folder)
    assert code == 0, said
    assert weights(folder) == weights(finished)
    assert metrics(folder) == metrics(finished) | {"model": "another"}
    code, said = train(tiny(token_folder, execution={"rerun": True}), folder)
    assert code == 0, said
    assert weights(folder) == weights(finished)
    assert metrics(folder)["run_id"] != metrics(finished)["run_id"]


def test_a_second_process_is_refused_and_a_signal_stops_in_good_order(finished, token_folder, ledger_file):
    folder, config = ledger_file.parent, tiny(token_folder)
    process = start(config, folder, pause_after_step_ten)
    wait_for(folder / "paused")
    (folder / "second").mkdir()
    elsewhere = dataclasses.replace(config.execution, checkpoints="../checkpoints")
    code, said = train(dataclasses.replace(config, execution=elsewhere), folder / "second")
    assert code == 1
    assert said.count("\n") == 1
    assert f"process {process.pid} on " in said
    os.kill(process.pid, signal.SIGTERM)
    process.join(60)
    assert process.exitcode == 128 + signal.SIGTERM
    said = (folder / "log.txt").read_text().splitlines()[-1]
    assert said == "error: stopped by SIGTERM after step 10; run again to go on from there"
    assert query(folder, "select status from runs") == [("KILLED",)]
    assert steps_logged(folder, "train/loss") == list(range(1, 11))
    code, said = train(config, folder)
    assert code == 0, said
    assert weights(folder) == weights(finished)
    assert query(folder, "select status from runs") == [("FINISHED",)]
    assert not query(folder, "select value from tags where key = 'reason'")


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_what_was_good(token_folder, ledger_file):
    folder, config = ledger_file.parent, tiny(token_folder)
    (folder / "out").mkdir()
    (folder / "out" / "metrics.json").write_text("{}")
    code, said = train(config, folder, nan_at_step_ten)
    assert code == 1
    line = said.splitlines()[-1]
    assert line.startswith(
        "error: loss nan and gradient norm nan at step 10: training stopped, the checkpoint of step 8"
    )
    assert query(folder, "select status from runs") == [("FAILED",)]
    assert "step 10" in query(folder, "select value from tags where key = 'reason'")[0][0]
    assert steps_logged(folder, "train/loss")[-1] == 8
    assert (folder / "out" / "metrics.json").read_text() == "{}"
    assert len(list((folder / "checkpoints").rglob("step-00000008.ckpt"))) == 1


def test_an_altered_checkpoint_is_named_and_the_one_before_it_used(finished, token_folder, ledger_file):
    folder, config = ledger_file.parent, tiny(token_folder)
    train(config, folder, Fault("pipelines.training:Recorder.on_train_batch_end", call=11))
    newest = next(folder.rglob("step-00000008.ckpt"))
    oldest = next(folder.rglob("step-00000004.ckpt"))
    newest.write_bytes(newest.read_bytes()[:-1])
    code, said = train(config, folder, Fault("pipelines.training:Recorder.on_train_batch_end", call=2))
    assert code == -signal.SIGKILL
    assert f"{newest.relative_to(folder)}: altered or truncated; going on from {oldest.relative_to(folder)}" in said
    oldest.write_bytes(b"")
    code, said = train(config, folder)
    assert code == 1
    assert said.count("\n") == 1
    assert "step-00000008.ckpt" in said
    assert "step-00000004.ckpt" in said


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_the_checkpoint_before(finished, token_folder, ledger_file):
    folder, config = ledger_file.parent, tiny(token_folder)
    code, said = train(config, folder, full_at_second_checkpoint)
    assert code == 1
    assert "step-00000008.ckpt: No space left on device; earlier checkpoints are kept" in said.splitlines()[-1]
    assert query(folder, "select status from runs") == [("FAILED",)]
    code, said = train(config, folder)
    assert code == 0, said
    assert weights(folder) == weights(finished)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_micro_batches_add_up_to_the_batch(token_folder, ledger_file, optimizer):
    folder = ledger_file.parent
    curves = []
    for parts in (1, 4):
        config = tiny(token_folder, pretrain={"accumulate": parts, "optimizer": optimizer})
        code, said = train(config, folder)
        assert code == 0, said
        curves.append(pd.read_csv(folder / "out" / "loss.csv"))
    pd.testing.assert_frame_equal(curves[0], curves[1], rtol=1e-3)


def test_muon_resumes_to_the_same_weights(token_folder, ledger_file):
    folder, config = ledger_file.parent, tiny(token_folder, pretrain={"optimizer": "muon"})
    train(config, folder, Fault("pipelines.training:Recorder.on_train_batch_end", call=11))
    train(config, folder)
    interrupted = weights(folder)
    code, said = train(tiny(token_folder, pretrain={"optimizer": "muon"}, execution={"rerun": True}), folder)
    assert code == 0, said
    assert weights(folder) == interrupted


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"vocab_size": 300}}, "model.vocab_size=300 must be 257"),
        ({"pretrain": {"context": 16384, "tokens": 4 * 16384, "validation_tokens": 16384}}, "pretrain.context=16384"),
        ({"execution": {"devices": 3}}, "pretrain.batch_size=4 must be a multiple of"),
        ({"execution": {"strategy": "fsdp"}, "pretrain": {"optimizer": "muon"}}, "pretrain.optimizer=muon"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(token_folder, changes, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        Pretrain(tiny(token_folder, **changes), TokenData.open(token_folder)).require_fit()


MEMORY = {"patch_size": 4, "text_chunk": 16, "memory_chunk": 2, "heads": 2, "memory_heads": 2, "decoder_heads": 2}


@pytest.mark.parametrize(
    ("context", "model", "said"),
    [
        (
            16,
            {},
            "pretrain.context=16 never reads the memory, with model.text_chunk=16 tokens and",
        ),
        (16, {"memory_chunk": 6}, "accepted are at least 33, a smaller model.text_chunk and model.memory_chunk"),
        (32, {"memory_chunk": 4}, "pretrain.context=32 never writes the memory: it reads 4 patches,"),
        (8, {"memory_view": "causal"}, "accepted are at least 12, a smaller model.memory_chunk"),
    ],
)
def test_a_memory_that_would_never_run_is_refused(token_folder, context, model, said):
    mela = preset("mela_tiny", vocab_size=257, width=16, hidden=32, **MEMORY | model)
    config = dataclasses.replace(tiny(token_folder, pretrain={"context": context}), model=mela)
    with pytest.raises(ConfigError, match=re.escape(said)):
        Pretrain(config, TokenData.open(token_folder)).require_fit()


@pytest.mark.parametrize(
    ("context", "model"),
    [(17, {}), (33, {"memory_chunk": 6}), (17, {"memory_chunk": 9, "neural_memory": False}), (4, {"memory": "none"})],
)
def test_a_memory_that_runs_or_is_switched_off_is_accepted(token_folder, context, model):
    mela = preset("mela_tiny", vocab_size=257, width=16, hidden=32, **MEMORY | model)
    config = dataclasses.replace(tiny(token_folder, pretrain={"context": context}), model=mela)
    Pretrain(config, TokenData.open(token_folder)).require_fit()


def test_the_identity_follows_science_and_not_execution(token_folder):
    data = TokenData.open(token_folder)

    def identity(**changes) -> str:
        return Pretrain(tiny(token_folder, **changes), data).identity()["fingerprint"]

    same = {"execution": {"threads": 2}, "output": "elsewhere", "tracking": {"experiment": "x"}, "model_name": "other"}
    assert identity(**same, evaluate={"windows": 1}) == identity()
    different = [{"seed": 1}, {"pretrain": {"lr": 0.1}}, {"model": {"layers": 2}}]
    assert len({identity(), *(identity(**changes) for changes in different)}) == 4


def pause_after_step_ten() -> None:
    """The training waits for a signal."""
    from pipelines.training import Recorder

    original: Any = Recorder.on_train_batch_end

    def patched(self, trainer, module, *rest):
        if module.step == 10:
            Path("paused").touch()
            while self.stop.received is None:
                time.sleep(0.01)
        original(self, trainer, module, *rest)

    Recorder.on_train_batch_end = patched  # type: ignore[method-assign]


def nan_at_step_ten() -> None:
    from models.transformer import Transformer

    original, calls = Transformer.training_loss, 0

    def patched(self, inputs, targets):
        nonlocal calls
        calls += torch.is_grad_enabled()
        loss, scalars = original(self, inputs, targets)
        return loss * (float("nan") if calls == 10 and torch.is_grad_enabled() else 1), scalars

    Transformer.training_loss = patched


def full_at_second_checkpoint() -> None:
    original, calls = torch.save, 0

    def patched(*arguments):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(*arguments)

    torch.save = patched


def wait_for(path: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never appeared"
        time.sleep(0.02)
