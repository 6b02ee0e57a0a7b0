"""A downloaded Ouro checkpoint as our LoopLM: the teacher of `pipelines.distill`, or a model to evaluate.

python -m pipelines.import_ouro ~/Ouro-1.4B output=artifacts/ouro_1b4

Writes, in `output` (default `artifacts/<name of the folder>`), `model.safetensors` and `config.json`, a copy of the
checkpoint's `tokenizer.json` if it has one, and, last, `metrics.json`, where what nobody here knows of its training is
null. Nothing is written unless every tensor has the expected name and shape.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from models import save_model
from models.configuration import require
from models.looped.ouro_checkpoint import import_ouro
from models.serialization import WEIGHTS, CheckpointError
from pipelines.command import guarded
from pipelines.config import StageError
from pipelines.files import atomic_path, sha256_file, write_json
from pipelines.identity import fingerprint

METRICS, TOKENIZER = "metrics.json", "tokenizer.json"
UNKNOWN = ("seed", "run_id", "commit", "dirty", "data_digest", "context", "steps", "training_flops_per_token")


def run(checkpoint: Path, output: Path) -> None:
    """Import the folder `checkpoint` into `output`.

    Raises:
        ConfigError: when there is no such folder.
        StageError: when it does not hold the checkpoint that its config describes.
    """
    require(checkpoint.is_dir(), f"{checkpoint} is no folder; give the one the checkpoint was downloaded to")
    try:
        model = import_ouro(checkpoint)
    except CheckpointError as error:
        raise StageError(str(error)) from None
    (output / METRICS).unlink(missing_ok=True)
    save_model(model, output)
    if (checkpoint / TOKENIZER).is_file():
        with atomic_path(output / TOKENIZER) as path:
            shutil.copyfile(checkpoint / TOKENIZER, path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    metrics = {
        "model": output.name,
        "family": config.family,
        "fingerprint": fingerprint({"stage": "import_ouro", "weights": sha256_file(output / WEIGHTS)}),
        "parameters": parameters,
    }
    write_json(output / METRICS, metrics | dict.fromkeys(UNKNOWN))
    print(f"import_ouro: {config.layers} layers, {config.loops} loops, {parameters:,} parameters -> {output}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pipelines.import_ouro", description="Import an Ouro checkpoint.")
    parser.add_argument("checkpoint", type=Path, help="folder with config.json and model.safetensors or its shards")
    parser.add_argument("output", nargs="?", metavar="output=FOLDER", help="default: artifacts/<name of the folder>")
    arguments = parser.parse_args()
    sys.exit(guarded(lambda: run(arguments.checkpoint, _output(arguments))))


def _output(arguments: argparse.Namespace) -> Path:
    if arguments.output is None:
        return Path("artifacts") / arguments.checkpoint.resolve().name
    key, _, folder = arguments.output.partition("=")
    require(key == "output" and bool(folder), f"{arguments.output!r} is not accepted; write output=FOLDER")
    return Path(folder)


if __name__ == "__main__":
    main()
