"""MELT in the report, costs: memory of the cache, speed, and what distillation adds to its teacher's training."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines import kv_table
from pipelines.accounts import model_cost
from pipelines.comparisons import baseline
from pipelines.looped_results import Pair, members
from pipelines.reported import citation
from pipelines.results import Result
from pipelines.sections import Section, source
from pipelines.tables import Cell, Table, count, number, size, table


def memory(results: Sequence[Result], pairs: Sequence[Pair]) -> Section:
    """The paper's memory table recomputed, and the caches of the evaluated models beside what they should be."""
    large = kv_table.large_table()
    sentences = tuple(_ratio(pair) for pair in pairs)
    return Section(
        "memory", "MELT: memory", (sentences, _live(results, pairs), large, f"The paper's figures: {citation('melt')}.")
    )


def _ratio(pair: Pair) -> str:
    n = pair.student.contexts[-1]
    ours, theirs = (result.measure("state_bytes")[n] for result in (pair.student, pair.teacher))
    return (
        f"After {n:,} tokens {pair.student.label} keeps {size(ours)}, its teacher {size(theirs)}: {ours / theirs:.2%} "
        f"of it, where one cache for {pair.teacher.config['loops']} loops should be "
        f"{1 / pair.teacher.config['loops']:.2%}."
    )


def _live(results: Sequence[Result], pairs: Sequence[Pair]) -> Table:
    """Live caches as the evaluation measured them, beside what the configurations say."""
    shown = _beside(results, pairs)
    rows = []
    for result in shown:
        for n, live in result.measure("state_bytes").items():
            computed = model_cost(result, n).state_bytes
            equal = "equal" if live == computed else Cell("different", strong=True)
            texts = (f"{live:,}", f"{computed:,}")
            rows.append([result.label, f"{n:,}", *(Cell(text, result.provenance) for text in texts), equal])
    columns = ("model", "context", "bytes,\nmeasured", "bytes,\ncomputed", "")
    caption = f"Live cache of one sequence, as evaluated. {source(shown)}"
    return table("Live caches against their configurations", columns, rows, caption)


def speed(results: Sequence[Result], pairs: Sequence[Pair]) -> Section:
    """Prefill and decoding of teacher, student and Transformer++, and the cost of distillation."""
    blocks = (tuple(_faster(pair) for pair in pairs), _speeds(results, pairs), _training(results, pairs))
    return Section("speed", "MELT: speed and the cost of distillation", blocks)


def _decode(result: Result) -> float | None:
    return result.evaluation["timing"].get("decode_tokens_per_second")


def _faster(pair: Pair) -> str:
    ours, theirs, n = _decode(pair.student), _decode(pair.teacher), pair.student.contexts[-1]
    if ours is None or theirs is None:
        return f"{pair.student.label}: speed was not measured: `evaluate.timing` was off."
    return (
        f"After a prompt of {n:,} tokens {pair.student.label} decodes {count(ours)} tokens/s, {ours / theirs:.2f} "
        f"times its teacher's {count(theirs)}: one sequence, this machine."
    )


def _speeds(results: Sequence[Result], pairs: Sequence[Pair]) -> Table:
    shown = _beside(results, pairs)
    first, last = shown[0].contexts[0], shown[0].contexts[-1]
    rows = []
    for result in shown:
        prefill = result.measure("prefill_tokens_per_second")
        peak = result.measure("peak_memory_bytes").get(last)
        texts = (count(prefill.get(first)), count(prefill.get(last)), count(_decode(result)), size(peak))
        rows.append([result.label, *(Cell(text, result.provenance) for text in texts)])
    columns = (f"prefill at\n{first:,}", f"prefill at\n{last:,}", f"decode\nafter {last:,}", "peak memory\nof prefill")
    caption = (
        "Tokens per second of one sequence, timed while evaluating: they differ from machine to machine and a little "
        f"from run to run. {source(shown)}"
    )
    return table("Speed", ("model", *columns), rows, caption)


def _training(results: Sequence[Result], pairs: Sequence[Pair]) -> Table:
    """What each training took, and a student's together with its teacher's."""
    rows = []
    students = {pair.student.name: pair for pair in pairs}
    for result in _beside(results, pairs):
        rows.append(_cost(result.label + (", distillation" if result.name in students else ""), [result]))
        if result.name in students:
            rows.append(_cost(f"{result.label}, with its teacher's", [students[result.name].teacher, result]))
    columns = ("tokens", "steps", "FLOPs/token", "FLOPs", "tokens/s", "seconds", "peak\nmemory", "held-out\nloss")
    caption = (
        "A student stands on its teacher's training: both together are what it costs. FLOPs of distillation include "
        f"the teacher's forward passes, and so do its tokens/s and its memory. {source(_beside(results, pairs))}"
    )
    return table("Cost of training", ("training", *columns), rows, caption)


def _cost(name: str, trainings: Sequence[Result]) -> list[Cell | str]:
    """One training, or several one after another: sums, and peaks."""
    each = [result.training for result in trainings]
    tokens = sum(t["tokens"] for t in each)
    flops = sum(t["tokens"] * t["training_flops_per_token"] for t in each)
    peaks = [t["peak_memory_bytes"] for t in each if t.get("peak_memory_bytes")]
    speed = each[0]["tokens_per_second"] if len(each) == 1 else None
    texts = (
        count(tokens),
        f"{sum(t['steps'] for t in each):,}",
        count(flops / tokens),
        count(flops),
        count(speed),
        number(sum(t["seconds"] for t in each), 0),
        size(max(peaks, default=None)),
        number(each[-1]["validation_loss"], 3),
    )
    provenance = "; ".join(result.provenance for result in trainings)
    return [name, *(Cell(text, provenance) for text in texts)]


def _beside(results: Sequence[Result], pairs: Sequence[Pair]) -> list[Result]:
    """The full Transformer++, if there is one, then teachers and students."""
    base = baseline(results)
    return [*([base] if base else []), *members(pairs)]
