"""What the stages leave behind, made up: the folders a report is written from."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

CONTEXTS = (512, 1024, 2048, 4096)
DOCUMENTS = 6
PROTOCOLS = ("window_mean", "fixed_targets")
MODELS: dict[str, dict[str, Any]] = {  # name -> family, config, perplexity at the shortest and the longest context
    "transformer_pp_tiny": {"family": "transformer", "config": {}, "ends": (60.7, 73.3)},
    "transformer_pp_tiny_chunk": {"family": "transformer", "config": {"chunk": 64}, "ends": (50.4, 50.4)},
    "transformer_pp_tiny_window": {"family": "transformer", "config": {"window": 64}, "ends": (49.8, 49.7)},
    "mela_tiny": {"family": "mela", "config": {}, "ends": (52.4, 52.3)},
}
LOOPED: dict[str, dict[str, Any]] = {  # a teacher and its student
    "looplm_tiny": {"family": "looplm", "config": {"loops": 4}, "ends": (55.0, 62.0)},
    "melt_tiny": {"family": "melt", "config": {"loops": 4}, "ends": (56.1, 63.5)},
}
EVERY = MODELS | LOOPED
STRATEGIES = {  # strategy -> perplexity, cache bytes
    "teacher": (55.0, 4_194_304),
    "student": (56.1, 1_048_576),
    "first_loop": (410.0, 1_048_576),
    "last_loop": (71.5, 1_048_576),
    "first_loop_prompt_kept": (350.0, 2_621_440),
    "last_loop_prompt_kept": (66.0, 2_621_440),
}
WINDOWS = 8
CONTROLS = {"on": 1.0, "zero": 1.012, "reset": 1.004, "shuffle": 1.02}  # control -> factor on the perplexity


def write_model(root: Path, name: str, seed: int = 0, data: str = "d" * 64, **training: Any) -> None:
    """`artifacts/<name>` and `evaluations/<name>` under `root`; `training` replaces fields of its metrics."""
    model = EVERY[name]
    metrics = {
        "model": name,
        "family": model["family"],
        "seed": seed,
        "fingerprint": f"{name:f<64}",
        "run_id": f"{name:r<32}",
        "commit": "c" * 40,
        "dirty": False,
        "data_digest": data,
        "code_digest": "e" * 64,
        "parameters": 1_050_000 + 1_000 * len(name),
        "steps": 128,
        "tokens": 1_048_576,
        "train_loss": 4.1,
        "validation_loss": 4.2,
        "tokens_per_second": 5000.0,
        "training_flops_per_token": 6.5e6,
        "seconds": 200.0,
    } | training
    _json(root / "artifacts" / name / "metrics.json", metrics)
    description = {"family": model["family"], "sha256": weights(name), "config": model["config"]}
    _json(root / "artifacts" / name / "config.json", description)
    _loss(model["ends"][0]).to_csv(root / "artifacts" / name / "loss.csv", index=False)
    write_evaluation(root / "evaluations" / name, name, metrics)


def weights(name: str) -> str:
    """The digest of a model's weights."""
    return f"{name:w<64}"


def write_pair(root: Path, **training: Any) -> None:
    """The teacher, the student with its gates, and what `sharing` measured; `training` is the student's own."""
    write_model(root, "looplm_tiny", parameters=560_000, peak_memory_bytes=2**27)
    own = {"teacher": "artifacts/looplm_tiny", "teacher_weights": weights("looplm_tiny"), "tokens": 524_288}
    write_model(root, "melt_tiny", **own | {"seconds": 90.0, "peak_memory_bytes": 2**28} | training)
    centres = np.arange(20) / 20 + 0.025
    rows = [
        (loop, layer, i / 20, (i + 1) / 20, share)
        for loop in (2, 3, 4)
        for layer in (1, 2)
        for i, share in enumerate(_normal(centres, 0.2 * layer))
    ]
    gates = pd.DataFrame(rows, columns=pd.Index(["loop", "layer", "from", "to", "share"]))
    gates.to_csv(root / "artifacts" / "melt_tiny" / "gates.csv", index=False)
    write_sharing(root / "evaluations" / "melt_tiny" / "sharing")


def write_sharing(folder: Path, **changes: Any) -> None:
    """What stage `sharing` writes; `changes` replace fields of its metrics."""
    noise = 0.01 * np.cos(3 * np.arange(WINDOWS))
    noise -= noise.mean()
    rows = [
        (name, window, 0, math.log(perplexity) + window / 10 - 0.35 + i * noise[window])
        for i, (name, (perplexity, _)) in enumerate(STRATEGIES.items())
        for window in range(WINDOWS)
    ]
    metrics = {
        "model": "melt_tiny",
        "fingerprint": f"{'melt_tiny':f<64}",
        "data_digest": "d" * 64,
        "commit": "b" * 40,
        "teacher": "artifacts/looplm_tiny",
        "teacher_weights": weights("looplm_tiny"),
        "loops": 4,
        "context": 512,
        "prompt": 256,
        "windows": WINDOWS,
        "documents": WINDOWS,
        "recall_chance": 1 / 32,
        "recall_questions": 512,
        "strategies": {
            name: {"perplexity": p, "to_teacher": p / 55, "cache_bytes": kept, "mqar": 1 / 32}
            for name, (p, kept) in STRATEGIES.items()
        },
        "loop_losses": {
            "teacher": {"1": 4.61, "2": 4.25, "3": 4.1, "4": math.log(55.0)},
            "student": {"1": 4.63, "2": 4.28, "3": 4.13, "4": math.log(56.1)},
        },
    } | changes
    _json(folder / "metrics.json", metrics)
    table = pd.DataFrame(rows, columns=pd.Index(["strategy", "document", "start", "loss"]))
    table.to_csv(folder / "windows.csv", index=False)


def _normal(x: np.ndarray, mean: float) -> list[float]:
    """A histogram around a mean."""
    shares = np.exp(-(((x - mean) / 0.1) ** 2))
    return (shares / shares.sum()).tolist()


def write_evaluation(folder: Path, name: str, training: dict[str, Any]) -> None:
    """What `evaluate` writes for a model whose `metrics.json` is `training`."""
    first, last = EVERY[name]["ends"]
    controls = CONTROLS if name == "mela_tiny" else {"on": 1.0}
    curve = np.geomspace(first, last, len(CONTEXTS))
    perplexity = {
        control: {str(n): factor * p for n, p in zip(CONTEXTS, curve, strict=True)}
        for control, factor in controls.items()
    }
    metrics = {
        **{key: training[key] for key in ("model", "seed", "fingerprint", "run_id", "data_digest", "commit")},
        "training_context": 512,
        "window_mean": {
            control: {n: 1.1 * p for n, p in by_n.items() if control == "on" or n == "4096"}
            for control, by_n in perplexity.items()
        },
        "fixed_targets": perplexity,
        "bits_per_byte": {n: math.log2(p) / 4 for n, p in perplexity["on"].items()},
        "windows": {"count": 8, "documents": DOCUMENTS, "tokens": 8 * 4096, "score_tokens": 8 * 256},
        "recall": recall_results(1.0 if name == "mela_tiny" else 0.0),
        "state_bytes": {str(n): {"looplm": 8192, "melt": 2048}.get(EVERY[name]["family"], 6144) * n for n in CONTEXTS},
        "peak_memory_bytes": {str(n): 2**23 + 8192 * n for n in CONTEXTS},
        "timing": {
            "prefill_tokens_per_second": {str(n): 9000.0 - n for n in CONTEXTS},
            "decode_tokens_per_second": 310.0,
            "seconds": 60.0,
        },
    }
    _json(folder / "metrics.json", metrics)
    _documents(perplexity).to_parquet(folder / "documents.parquet", index=False)
    _positions(name, perplexity["on"]["4096"]).to_csv(folder / "positions.csv", index=False)


def recall_results(skill: float) -> dict[str, Any]:
    """At chance for `skill` 0; only facts one chunk back are learnt, when it is 1."""
    chance, depths = 1 / 32, ("0.00", "0.50", "1.00")
    return {
        "chance": chance,
        "mqar": {str(n): chance for n in CONTEXTS},
        "needle": {str(n): dict.fromkeys(depths, chance) for n in CONTEXTS},
        "facts": {"1": chance + skill * (1 - chance), "2": chance},
        "questions": {
            "mqar": {str(n): 256 for n in CONTEXTS},
            "needle": {str(n): 64 for n in CONTEXTS},
            "facts": {"1": 448, "2": 384},
        },
    }


def _documents(perplexity: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Losses that differ between documents, and whose mean over documents is the perplexity."""
    spread = np.linspace(-0.3, 0.3, DOCUMENTS)
    rows = [
        (d, int(n), protocol, control, 256, 256 * (math.log(p) + (spread if control == "on" else spread**3)[d]))
        for protocol in PROTOCOLS
        for control, by_n in perplexity.items()
        for n, p in by_n.items()
        for d in range(DOCUMENTS)
    ]
    return pd.DataFrame(rows, columns=pd.Index(["document", "context", "protocol", "control", "tokens", "loss_sum"]))


def _positions(name: str, last: float) -> pd.DataFrame:
    edges = [0, *(2**k for k in range(13))]
    rows = [("position", a, b, last * (1 + 2 / b)) for a, b in itertools.pairwise(edges)]
    if name != "transformer_pp_tiny":
        rows += [("stream", a, b, last * (1 + 2 / b)) for a, b in zip(edges, [*edges[1:], 2**13], strict=False)]
    if "chunk" in name or name == "mela_tiny":
        rows += [("chunk", a, a + 4, last * (1.3 - a / 200)) for a in range(0, 64, 4)]
    table = pd.DataFrame(rows, columns=pd.Index(["kind", "start", "end", "perplexity"]))
    return table.assign(model=name, control="on", context=4096, tokens=256)


def _loss(perplexity: float) -> pd.DataFrame:
    steps = np.arange(4, 129, 4)
    loss = math.log(perplexity) + 3 * np.exp(-steps / 20)
    table = pd.DataFrame({"step": steps, "tokens": steps * 8192, "train_loss": loss, "validation_loss": loss + 0.1})
    table.loc[table.step % 64 != 0, "validation_loss"] = np.nan
    return table


def _json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")
