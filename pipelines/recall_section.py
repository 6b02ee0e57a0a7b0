"""Synthetic recall in the report: does a model answer what the text told it, and is that more than luck?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.stats import binomtest

from pipelines.results import Result
from pipelines.sections import Section, labels, source
from pipelines.tables import Cell, table

LUCK = 0.05  # chance that any accuracy of the table stands out by luck (Bonferroni)


@dataclass(frozen=True)
class Answers:
    """Share of right answers under one condition of one task."""

    task: str
    condition: str
    accuracy: float
    questions: int

    def beats(self, chance: float, level: float) -> bool:
        """Whether so many right answers among independent guesses are less likely than `level`."""
        right = round(self.accuracy * self.questions)
        return bool(binomtest(right, self.questions, chance, alternative="greater").pvalue < level)


def recall(results: Sequence[Result]) -> Section:
    """A table of accuracies, those above chance in bold."""
    asked = [result for result in results if result.evaluation.get("recall")]
    if not asked:
        return Section("recall", "Recall", ("Not measured: `evaluate.recall` was off.",))
    columns = [answers(result) for result in asked]
    conditions = list(dict.fromkeys((a.task, a.condition, a.questions) for column in columns for a in column))
    chance, level = asked[0].evaluation["recall"]["chance"], LUCK / sum(map(len, columns))
    rows, winners = [], set()
    for condition in conditions:
        cells = []
        for result, column in zip(asked, columns, strict=True):
            found = next((a for a in column if (a.task, a.condition, a.questions) == condition), None)
            above = found is not None and found.beats(chance, level)
            winners |= {result.label} if above else set()
            cells.append(Cell("–" if found is None else f"{found.accuracy:.1%}", result.provenance, above))
        rows.append([condition[0], condition[1], f"{condition[2]:,}", f"{chance:.1%}", *cells])
    sentence = (
        f"Above chance somewhere: {', '.join(r.label for r in asked if r.label in winners)}."
        if winners
        else "No model is shown to recall above chance, as is to be expected of models trained on ordinary text alone."
    )
    caption = (
        "Share of right answers about facts written into held-out text. MQAR: key-value pairs, all asked. "
        "Needle: facts at several depths, asked at the end. Facts: told in one text chunk, asked chunks later. "
        f"Bold: more above chance than luck explains (binomial, {LUCK:.0%} over the table). {source(asked)}"
    )
    heads = ("task", "condition", "questions", "chance", *labels(asked))
    return Section("recall", "Recall", (sentence, table("Accuracy of recall", heads, rows, caption, labels=2)))


def answers(result: Result) -> list[Answers]:
    """MQAR and needles by context, the longest context's needles by depth, facts by distance."""
    measured = result.evaluation["recall"]
    questions = measured["questions"]
    found = [Answers("MQAR", f"{int(n):,} tokens", a, questions["mqar"][n]) for n, a in measured["mqar"].items()]
    for n, depths in measured["needle"].items():
        mean, each = sum(depths.values()) / len(depths), questions["needle"][n]
        found.append(Answers("needle", f"{int(n):,} tokens", mean, each * len(depths)))
    if measured["needle"]:
        n, depths = max(measured["needle"].items(), key=lambda item: int(item[0]))
        each = questions["needle"][n]
        found += [Answers("needle", f"{int(n):,} tokens, depth {float(d):.0%}", a, each) for d, a in depths.items()]
    for apart, accuracy in measured["facts"].items():
        condition = f"{apart} chunk{'s' * (apart != '1')} later"
        found.append(Answers("facts", condition, accuracy, questions["facts"][apart]))
    return found
