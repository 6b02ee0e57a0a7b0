"""Stage `sharing`: teacher, student and untrained cache sharing, decoded token by token on the same held-out text.

    python -m pipelines.sharing teacher=artifacts/looplm_tiny checkpoint=artifacts/melt_tiny

The counterpart of the MELT paper's table 5, in perplexity and recall. Every strategy reads a prompt at once and then
the rest of the window one token at a time, as it would when generating. The targets are those of `fixed_targets` at
the shortest context of `evaluate`; recall is MQAR, its facts being the prompt. Teacher and student are also scored
after every loop. Writes, in `output`, `windows.csv` (the loss of every window under every strategy), `summary.json`
(what `dvc metrics show` lists) and, last, `metrics.json`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from models.configuration import require
from models.looped.distillation import require_pair
from models.looped.looplm import LoopLM
from models.looped.melt import Melt
from models.looped.sharing import decode_with_shared_cache
from models.serialization import WEIGHTS
from pipelines.config import PipelineConfig
from pipelines.data import TokenData
from pipelines.evaluation import HeldOut
from pipelines.files import sha256_file, write_json, write_text
from pipelines.identity import commit
from pipelines.model_folder import load_as, require_tokenizer
from pipelines.protocol import summarise
from pipelines.recall import Recall, mqar
from pipelines.recall_evaluation import VALUES, task_symbols, without

METRICS, SUMMARY, WINDOWS = "metrics.json", "summary.json", "windows.csv"
PAIRS = 8  # facts of the recall task
ROWS = 64  # of the recall task

Decode = Callable[[Tensor, int], Tensor]  # tokens [B, T], prompt P -> logits [B, T - P, V] of the tokens from P on


def run(config: PipelineConfig) -> dict[str, Any]:
    """Score every strategy on held-out text; returns what `metrics.json` holds.

    Raises:
        ConfigError: when there is no such teacher or student, it was distilled from another, they do not match, or no
            document is long enough.
        StageError: when their files were altered.
    """
    torch.set_num_threads(1)  # a token at a time is too little for two, which would wait for each other
    teacher, student = load_as(LoopLM, "teacher", config.teacher), load_as(Melt, "checkpoint", config.checkpoint)
    training = _training(Path(str(config.checkpoint)))
    _require_teacher(config, training)
    require_pair(student.config, teacher.config, same_loops=False)
    data, evaluate = TokenData.open(config.data.directory), config.evaluate
    data.require_vocab(teacher.config.vocab_size)
    for field in ("teacher", "checkpoint"):
        require_tokenizer(field, getattr(config, field), data)
    context, scored = evaluate.contexts[0], evaluate.score_tokens
    require(scored < context, f"evaluate.score_tokens={scored} must leave a prompt in evaluate.contexts[0]={context}")
    text = HeldOut(data.documents("held_out"), data.token_bytes)
    windows = text.choose(evaluate.contexts[-1], evaluate.windows)
    tokens = torch.stack([text.tokens(window, evaluate.contexts[-1])[-(context + 1) :] for window in windows])
    task = _recall_task(tokens, data.vocab_size, data.separator)
    results, by_window = {}, {}
    for name, decode in strategies(teacher, student).items():
        nats = losses(decode, tokens, context - scored)
        by_window[name] = nats.double().mean(1).tolist()
        results[name] = {
            "perplexity": summarise(nats).perplexity,
            "mqar": accuracy(decode, task),
            "cache_bytes": cache_bytes(name, teacher, student, context, context - scored),
        }
        print(f"sharing: {name}: perplexity {results[name]['perplexity']:.2f}", flush=True)
    for result in results.values():
        result["to_teacher"] = result["perplexity"] / results["teacher"]["perplexity"]
    metrics = {
        **{key: training[key] for key in ("model", "seed", "fingerprint", "run_id", "teacher_weights")},
        "teacher": config.teacher,
        "commit": commit().sha,
        "data_digest": data.digest,
        "loops": teacher.config.loops,
        "context": context,
        "prompt": context - scored,
        "windows": len(windows),
        "documents": len({window.document for window in windows}),
        "recall_chance": 1 / VALUES,
        "recall_questions": ROWS * PAIRS,
        "strategies": results,
        "loop_losses": {
            name: {str(loop): loss for loop, loss in enumerate(loop_losses(model, tokens, context - scored), start=1)}
            for name, model in (("teacher", teacher), ("student", student))
        },
    }
    output = Path(config.output or f"evaluations/{Path(str(config.checkpoint)).name}/sharing")
    (output / METRICS).unlink(missing_ok=True)
    rows = [
        f"{name},{window.document},{window.start},{loss!r}"
        for name, each in by_window.items()
        for window, loss in zip(windows, each, strict=True)
    ]
    write_text(output / WINDOWS, "\n".join(["strategy,document,start,loss", *rows, ""]))
    write_json(output / SUMMARY, {"decoded": {name: result["perplexity"] for name, result in results.items()}})
    write_json(output / METRICS, metrics)
    print(f"sharing: {len(results)} strategies on {len(windows)} windows -> {output}")
    return metrics


def strategies(teacher: LoopLM, student: Melt) -> dict[str, Decode]:
    """How the tokens after a prompt may be decoded, by name."""
    shared: dict[str, Decode] = {
        f"{loop}_loop{'_prompt_kept' if keep else ''}": partial(_shared, teacher, loop, keep)
        for keep in (False, True)
        for loop in ("first", "last")
    }
    return {"teacher": partial(_exact, teacher), "student": partial(_one_by_one, student), **shared}


def losses(decode: Decode, tokens: Tensor, prompt: int) -> Tensor:
    """Next-token losses in nats, `[B, n - prompt]`, of the tokens `[B, n + 1]` after a prompt."""
    logits, targets = decode(tokens[:, :-1], prompt), tokens[:, prompt + 1 :]
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none").view_as(targets)


@torch.no_grad()
def loop_losses(model: LoopLM | Melt, tokens: Tensor, prompt: int) -> list[float]:
    """Mean next-token loss in nats after each loop, of the tokens `[B, n + 1]` after a prompt; no token leaves early.

    The last is that of the teacher's or the student's strategy, as long as no exit threshold is set.
    """
    targets = tokens[:, prompt + 1 :].flatten()
    states = _loop_states(model, tokens[:, :-1], prompt)
    return [float(functional.cross_entropy(model.head(state).flatten(0, 1).float(), targets)) for state in states]


def accuracy(decode: Decode, task: Recall) -> float:
    """Share of right answers, the facts `[B, 2 * PAIRS]` being the prompt."""
    logits = decode(task.tokens, 2 * PAIRS)
    return task.accuracy(functional.pad(logits, (0, 0, 2 * PAIRS, 0)))


def cache_bytes(name: str, teacher: LoopLM, student: Melt, context: int, prompt: int) -> int:
    """What a strategy has to keep of one sequence after `context` tokens."""
    whole, kept = (teacher.cost(tokens).state_bytes for tokens in (context, prompt))
    if name == "teacher":
        return whole
    if name == "student":
        return student.cost(context).state_bytes
    loops = teacher.config.loops
    return kept + (whole - kept) // loops if name.endswith("prompt_kept") else whole // loops


@torch.no_grad()
def _exact(model: LoopLM, tokens: Tensor, prompt: int) -> Tensor:
    """All at once, which for a cache per loop is the same."""
    return model(tokens)[:, prompt:]


@torch.no_grad()
def _one_by_one(model: Melt, tokens: Tensor, prompt: int) -> Tensor:
    _, state = model.extend(tokens[:, :prompt], model.init_state(len(tokens)))
    return torch.cat([model.extend(token, state)[0] for token in tokens[:, prompt:].split(1, dim=1)], dim=1)


def _loop_states(model: LoopLM | Melt, tokens: Tensor, prompt: int) -> list[Tensor]:
    """The states of the tokens after the prompt by loop, each `[B, T - prompt, D]`; MELT's one token at a time."""
    if isinstance(model, LoopLM):
        return [state[:, prompt:] for state in model.loop_states(tokens)]
    rows = model.init_state(len(tokens)).rows
    for chunk in model.chunks(tokens[:, :prompt]):
        model.run_chunk(chunk, rows)
    states = [model.run_chunk(token, rows) for token in tokens[:, prompt:].split(1, dim=1)]
    return [torch.cat(loop, dim=1) for loop in zip(*states, strict=True)]


def _shared(model: LoopLM, loop: Any, keep: bool, tokens: Tensor, prompt: int) -> Tensor:
    return decode_with_shared_cache(model, tokens, prompt, loop, keep)


def _recall_task(tokens: Tensor, vocab_size: int, separator: int) -> Recall:
    """MQAR written into held-out text."""
    symbols = task_symbols(vocab_size, separator)
    background = without(tokens[torch.arange(ROWS) % len(tokens), : 8 * PAIRS], symbols)
    return mqar(symbols, background, PAIRS, torch.Generator().manual_seed(0))


def _training(checkpoint: Path) -> dict[str, Any]:
    """What `distill` says of the student in its `metrics.json`."""
    file = checkpoint / METRICS
    training = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    require(
        "teacher_weights" in training,
        f"checkpoint={checkpoint} was not distilled: its {METRICS} names no teacher_weights; run pipelines.distill",
    )
    return training


def _require_teacher(config: PipelineConfig, training: dict[str, Any]) -> None:
    """`ConfigError` unless `teacher` holds the weights the student was distilled from."""
    found, expected = sha256_file(Path(config.teacher) / WEIGHTS), training["teacher_weights"]
    require(
        found == expected,
        f"teacher={config.teacher} is not the teacher of checkpoint={config.checkpoint}: its weights are {found[:8]}, "
        f"the student was distilled from {expected[:8]} (then in {training['teacher']})",
    )


if __name__ == "__main__":
    from pipelines.command import main

    main(run)
