"""A MELT student beside its LoopLM teacher: what the stages `distill` and `sharing` left behind of the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from pipelines.comparisons import Change, Interval, paired_interval
from pipelines.results import ReportError, Result, read, read_json, short, teacher_of

KEYS = (
    "fingerprint",
    "teacher_weights",
    "data_digest",
    "commit",
    "strategies",
    "loop_losses",
    "documents",
    "recall_questions",
)


@dataclass(frozen=True)
class Sharing:
    """What stage `sharing` measured of a student, its teacher and the teacher with untrained cache sharing."""

    metrics: dict[str, Any]
    losses: dict[str, list[float]]  # strategy -> mean loss in nats of each held-out window

    def perplexity(self, strategy: str) -> float:
        return self.metrics["strategies"][strategy]["perplexity"]

    def change(self, strategy: str, base: str) -> Change:
        """Perplexity of one strategy against another, paired by window (all of as many targets)."""
        value = self.perplexity(strategy) / self.perplexity(base) - 1
        pairs = zip(self.losses[strategy], self.losses[base], strict=True)
        differences = [ours - theirs for ours, theirs in pairs]
        if len(differences) < 2:
            return Change(value, None)
        log = paired_interval(differences)
        return Change(value, Interval(value, math.expm1(log.low), math.expm1(log.high), log.n))

    def limits(self, change: Change) -> str:
        """`95 % over 16 windows: +1.0 % to +2.0 %`."""
        interval = change.interval
        return f"95 % over {interval.n} windows: {change.limits}" if interval else "one window, so no interval"

    @property
    def targets(self) -> int:
        """Tokens scored, over all windows."""
        return self.metrics["windows"] * (self.metrics["context"] - self.metrics["prompt"])


@dataclass(frozen=True)
class Pair:
    """A student and its teacher, both evaluated."""

    student: Result
    teacher: Result
    places: tuple[int, int]  # of student and teacher among the results: their colours
    gates: pd.DataFrame | None  # gates.csv; None when it is missing
    sharing: Sharing | None  # None when the stage did not run
    missing: str  # what to run for `sharing`, in words

    @property
    def provenance(self) -> str:
        """Where the numbers of stage `sharing` come from, in one line."""
        assert self.sharing is not None
        measured = short(self.sharing.metrics["commit"])
        return f"{self.student.provenance}; teacher: {self.teacher.provenance}; decoded at commit {measured}"


def load_pairs(results: Sequence[Result], artifacts: Path, evaluations: Path) -> list[Pair]:
    """Every student whose teacher is among the results.

    Raises:
        ReportError: when a teacher's folder holds other weights by now, or what `sharing` left is broken, of another
            student, another teacher or other data.
    """
    pairs, names = [], [result.name for result in results]
    for student in results:
        teacher = teacher_of(student, results)
        if teacher is None:
            _require_elsewhere(student, results, artifacts)
            continue
        gates, folder = artifacts / student.name / "gates.csv", evaluations / student.name / "sharing"
        command = (
            f"python -m pipelines.sharing teacher={artifacts / teacher.name} checkpoint={artifacts / student.name}"
        )
        pair = Pair(
            student,
            teacher,
            (names.index(student.name), names.index(teacher.name)),
            read(gates, pd.read_csv, ("loop", "layer", "from", "to", "share")) if gates.is_file() else None,
            read_sharing(folder) if (folder / "metrics.json").is_file() else None,
            f"`{folder / 'metrics.json'}` is missing: run `dvc repro`, or `{command} output={folder}`",
        )
        _require_same(pair, folder)
        pairs.append(pair)
    return pairs


def members(pairs: Sequence[Pair]) -> list[Result]:
    """Teachers and students, each once."""
    return list({result.name: result for pair in pairs for result in (pair.teacher, pair.student)}.values())


def read_sharing(folder: Path) -> Sharing:
    """The files of stage `sharing` in a folder; raises `ReportError` when they are broken."""
    metrics = read(folder / "metrics.json", read_json, KEYS)
    windows = read(folder / "windows.csv", pd.read_csv, ("strategy", "loss"))
    return Sharing(metrics, {str(name): rows.loss.tolist() for name, rows in windows.groupby("strategy")})


def _require_elsewhere(student: Result, results: Sequence[Result], artifacts: Path) -> None:
    """`ReportError` when the folder that was its teacher's holds another model: the two are no pair."""
    other = next((result for result in results if result.name == student.teacher), None)
    if other is not None:
        taught = short(student.training.get("teacher_weights"))
        raise ReportError(
            f"{artifacts / student.name} was distilled from weights {taught}, {artifacts / other.name} holds "
            f"{short(other.weights)}: run `dvc repro`, or `python -m pipelines.distill` again"
        )


def _require_same(pair: Pair, folder: Path) -> None:
    if pair.sharing is None:
        return
    for key in ("fingerprint", "teacher_weights", "data_digest"):
        theirs, ours = pair.sharing.metrics[key], pair.student.training[key]
        if theirs != ours:
            raise ReportError(
                f"{folder} measured a student of {key} {short(theirs)}, {pair.student.name} has {short(ours)}: "
                "run `dvc repro`, or `python -m pipelines.sharing` again"
            )
