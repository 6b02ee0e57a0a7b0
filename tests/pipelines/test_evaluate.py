"""The stage on a small model and small token data: what it writes, what it refuses, and that it repeats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from filelock import FileLock

from models import build_model, preset, save_model
from models.configuration import ConfigError
from pipelines import evaluate
from pipelines.config import PipelineConfig, StageError
from pipelines.data import TokenData
from pipelines.ledger import open_run
from tests.pipelines.settings import settings
from tests.pipelines.token_data import write_token_data
from tests.pipelines.trainings import query

FILES = ["contexts.csv", "documents.parquet", "metrics.json", "positions.csv", "summary.json"]
pytestmark = pytest.mark.usefixtures("ledger_file")
TINY = {"vocab_size": 257, "width": 16, "heads": 2, "layers": 1, "hidden": 16}  # a byte and the separator each


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> TokenData:
    text = "Perplexity of \N{GREEK SMALL LETTER PI} and caf\N{LATIN SMALL LETTER E WITH ACUTE}. "
    folder = tmp_path_factory.mktemp("data") / "tokens"
    return write_token_data(folder, {"train": [text * 9], "held_out": [text * 6, "short", text * 3]})


def train(data: TokenData, folder: Path, **fields: Any) -> Path:
    """A model folder as `pretrain` leaves it; the weights are those of the start."""
    model = build_model(preset("transformer_pp_tiny", **TINY | fields))
    save_model(model, folder)
    metrics = {
        "model": "small",
        "seed": 0,
        "fingerprint": "f" * 64,
        "run_id": "r" * 32,
        "data_digest": data.digest,
        "context": 16,
        "steps": 128,
        "parameters": model.cost(64).total_parameters,
        "training_flops_per_token": model.cost(64).total_training_flops,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics), "utf-8")
    return folder


def config_of(data: TokenData, checkpoint: Path, **changes: Any) -> PipelineConfig:
    """Writes beside the model; its ledger is that of the fixture `ledger_file`, which lies there too."""
    root = checkpoint.parent
    changes = {"evaluate": {}} | changes
    changes["evaluate"] = {"contexts": [16, 32, 64], "score_tokens": 8, "windows": 4} | changes["evaluate"]
    return settings(
        checkpoint=str(checkpoint),
        output=str(root / "evaluation"),
        data={"directory": str(data.directory)},
        execution={"checkpoints": str(root / "checkpoints"), "threads": 1},
        tracking={"uri": f"sqlite:///{root / 'mlflow.db'}"},
        **changes,
    )


def test_files_say_the_same_and_repeat(data: TokenData, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(data, train(data, tmp_path / "model", chunk=8))
    metrics = evaluate.run(config)
    assert "small at 16 -> 64 tokens: perplexity" in capsys.readouterr().out.replace("\n", "")
    folder = tmp_path / "evaluation"
    assert sorted(file.name for file in folder.iterdir()) == FILES
    assert json.loads((folder / "metrics.json").read_text("utf-8")) == metrics
    assert metrics["fingerprint"] == "f" * 64
    summary = {protocol: metrics[protocol]["on"] for protocol in ("window_mean", "fixed_targets")}
    summary["bits_per_byte"] = metrics["bits_per_byte"]
    assert json.loads((folder / "summary.json").read_text("utf-8")) == summary
    contexts = pd.read_csv(folder / "contexts.csv")
    assert list(contexts.columns) == ["model", "context", "window_mean", "fixed_targets"]
    for row in contexts.to_dict("records"):
        for protocol in ("window_mean", "fixed_targets"):
            assert row[protocol] == pytest.approx(metrics[protocol]["on"][str(row["context"])])
    documents = pd.read_parquet(folder / "documents.parquet")
    scored = documents[(documents.protocol == "window_mean") & (documents.context == 64)]
    mean_loss = sum(scored.loss_sum.tolist()) / sum(scored.tokens.tolist())
    assert math.exp(mean_loss) == pytest.approx(metrics["window_mean"]["on"]["64"])
    assert set(pd.read_csv(folder / "positions.csv")["kind"]) == {"position", "chunk", "stream"}

    before = {name: (folder / name).read_bytes() for name in FILES if name != "metrics.json"}
    again = evaluate.run(config)
    assert {name: (folder / name).read_bytes() for name in before} == before
    assert {k: v for k, v in again.items() if k != "timing"} == {k: v for k, v in metrics.items() if k != "timing"}


def test_costs_are_measured_per_context_unless_switched_off(data: TokenData, tmp_path: Path) -> None:
    checkpoint = train(data, tmp_path / "model")
    metrics = evaluate.run(config_of(data, checkpoint))
    assert metrics["state_bytes"] == {str(n): 2 * 4 * 16 * n for n in (16, 32, 64)}
    assert (
        list(metrics["peak_memory_bytes"]) == list(metrics["timing"]["prefill_tokens_per_second"]) == ["16", "32", "64"]
    )
    assert metrics["timing"]["decode_tokens_per_second"] > 0
    quick = evaluate.run(config_of(data, checkpoint, evaluate={"timing": False}))
    assert quick["state_bytes"] == metrics["state_bytes"]
    assert "peak_memory_bytes" not in quick
    assert list(quick["timing"]) == ["seconds"]


def test_bits_per_byte_of_a_byte_tokenizer_are_bits_per_token(data: TokenData, tmp_path: Path) -> None:
    """The last target of a window may be the separator, which stands for no byte."""
    metrics = evaluate.run(config_of(data, train(data, tmp_path / "model")))
    windows = metrics["windows"]["tokens"]
    per_token = math.log2(metrics["window_mean"]["on"]["16"])
    assert metrics["bits_per_byte"]["16"] == pytest.approx(per_token, rel=4 / windows)


def test_what_cannot_be_evaluated_is_refused_by_name(data: TokenData, tmp_path: Path) -> None:
    checkpoint = train(data, tmp_path / "model")
    config = config_of(data, checkpoint)
    longest = max(len(document) for document in data.documents("held_out")) - 1

    def refused(pattern: str, config: PipelineConfig, error: type[Exception] = ConfigError) -> None:
        with pytest.raises(error, match=pattern):
            evaluate.run(config)

    refused("checkpoint: name the folder", replace(config, checkpoint=None))
    refused(r"nowhere is no folder", replace(config, checkpoint=str(tmp_path / "nowhere")))
    refused("metrics.json is missing", replace(config, checkpoint=str(tmp_path)))
    refused(
        f"no held-out document has 4096 tokens; the longest has {longest}",
        config_of(data, checkpoint, evaluate={"contexts": [4096]}),
    )
    small = train(data, tmp_path / "small", vocab_size=100)
    refused("model.vocab_size=100 must be 257", config_of(data, small))
    other = write_token_data(tmp_path / "other", {"train": ["a"], "held_out": ["b"]})
    refused(f"trained on data {data.digest[:8]}, .* holds {other.digest[:8]}", config_of(other, checkpoint))
    if not torch.cuda.is_available():
        refused("accelerator=gpu", replace(config, execution=replace(config.execution, accelerator="gpu")))
    assert not (tmp_path / "evaluation").exists()


def test_altered_files_fail_in_one_line_and_leave_the_last_evaluation(data: TokenData, tmp_path: Path) -> None:
    checkpoint = train(data, tmp_path / "model")
    config = config_of(data, checkpoint)
    evaluate.run(config)
    before = {file.name: file.read_bytes() for file in (tmp_path / "evaluation").iterdir()}
    described = (checkpoint / "metrics.json").read_text("utf-8")
    for content, complaint in ((described[:40], "not JSON"), ('{"model": "small"}', "lacks seed, fingerprint")):
        (checkpoint / "metrics.json").write_text(content, "utf-8")
        with pytest.raises(StageError, match=complaint):
            evaluate.run(config)
    (checkpoint / "metrics.json").write_text(described, "utf-8")
    weights = bytearray((checkpoint / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (checkpoint / "model.safetensors").write_bytes(weights)
    with pytest.raises(StageError, match="SHA-256 differs"):
        evaluate.run(config)
    assert {file.name: file.read_bytes() for file in (tmp_path / "evaluation").iterdir()} == before


def test_a_full_disk_leaves_the_last_evaluation(
    data: TokenData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(data, train(data, tmp_path / "model"))
    evaluate.run(config)
    before = {file.name: file.read_bytes() for file in (tmp_path / "evaluation").iterdir()}

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(OSError, match="No space left"):
        evaluate.run(config)
    assert {file.name: file.read_bytes() for file in (tmp_path / "evaluation").iterdir()} == before


def test_a_second_evaluation_into_the_same_folder_is_told_so(data: TokenData, tmp_path: Path) -> None:
    config = config_of(data, train(data, tmp_path / "model"))
    evaluate.run(config)
    (lock,) = (tmp_path / "checkpoints").glob("evaluate-*.lock")
    with FileLock(lock), pytest.raises(StageError, match="another process is evaluating"):
        evaluate.run(config)


def test_weights_that_give_no_finite_loss_are_an_error(data: TokenData, tmp_path: Path) -> None:
    checkpoint = train(data, tmp_path / "model")
    model = build_model(preset("transformer_pp_tiny", **TINY))
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    save_model(model, checkpoint)
    with pytest.raises(StageError, match="not finite at context 16"):
        evaluate.run(config_of(data, checkpoint))


def test_recall_is_asked_unless_switched_off(data: TokenData, tmp_path: Path) -> None:
    checkpoint = train(data, tmp_path / "model", chunk=16)
    recall = evaluate.run(config_of(data, checkpoint))["recall"]
    assert recall["chance"] == 1 / 32
    assert list(recall["mqar"]) == list(recall["needle"]) == ["64"]
    assert list(recall["facts"]) == ["1", "2"]
    assert recall["facts"]["1"] < 0.2  # nothing was learnt
    assert "recall" not in evaluate.run(config_of(data, checkpoint, evaluate={"recall": False}))


def test_metrics_join_the_run_of_the_training_and_repeating_adds_nothing(
    data: TokenData, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = train(data, tmp_path / "model")
    config = config_of(data, checkpoint)
    evaluate.run(config)
    assert "has no run rrrr" in capsys.readouterr().out.replace("\n", "")
    run = open_run(config.tracking, "key", "small", {}, {}, {"name": "test", "digest": data.digest})
    training = json.loads((checkpoint / "metrics.json").read_text("utf-8")) | {"run_id": run.run_id}
    (checkpoint / "metrics.json").write_text(json.dumps(training), "utf-8")
    metrics = evaluate.run(config)

    latest = dict(query(tmp_path, "select key, value from latest_metrics where step = 128"))
    for n in ("16", "32", "64"):
        assert latest[f"ppl/fixed_targets/{n}"] == metrics["fixed_targets"]["on"][n]
        assert latest[f"ppl/window_mean/{n}"] == metrics["window_mean"]["on"][n]
        assert latest[f"bits_per_byte/{n}"] == metrics["bits_per_byte"][n]
        assert latest[f"state_bytes/{n}"] == metrics["state_bytes"][n]
    assert latest["recall/mqar/64"] == metrics["recall"]["mqar"]["64"]
    assert latest["decode_tokens_per_second"] == metrics["timing"]["decode_tokens_per_second"]

    points = query(tmp_path, "select key, step, value from metrics order by key, step")
    evaluate.run(config)
    assert query(tmp_path, "select key, step, value from metrics order by key, step") == points
    altered = metrics["fixed_targets"]["on"]["16"] + 1
    run.record([(128, {"ppl/fixed_targets/16": altered})], correct=True)
    evaluate.run(config)
    assert dict(query(tmp_path, "select key, value from latest_metrics where step = 128")) == latest


def test_controls_are_named_after_the_length() -> None:
    values = {"on": {"64": 2.0}, "zero": {"64": 3.0}}
    metrics = {"fixed_targets": values, "window_mean": values, "bits_per_byte": {"64": 1.0}}
    assert evaluate.logged(metrics) == {
        "ppl/window_mean/64": 2.0,
        "ppl/window_mean/64/zero": 3.0,
        "ppl/fixed_targets/64": 2.0,
        "ppl/fixed_targets/64/zero": 3.0,
        "bits_per_byte/64": 1.0,
    }
