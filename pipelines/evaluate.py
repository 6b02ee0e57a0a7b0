"""Stage `evaluate`: a trained model on held-out text, at every context length and under every control.

    python -m pipelines.evaluate checkpoint=artifacts/mela_tiny output=evaluations/mela_tiny

Reads the model folder that `pretrain` or `distill` wrote and the tokens it was trained on; of an imported model, whose
training is unknown, only the tokenizer must be that of the tokens. Writes, in `output`, `contexts.csv`
(perplexity per control, protocol and context), `positions.csv` (perplexity by position), `documents.parquet` (losses
per document), `summary.json` (what `dvc metrics show` lists) and, last, `metrics.json`. Every number but those under
`timing` is the same in every run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from filelock import FileLock, Timeout
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from models import load_model
from models.configuration import require
from models.language_model import CausalLM
from models.serialization import CheckpointError
from pipelines.addresses import masked
from pipelines.config import EvaluateConfig, ExecutionConfig, PipelineConfig, StageError, TrackingConfig
from pipelines.data import TokenData
from pipelines.evaluation import Evaluation, HeldOut, evaluate_model
from pipelines.files import atomic_path
from pipelines.identity import commit
from pipelines.measurement import decode_speed, measured_state_bytes, peak_memory_bytes, prefill_speed
from pipelines.model_folder import require_tokenizer
from pipelines.protocol import PROTOCOLS
from pipelines.recall_evaluation import evaluate_recall

METRICS, SUMMARY = "metrics.json", "summary.json"
TRAINING = (
    "model",
    "seed",
    "fingerprint",
    "run_id",
    "data_digest",
    "context",
    "steps",
    "parameters",
    "training_flops_per_token",
)
MEASURES = ("bits_per_byte", "streaming", "state_bytes", "peak_memory_bytes", "recall")  # logged beside perplexity
LOGITS = {"cpu": 2**25, "cuda": 2**28}  # logits held at once while scoring
CALL_TOKENS = {"cpu": 2**14, "cuda": 2**16}  # tokens per call of the model, at most


def run(config: PipelineConfig) -> dict[str, Any]:
    """Evaluate the model in `checkpoint`, write `output`, log to the training run; returns the metrics.

    Raises:
        ConfigError: when there is no such model, it was trained on other data or with another tokenizer, or no document
            is long enough.
        StageError: when its files were altered, or a loss is not finite.
    """
    require(config.checkpoint is not None, "checkpoint: name the folder of a trained model: checkpoint=artifacts/...")
    checkpoint = Path(str(config.checkpoint))
    output = Path(config.output or f"evaluations/{checkpoint.name}")
    with _only_one(output, Path(config.execution.checkpoints)):
        return _evaluate(config, checkpoint, output)


def _evaluate(config: PipelineConfig, checkpoint: Path, output: Path) -> dict[str, Any]:
    started = time.monotonic()
    torch.set_num_threads(config.execution.threads)
    training = _training(checkpoint)
    data = TokenData.open(config.data.directory)
    _require_data(checkpoint, training, data)
    model = _load(checkpoint, config.execution)
    data.require_vocab(model.config.vocab_size)
    text = HeldOut(data.documents("held_out"), data.token_bytes)
    device = next(model.parameters()).device.type
    batch_tokens = min(CALL_TOKENS[device], max(1, LOGITS[device] // data.vocab_size))
    mixed = torch.autocast(device, torch.bfloat16, enabled=config.execution.precision == "bf16-mixed")
    with mixed, _progress() as progress:
        task = progress.add_task(training["model"], total=None)

        def advance(scored: int, total: int) -> None:
            progress.update(task, advance=scored, total=total)

        evaluation = evaluate_model(model, text, config.evaluate, batch_tokens, advance)
        progress.update(task, description=f"{training['model']}: recall and costs")
        metrics = {
            **{key: training[key] for key in TRAINING if key != "context"},
            "commit": commit().sha,
            "training_context": training["context"],
            **evaluation.metrics(),
            **_recall(model, evaluation, data.separator, config.evaluate, batch_tokens),
            **_costs(model, evaluation.tokens[0, :-1], config.evaluate),
            "timing": _speeds(model, evaluation.tokens[0, :-1], config.evaluate),
        }
    metrics["timing"]["seconds"] = time.monotonic() - started
    _write(output, training["model"], evaluation, metrics)
    _record(config.tracking, training, metrics)
    print(_summary(metrics, output))
    return metrics


def _training(checkpoint: Path) -> dict[str, Any]:
    """What `pretrain` says of the model in its `metrics.json`."""
    file = checkpoint / METRICS
    require(
        checkpoint.is_dir(), f"checkpoint={checkpoint} is no folder; train a model first: python -m pipelines.pretrain"
    )
    require(file.is_file(), f"checkpoint={checkpoint} holds no finished training: {METRICS} is missing")
    try:
        training = json.loads(file.read_text("utf-8"))
        missing = [key for key in TRAINING if key not in training]
    except (ValueError, TypeError):
        raise StageError(f"{file} is altered or truncated: it is not JSON; train the model again") from None
    if missing:
        raise StageError(f"{file} lacks {', '.join(missing)}; train the model again")
    return training


def _require_data(checkpoint: Path, training: dict[str, Any], data: TokenData) -> None:
    """`ConfigError` unless these are the data of the training or, of an imported model, of its tokenizer."""
    trained = training["data_digest"]
    if trained is None:
        require_tokenizer("checkpoint", str(checkpoint), data)
        return
    require(
        trained == data.digest,
        f"checkpoint={checkpoint} was trained on data {trained[:8]}, {data.directory} holds {data.digest[:8]}: "
        "evaluate it on the data it was trained on (data.directory=...), or train it again",
    )


def _load(checkpoint: Path, execution: ExecutionConfig) -> CausalLM:
    try:
        return load_model(checkpoint, _device(execution)).eval()
    except CheckpointError as error:
        raise StageError(str(error)) from None


def _device(execution: ExecutionConfig) -> str:
    cuda = torch.cuda.is_available()
    require(
        cuda or execution.accelerator != "gpu", "execution.accelerator=gpu: torch finds no GPU here; use auto or cpu"
    )
    return "cuda" if cuda and execution.accelerator != "cpu" else "cpu"


def _recall(
    model: CausalLM, evaluation: Evaluation, separator: int, config: EvaluateConfig, batch_tokens: int
) -> dict[str, Any]:
    if not config.recall:
        return {}
    text = evaluation.tokens[:, :-1]
    return {"recall": evaluate_recall(model, text, separator, config.contexts, evaluation.chunk, batch_tokens)}


def _costs(model: CausalLM, prompt: Tensor, config: EvaluateConfig) -> dict[str, Any]:
    """Bytes by context: counted, so the same in every run."""
    costs = {"state_bytes": _by_context(measured_state_bytes(model, prompt, config.contexts))}
    if config.timing:
        costs["peak_memory_bytes"] = _by_context({n: peak_memory_bytes(model, prompt[:n]) for n in config.contexts})
    return costs


def _speeds(model: CausalLM, prompt: Tensor, config: EvaluateConfig) -> dict[str, Any]:
    """Tokens per second: timings, so never the same twice."""
    if not config.timing:
        return {}
    return {
        "prefill_tokens_per_second": _by_context({n: prefill_speed(model, prompt[:n]) for n in config.contexts}),
        "decode_tokens_per_second": decode_speed(model, prompt),
    }


def _write(output: Path, name: str, evaluation: Evaluation, metrics: dict[str, Any]) -> None:
    """All files, or none; `metrics.json` is taken away before the first is replaced and put back last."""
    tables = {
        "contexts.csv": evaluation.context_rows(),
        "positions.csv": evaluation.position_rows(),
        "documents.parquet": evaluation.document_rows(),
    }
    with ExitStack() as files:  # closes in reverse: the first file entered is the last to appear
        plain = {protocol: metrics[protocol]["on"] for protocol in PROTOCOLS}
        summary = plain | {"bits_per_byte": metrics["bits_per_byte"]}
        for file, content in {METRICS: metrics, SUMMARY: summary}.items():
            text = json.dumps(content, indent=2, allow_nan=False) + "\n"
            files.enter_context(atomic_path(output / file)).write_text(text, "utf-8")
        for file, rows in tables.items():
            table = pd.DataFrame([{"model": name} | row for row in rows])
            path = files.enter_context(atomic_path(output / file))
            table.to_parquet(path, index=False) if file.endswith(".parquet") else table.to_csv(path, index=False)
        (output / METRICS).unlink(missing_ok=True)


def _record(tracking: TrackingConfig, training: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Log to the run of the training, at its last step. A repeated evaluation adds nothing, a changed value does."""
    if training["run_id"] is None:
        print(f"evaluate: {training['model']} was imported: the ledger has no run of it, the metrics are in files only")
        return
    from pipelines.ledger import find_run  # MLflow takes seconds to import: a mistake should not have to wait for it

    run = find_run(tracking, training["run_id"])
    if run is None:
        ledger = masked(tracking.uri)
        print(f"evaluate: the ledger {ledger} has no run {training['run_id']}, so the metrics are in files only")
        return
    run.record([(training["steps"], logged(metrics))], correct=True)
    run.record([(training["steps"], _flat(metrics["timing"]))])


def logged(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics by their names in the ledger, timings apart: `ppl/fixed_targets/4096/zero`, `bits_per_byte/4096`."""
    named = {
        f"ppl/{protocol}/{n}{f'/{control}' if control != 'on' else ''}": perplexity
        for protocol in PROTOCOLS
        for control, by_context in metrics[protocol].items()
        for n, perplexity in by_context.items()
    }
    measures = {key: metrics[key] for key in MEASURES if key in metrics}
    return named | _flat(measures)


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """`{"a": {"b": 1}}` -> `{"a/b": 1}`."""
    flat: dict[str, float] = {}
    for key, value in nested.items():
        flat |= _flat(value, f"{prefix}{key}/") if isinstance(value, Mapping) else {f"{prefix}{key}": float(value)}
    return flat


def _summary(metrics: dict[str, Any], output: Path) -> str:
    windows, contexts = metrics["windows"], list(metrics["bits_per_byte"])
    first, last = contexts[0], contexts[-1]

    def ends(protocol: str) -> str:
        curve = metrics[protocol]["on"]
        return " -> ".join(f"{curve[n]:.2f}" for n in dict.fromkeys((first, last)))

    lengths = " -> ".join(f"{n:,}" for n in dict.fromkeys(map(int, (first, last))))
    controls = ", ".join(control for control in metrics["fixed_targets"] if control != "on")
    return (
        f"evaluate: {metrics['model']} at {lengths} tokens: perplexity {ends('fixed_targets')} on the same targets, "
        f"{ends('window_mean')} window mean; {windows['count']} windows of {windows['documents']} documents; "
        f"{f'memory also {controls}; ' if controls else ''}{metrics['timing']['seconds']:.0f} s -> {output}"
    )


def _by_context(values: dict[int, Any]) -> dict[str, Any]:
    return {str(context): value for context, value in values.items()}


@contextmanager
def _only_one(output: Path, checkpoints: Path) -> Iterator[None]:
    """Hold the lock of an output folder; `StageError` when another process has it."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:8]
    try:
        with FileLock(checkpoints / f"evaluate-{name}.lock", blocking=False):
            yield
    except Timeout:
        raise StageError(f"another process is evaluating into {output}; wait for it or end it") from None


def _progress() -> Progress:
    return Progress(
        TextColumn("evaluate: {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
