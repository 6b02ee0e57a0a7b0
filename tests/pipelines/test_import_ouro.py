"""The command that imports an Ouro checkpoint."""

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from models import build_model, load_model, preset
from models.configuration import ConfigError
from models.looped.looplm import LoopLM
from models.looped.ouro_checkpoint import export_ouro
from pipelines import evaluate, import_ouro
from tests.pipelines.settings import settings


@pytest.fixture
def checkpoint(tmp_path):
    model = build_model(preset("looplm_tiny", vocab_size=31, width=16, heads=4, hidden=24), seed=3)
    assert isinstance(model, LoopLM)
    folder = tmp_path / "Ouro-tiny"
    export_ouro(model, folder, shard_bytes=4000)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def command(monkeypatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["import_ouro", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        import_ouro.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_model_and_its_tokenizer_arrive(checkpoint, tmp_path, monkeypatch, capsys):
    output = tmp_path / "artifacts" / "ouro"
    assert command(monkeypatch, checkpoint, f"output={output}") == 0
    assert "2 layers, 4 loops" in capsys.readouterr().out
    model = load_model(output)
    assert isinstance(model, LoopLM)
    assert model(torch.zeros(1, 3, dtype=torch.long)).isfinite().all()
    assert (output / "tokenizer.json").read_text() == "{}"
    said = json.loads((output / "metrics.json").read_text())
    assert (said["model"], said["family"]) == ("ouro", "looplm")
    assert said["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert said["run_id"] is said["data_digest"] is said["steps"] is None


def test_it_is_evaluated_on_tokens_of_its_vocabulary(tmp_path, token_folder, monkeypatch, capsys):
    model = build_model(preset("looplm_tiny", vocab_size=257, width=16, heads=4, hidden=24), seed=3)
    assert isinstance(model, LoopLM)
    export_ouro(model, tmp_path / "Ouro")
    assert command(monkeypatch, tmp_path / "Ouro", f"output={tmp_path / 'ouro'}") == 0
    config = settings(
        checkpoint=str(tmp_path / "ouro"),
        output=str(tmp_path / "evaluation"),
        data={"directory": str(token_folder)},
        evaluate={"contexts": [32, 64], "score_tokens": 8, "windows": 2, "recall": False, "timing": False},
        execution={"checkpoints": str(tmp_path / "checkpoints"), "threads": 1},
    )
    metrics = evaluate.run(config)
    assert "ouro was imported: the ledger has no run of it" in capsys.readouterr().out
    assert metrics["run_id"] is metrics["training_context"] is None
    assert json.loads((tmp_path / "evaluation" / "metrics.json").read_text()) == metrics
    (tmp_path / "ouro" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="was trained with another tokenizer"):
        evaluate.run(config)


def test_without_an_output_it_is_named_after_the_folder(checkpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command(monkeypatch, checkpoint) == 0
    assert load_model("artifacts/Ouro-tiny").config.vocab_size == 31


def test_what_does_not_fit_is_one_line_and_leaves_nothing(checkpoint, tmp_path, monkeypatch, capsys):
    save_file({"model.norm.weight": torch.ones(3)}, min(checkpoint.glob("*.safetensors")))
    output = tmp_path / "out"
    assert command(monkeypatch, checkpoint, f"output={output}") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "tensors do not fit" in error
    assert not output.exists()


def test_a_missing_folder_and_a_misspelt_output_are_refused(checkpoint, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, tmp_path / "nowhere") == 2
    assert "nowhere is no folder" in capsys.readouterr().err
    assert command(monkeypatch, checkpoint, "out=there") == 2
    assert "'out=there' is not accepted; write output=FOLDER" in capsys.readouterr().err
