"""An ablation as its table's data: what was measured, and everything that follows from it.

Special here: all of a table's pages are a pure function of `data.json`, which lies beside them. Regenerating a table
and checking it are the same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipelines.ablation_tables import claims_table, effects_table, measures_table, printed
from pipelines.cells import plain
from pipelines.claims import Judgement, judge_claims
from pipelines.fairness import Choice, audit
from pipelines.noise_floor import noise_floor
from pipelines.outcomes import Outcome, Outcomes
from pipelines.report import Report
from pipelines.results import short
from pipelines.sections import Section
from pipelines.sweep_file import SweepFile, sweep_from
from pipelines.sweeping.search import pareto
from pipelines.tables import MISSING, Cell, Table, table
from pipelines.verdicts import Effect, Rules, judge

UNPLANNED = (
    "No looks were stated in advance, so the first one had all of alpha: of tables without any effect, at alpha 0.05 "
    'about 6 % show a false "real" after two looks and 10 % after five.'
)
Curve = Sequence[Sequence[float]]  # [step, tokens, held-out loss] at each validation


@dataclass(frozen=True)
class Ablation:
    """Plain values, but for the outcomes."""

    name: str
    study: str
    values: dict[str, Any]  # of the sweep, for `sweep_from`
    seeds: tuple[int, ...]
    looks: tuple[int, ...]  # numbers of seeds at which verdicts were given
    outcomes: tuple[Outcome, ...]
    curves: dict[str, Curve] = field(default_factory=dict)  # "cell · seed 0" -> curve
    tuning: dict[str, dict[str, Any]] = field(default_factory=dict)  # cell -> its nuisance values
    trials: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a search: name -> choices

    @classmethod
    def load(cls, data: Mapping[str, Any]) -> Ablation:
        tuples = {key: tuple(data[key]) for key in ("seeds", "looks")}
        return cls(**{**data, **tuples, "outcomes": tuple(Outcome(**each) for each in data["outcomes"])})

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @cached_property
    def sweep(self) -> SweepFile:
        return sweep_from(self.name, self.values)

    @cached_property
    def table(self) -> Outcomes:
        return Outcomes([*(cell.name for cell in self.sweep.cells()), *self.trials], self.seeds, self.outcomes)

    @property
    def baseline(self) -> str:
        return self.sweep.baseline_name

    @property
    def rules(self) -> Rules:
        """As stated, with the looks that were taken: a table read at 3 seeds and again at 5 spends alpha twice."""
        rules = self.sweep.verdicts or Rules()
        return replace(rules, looks=self.looks) if self.unplanned else rules

    @property
    def unplanned(self) -> bool:
        """Whether seeds were added after a look, and no looks had been stated."""
        return len(self.looks) > 1 and not (self.sweep.verdicts and self.sweep.verdicts.looks)

    @property
    def measures(self) -> list[str]:
        return [self.sweep.measure(name) for name in self.sweep.measures]

    def effects(self, measure: str) -> list[Effect]:
        return judge(self.table, measure, self.baseline, self.rules)

    @cached_property
    def judgements(self) -> list[Judgement]:
        return judge_claims(self.sweep.parsed_claims(), self.sweep.table(), self.table, self.rules)

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status == "failed"]

    @property
    def scale(self) -> str:
        """What "at this scale" means."""
        values = self.table.values("parameters"), self.table.values("tokens")
        known = [array[np.isfinite(array)] for array in values]
        if not all(map(len, known)):
            return self.sweep.budget
        parameters, tokens = (float(np.median(array)) for array in known)
        return f"budget {self.sweep.budget}: {parameters / 1e6:.3g}M parameters, {tokens / 1e6:.3g}M tokens"

    def floor(self) -> str:
        """The noise floor of the judged measure, in a sentence."""
        again = next((cell.name for cell in self.sweep.cells() if cell.replicate == 1), None)
        return noise_floor(self.table, self.measures[0], self.baseline, again).text

    def effects_table(self) -> Table:
        notes = f"{UNPLANNED} {self.floor()}" if self.unplanned else self.floor()
        return effects_table(
            self.sweep.title, self.measures[0], self.effects(self.measures[0]), self.table, self.rules, notes
        )

    def measures_table(self) -> Table:
        return measures_table("Every measure", {name: self.effects(name) for name in self.measures}, self.rules)

    def claims_table(self) -> Table:
        return claims_table(self.judgements, self.rules, self.scale)

    def audit(self) -> Table:
        state = next((name for name in self.measures if name.startswith("state_bytes")), "state_bytes/none")
        choices = {cell: Choice(each["values"], tuple(each["edges"])) for cell, each in self.tuning.items()}
        return audit(self.table, self.baseline, state, choices)

    def pareto_table(self) -> Table:
        """A search's trials no other is at least as good as in every objective, and the baseline."""
        assert self.sweep.search is not None
        objectives = [self.sweep.measure(name) for name in self.sweep.search.objectives]
        values = {cell: tuple(float(self.table.row(cell, name)[0]) for name in objectives) for cell in self.table.cells}
        front = pareto({cell: each for cell, each in values.items() if np.isfinite(each).all()})
        rows = []
        for cell in sorted({self.baseline, *front}, key=lambda cell: values[cell]):
            choices = ", ".join(
                f"{path.rpartition('.')[2]}={plain(v)}" for path, v in self.trials.get(cell, {}).items()
            )
            numbers = [printed(name, value) for name, value in zip(objectives, values[cell], strict=True)]
            rows.append([Cell(cell, strong=cell in front), choices or "as in the baseline", *numbers])
        caption = (
            f"Of {len(self.trials)} trials with one seed each. In bold: nothing else found is at least as good in all "
            "of these and better in one. A search selects the lucky, too: judge what it finds as a table with seeds."
        )
        return table("Pareto front", ["trial", "choices", *objectives], rows, caption, labels=2)

    def runs_table(self) -> Table:
        """Where every number comes from, and what became of the runs that gave none."""
        rows = []
        for cell in self.table.cells:
            for outcome in self.table.of(cell):
                said = outcome.provenance
                known = short(said.get("run_id")), _commit(said), short(said.get("data_digest"))
                source = known if said else [MISSING] * len(known)
                status = f"{outcome.status}: {outcome.reason}" if outcome.reason and not said else outcome.status
                row = [cell, str(outcome.seed), Cell(status, strong=outcome.status != "done"), *source]
                rows.append(row)
        dirty = any(_commit(outcome.provenance).endswith("+") for outcome in self.outcomes)
        caption = "A commit with + had uncommitted changes." if dirty else ""
        return table("Runs", ["cell", "seed", "status", "run", "commit", "data"], rows, caption, labels=6)

    def report(self) -> Report:
        from pipelines.sweeping.drawings import drawings  # it draws an `Ablation`

        sweep, drawn = self.sweep, tuple(drawings(self))
        judged = (self.effects_table(),) if sweep.verdicts else (self.pareto_table(),) if sweep.search else ()
        sections = [
            Section("verdicts", "What came out", (*judged, self.measures_table())),
            *([Section("claims", "Claims", (self.claims_table(),))] if self.judgements else []),
            *([Section("figures", "Figures", drawn)] if drawn else []),
            Section("fairness", "Was it fair?", (self.audit(),)),
            Section("runs", "Where the numbers come from", (self.runs_table(),)),
        ]
        done = sum(outcome.status == "done" for outcome in self.outcomes)
        lead = [
            f"{sweep.source}. {len(self.table.cells)} cells, {len(self.seeds)} seeds, {self.scale}; "
            f"{done} of {len(self.outcomes)} runs done.",
            f"Launched as {self.study}.",
        ]
        return Report(sweep.title, lead, sections)


def _commit(provenance: Mapping[str, str]) -> str:
    """`d6e3906a`, and `d6e3906a+` when code or parameters differed from it."""
    return short(provenance.get("commit")) + "+" * (provenance.get("dirty", "").lower() == "true")
