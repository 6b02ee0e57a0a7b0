"""Is every number of every table still what the ledger says, and made by the code that is here?

python -m pipelines.report --check
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from models.configuration import require
from pipelines.config import TrackingConfig
from pipelines.outcomes import Outcome
from pipelines.results import short
from pipelines.sweeping import pages
from pipelines.sweeping.ablation import Ablation
from pipelines.sweeping.ledger import entry_of
from pipelines.sweeping.plan import code_of


def check(folder: Path, tracking: TrackingConfig) -> list[str]:
    """What is wrong with the table in `folder`, one line each, the cell named; empty when all is well."""
    ablation = pages.read(folder)
    return [f"{folder}: {problem}" for problem in (*_files(ablation, folder), *_runs(ablation, tracking))]


def main(ablations: Path) -> int:
    """Check every table; returns the exit code."""
    from pipelines.command import guarded, load

    problems: list[str] = []

    def check_all() -> None:
        tracking = load().tracking
        folders = sorted(file.parent for file in ablations.glob(f"*/{pages.DATA}"))
        require(bool(folders), f"no ablation table in {ablations}: run python -m pipelines.sweep +sweep=<name> first")
        for folder in folders:
            found = check(folder, tracking)
            print("\n".join(found) if found else f"{folder}: every number is what the ledger says")
            problems.extend(found)

    return guarded(check_all) or int(bool(problems))


def _files(ablation: Ablation, folder: Path) -> Iterator[str]:
    for name, text in pages.texts(ablation).items():
        file = folder / name
        if not file.is_file() or file.read_text("utf-8") != text:
            yield f"{name} is not what {pages.DATA} gives: run the sweep again"


def _runs(ablation: Ablation, tracking: TrackingConfig) -> Iterator[str]:
    done: list[Outcome] = []
    for cell in ablation.table.cells:
        for outcome in ablation.table.of(cell):
            if outcome.status == "done":
                done.append(outcome)
            elif outcome.status == "pruned":  # as the sweep asks for
                continue
            elif outcome.status != "missing" or (outcome.seed < ablation.sweep.seeds and cell not in ablation.trials):
                yield f"{_name(outcome)}: {outcome.status}{f' ({outcome.reason})' if outcome.reason else ''}"
    for outcome in done:
        yield from _numbers(outcome, tracking)
        family, code = outcome.provenance["family"], outcome.provenance["code"]
        if code != code_of(ablation.sweep.stage, family):
            yield f"{_name(outcome)}: stale, the code of {family} changed since it was run"
    yield from _mixed(done)


def _mixed(done: Iterable[Outcome]) -> Iterator[str]:
    """Numbers that do not belong in one table. Two commits are mixed when a family's code differs between them."""
    by_data: dict[str, Outcome] = {}
    by_code: dict[str, dict[str, Outcome]] = {}
    for outcome in done:
        source = outcome.provenance
        by_data.setdefault(source["data_digest"], outcome)
        by_code.setdefault(source["family"], {}).setdefault(source["code"], outcome)
    for what, field, groups in (
        ("data", "data_digest", [by_data]),
        ("commits, between which the code differs", "commit", by_code.values()),
    ):
        for group in groups:
            if len(group) > 1:
                named = "; ".join(f"{_name(each)} {short(each.provenance[field])}" for each in group.values())
                yield f"mixed {what}: {named}"


def _numbers(outcome: Outcome, tracking: TrackingConfig) -> Iterator[str]:
    run_id = outcome.provenance["run_id"]
    entry = entry_of(tracking, run_id)
    if entry is None:
        yield f"{_name(outcome)}: the ledger has no run {short(run_id)}"
        return
    for name, value in outcome.values.items():
        known = entry.data.metrics.get(name)
        if known != value:
            yield f"{_name(outcome)}: {name} is {value} here and {known} in run {short(run_id)} of the ledger"


def _name(outcome: Outcome) -> str:
    return f"{outcome.cell} · seed {outcome.seed}"
