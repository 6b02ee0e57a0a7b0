"""What the stages left behind, read and checked: one `Result` per evaluated model.

Numbers enter a report only from here, so that each can be traced to a run, a commit and the data it saw.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

Protocol = Literal["fixed_targets", "window_mean"]
FAMILIES = {"transformer": "Transformer++", "mela": "Mela", "looplm": "LoopLM", "melt": "MELT"}
NAMES = {"transformer_pp": "Transformer++", **FAMILIES, "ouro": "Ouro"}  # how presets begin
LOOPED = ("looplm", "melt")
BASELINE = "transformer"  # the family others are compared with, as long as its attention is full
BUCKET = 128  # scored tokens below which a perplexity by position is noise


class ReportError(ValueError):
    """Results that cannot be reported: says which file, and what to run."""


@dataclass(frozen=True)
class Result:
    """One trained and evaluated model."""

    name: str  # folder name, equal under `artifacts/` and `evaluations/`
    config: dict[str, Any]  # the fields of its model config
    weights: str  # SHA-256 of its weights
    training: dict[str, Any]  # metrics.json of pretrain
    evaluation: dict[str, Any]  # metrics.json of evaluate
    loss: pd.DataFrame  # loss.csv
    positions: pd.DataFrame  # positions.csv
    documents: pd.DataFrame  # documents.parquet

    @property
    def label(self) -> str:
        """The name as a person writes it: `transformer_pp_tiny_chunk` -> `Transformer++ tiny chunk`."""
        for prefix, family in NAMES.items():
            if self.name.startswith(prefix):
                return f"{family}{self.name.removeprefix(prefix)}".replace("_", " ")
        return self.name.replace("_", " ")

    @property
    def family(self) -> str:
        """Its family as a person writes it."""
        return FAMILIES[self.training["family"]]

    @property
    def local(self) -> bool:
        """Whether it is a Transformer++ that sees only a window or a chunk: flat beyond it without any memory."""
        return self.training["family"] == BASELINE and bool(self.config.get("window") or self.config.get("chunk"))

    @property
    def full(self) -> bool:
        """Whether it is the Transformer++ with full attention."""
        return self.training["family"] == BASELINE and not self.local

    @property
    def looped(self) -> bool:
        """Whether it applies its layers several times: fewer parameters for the same compute."""
        return self.training["family"] in LOOPED

    @property
    def teacher(self) -> str | None:
        """The name of the model it was distilled from; None for a model trained from scratch."""
        folder = self.training.get("teacher")
        return Path(folder).name if folder else None

    @cached_property
    def contexts(self) -> list[int]:
        """The context lengths it was evaluated at, in tokens, increasing."""
        return sorted(self.perplexity("fixed_targets"))

    @property
    def controls(self) -> list[str]:
        """Its evaluation-time controls; `on` is normal operation."""
        return list(self.evaluation["fixed_targets"])

    def perplexity(self, protocol: Protocol, control: str = "on") -> dict[int, float]:
        """Context length in tokens -> perplexity."""
        return by_context(self.evaluation[protocol][control])

    def measure(self, name: str) -> dict[int, float]:
        """Context length in tokens -> another measure by context, such as `bits_per_byte`; empty if not measured."""
        return by_context(self.evaluation.get(name) or self.evaluation["timing"].get(name) or {})

    @property
    def training_context(self) -> int:
        """Tokens per sequence it was trained on."""
        return self.evaluation["training_context"]

    def document_losses(self, protocol: Protocol, control: str, context: int) -> pd.DataFrame:
        """Mean `loss` in nats and number of `tokens` of every held-out document."""
        table = self.documents
        rows = table[(table.protocol == protocol) & (table.control == control) & (table.context == context)]
        return pd.DataFrame(
            {"loss": (rows.loss_sum / rows.tokens).values, "tokens": rows.tokens.values}, index=rows.document.values
        )

    def position_curve(self, kind: str, control: str = "on") -> dict[int, float]:
        """Perplexity by tokens read so far: the last position of each bucket of enough tokens, counted from 1.

        `kind` is `position` (in a piece of the longest context), `chunk` (in a text chunk; empty for a model without
        chunks) or `stream` (in one long document).
        """
        table = self.positions
        rows = table[(table.kind == kind) & (table.control == control) & (table.tokens >= BUCKET)]
        return dict(zip(rows.end.tolist(), rows.perplexity.tolist(), strict=True))

    @property
    def provenance(self) -> str:
        """Where its numbers come from, in one line."""
        training, evaluation = self.training, self.evaluation
        trained, evaluated = short(training["commit"]), short(evaluation["commit"])
        commit = trained if trained == evaluated else f"{trained} (evaluated at {evaluated})"
        dirty = " with uncommitted changes" if training["dirty"] else ""
        return (
            f"run {short(training['run_id'])}, seed {training['seed']}, commit {commit}{dirty}, "
            f"data {short(training['data_digest'])}, code {short(training['code_digest'])}"
        )


def by_context(values: dict[str, float]) -> dict[int, float]:
    """JSON's string keys as context lengths."""
    return {int(context): value for context, value in values.items()}


def short(digest: str | None) -> str:
    """The first eight characters of a digest, a commit or a run id."""
    return digest[:8] if digest else "none"


def teacher_of(student: Result, results: Sequence[Result]) -> Result | None:
    """The model whose weights it was distilled from, if that is among the results: by its name if two have them."""
    same = [result for result in results if result.weights == student.training.get("teacher_weights")]
    return next((result for result in same if result.name == student.teacher), same[0] if same else None)


def tokens_before(student: Result, results: Sequence[Result]) -> int:
    """Tokens its teacher was trained on; 0 for a model without one among the results."""
    teacher = teacher_of(student, results)
    return teacher.training["tokens"] if teacher else 0


def pretrained(results: Sequence[Result]) -> list[Result]:
    """Those that were trained from scratch."""
    return [result for result in results if result.teacher is None]


def load_results(artifacts: Path, evaluations: Path) -> list[Result]:
    """Every evaluation with the training it belongs to, Transformer++ first (full, then local), then by name.

    Those of imported models are left out, see `imported`.

    Raises:
        ReportError: when there is no evaluation, a file is missing or broken, an evaluation belongs to other weights,
            or two evaluations saw different data.
    """
    without = imported(artifacts, evaluations)
    names = sorted(path.parent.name for path in evaluations.glob("*/metrics.json") if path.parent not in without)
    if not names:
        raise ReportError(
            f"no evaluation in {evaluations}/: run `dvc repro`, or `python -m pipelines.evaluate` per model"
        )
    results = [_load(name, artifacts / name, evaluations / name) for name in names]
    _same_data(results)
    return sorted(results, key=lambda result: (not result.full, not result.local, result.name))


def comparable(results: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """Those evaluated on the windows and contexts that most were, and the others: no table can hold both."""
    windows = [json.dumps([result.evaluation["windows"], result.contexts], sort_keys=True) for result in results]
    usual = max(windows, key=windows.count)
    groups: tuple[list[Result], list[Result]] = ([], [])
    for result, each in zip(results, windows, strict=True):
        groups[each != usual].append(result)
    return groups


def imported(artifacts: Path, evaluations: Path) -> list[Path]:
    """Evaluations of models that no run here trained: without tokens, seed and losses nothing compares them."""
    found = sorted(path.parent for path in evaluations.glob("*/metrics.json"))
    known = [path for path in found if (artifacts / path.name / "metrics.json").is_file()]
    return [path for path in known if _training(artifacts / path.name)["run_id"] is None]


def unevaluated(artifacts: Path, evaluations: Path) -> list[Path]:
    """Trained models no evaluation speaks of: a report leaves them out."""
    trained = sorted(path.parent for path in artifacts.glob("*/metrics.json"))
    return [path for path in trained if not (evaluations / path.name / "metrics.json").is_file()]


def _load(name: str, artifact: Path, evaluation: Path) -> Result:
    model = read(artifact / "config.json", read_json, ("config", "sha256"))
    result = Result(
        name=name,
        config=model["config"],
        weights=model["sha256"],
        training=_training(artifact),
        evaluation=read(evaluation / "metrics.json", read_json, ("fingerprint", "fixed_targets", "window_mean")),
        loss=read(artifact / "loss.csv", pd.read_csv, ("step", "tokens")),
        positions=read(evaluation / "positions.csv", pd.read_csv, ("control", "kind", "end", "perplexity")),
        documents=read(
            evaluation / "documents.parquet",
            pd.read_parquet,
            ("document", "protocol", "control", "context", "loss_sum"),
        ),
    )
    trained, evaluated = result.training["fingerprint"], result.evaluation["fingerprint"]
    if trained != evaluated:
        raise ReportError(
            f"{evaluation} evaluates cell {short(evaluated)}, {artifact} holds {short(trained)}: "
            f"run `python -m pipelines.evaluate checkpoint={artifact}` again"
        )
    return result


def _training(artifact: Path) -> dict[str, Any]:
    keys = ("family", "seed", "run_id", "commit", "dirty", "data_digest")
    return read(artifact / "metrics.json", read_json, keys)


def read(path: Path, reader: Callable[[Path], Any], keys: tuple[str, ...]) -> Any:
    """The content of a file; `keys` must be in it."""
    try:
        content = reader(path)
    except FileNotFoundError:
        raise ReportError(f"{path} is missing: run the stage that writes it again") from None
    except (ValueError, OSError) as error:
        raise ReportError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    missing = [key for key in keys if key not in content]
    if missing:
        raise ReportError(f"{path} lacks {', '.join(missing)}: run the stage that writes it again")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    return json.loads(path.read_text(encoding="utf-8"))


def _same_data(results: list[Result]) -> None:
    digests = {result.name: short(result.evaluation["data_digest"]) for result in results}
    if len(set(digests.values())) > 1:
        which = ", ".join(f"{name} on {digest}" for name, digest in digests.items())
        raise ReportError(
            f"evaluations of different data are not comparable: {which}; evaluate them on one corpus, "
            "or keep the others elsewhere (evaluate with output=runs/...)"
        )
