"""The sections that account for a comparison: what it cost, whether it was fair, what it can show, where it is from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from models.configuration import config_from
from models.families import family
from models.language_model import Cost
from pipelines.comparisons import SEEDS_NEEDED, baseline
from pipelines.reported import paper
from pipelines.results import Result, short
from pipelines.sections import Section, source
from pipelines.tables import MISSING, Cell, Table, count, number, percent, size, table

PARAMETER_GAP = 0.01  # arms are of equal size within this fraction


def title(results: Sequence[Result]) -> str:
    """The families compared: `Transformer++ and Mela, side by side`."""
    names = list(dict.fromkeys(result.family for result in results))
    return f"{', '.join(names[:-1])} and {names[-1]}, side by side" if len(names) > 1 else f"{names[0]}, by itself"


def lead(results: Sequence[Result]) -> list[str]:
    """What was compared, and where to look for the source of a number."""
    tokens = " or ".join(count(n) for n in sorted({r.training["tokens"] for r in results}))
    seeds = len({r.training["seed"] for r in results})
    return [
        f"{plural(len(results), 'model')}, each trained on {tokens} tokens ({plural(seeds, 'seed')}, sequences of "
        f"{results[0].training_context:,} tokens), evaluated on held-out documents of the same corpus with up to "
        f"{results[0].contexts[-1]:,} tokens of context.",
        "Point at a number for the run, commit, data and seed it comes from; the table of runs is at the end.",
    ]


def costs(results: Sequence[Result]) -> Section:
    """Parameters, FLOPs, state, speed and memory, and what part of the model they belong to."""
    longest = max(n for result in results for n in result.contexts)
    rows = []
    for result in results:
        texts = (
            f"{result.training['parameters']:,}",
            count(result.training["training_flops_per_token"]),
            size(result.measure("state_bytes").get(longest)),
            count(result.measure("prefill_tokens_per_second").get(longest)),
            count(result.evaluation["timing"].get("decode_tokens_per_second")),
            size(result.measure("peak_memory_bytes").get(longest)),
        )
        rows.append([result.label, *(Cell(text, result.provenance) for text in texts)])
    columns = ("parameters", "training\nFLOPs/token", "state", "prefill\ntokens/s", "decode\ntokens/s", "peak\nmemory")
    caption = (
        f"State, speeds and peak memory at {longest:,} tokens, one sequence. FLOPs count a multiply-add as two, matrix "
        "products only, as executed: loops and memory updates included. Speeds are this machine's, the rest repeats "
        f"exactly. {source(results)}"
    )
    costs_table = table("Cost of one model", ("model", *columns), rows, caption)
    return Section("costs", "Costs", (costs_table, _parts(results)))


def _parts(results: Sequence[Result]) -> Table:
    """Where the parameters and the compute of each model sit, as the model itself states it."""
    rows = []
    for result in results:
        cost = model_cost(result)
        flops = cost.total_training_flops
        for part in [*cost.parameters, *(part for part in cost.training_flops if part not in cost.parameters)]:
            parameters, share = cost.parameters.get(part), cost.training_flops.get(part)
            texts = (number(parameters, 0), count(share), MISSING if share is None else f"{share / flops:.1%}")
            rows.append([result.label, part.replace("_", " "), *texts])
    columns = ("model", "part", "parameters", "training FLOPs/token", "share of FLOPs")
    caption = "At the training length. Counted by the model itself; tests hold the counts against a FLOP counter."
    return table("Cost by part", columns, rows, caption, labels=2)


def model_cost(result: Result) -> Cost:
    """The costs a model states at its training length; no weights are made."""
    module = family(result.training["family"])
    with torch.device("meta"):
        return module.MODEL(config_from(module.CONFIG, result.config)).cost(result.training_context)


SAME: dict[str, Callable[[Result], str]] = {
    "seed (initial weights, order of data)": lambda r: str(r.training["seed"]),
    "training tokens": lambda r: f"{r.training['tokens']:,}",
    "training steps": lambda r: f"{r.training['steps']:,}",
    "training context": lambda r: f"{r.training_context:,}",
    "training data": lambda r: short(r.training["data_digest"]),
    "evaluation data": lambda r: short(r.evaluation["data_digest"]),
    "scored windows": lambda r: _windows(r),
    "commit of training": lambda r: short(r.training["commit"]),
    "commit of evaluation": lambda r: short(r.evaluation["commit"]),
}


def audit(results: Sequence[Result]) -> Section:
    """What must be equal for the comparison to be fair, and what is not."""
    rows = [_compared(what, [(result, value(result)) for result in results]) for what, value in SAME.items()]
    for name in sorted({result.family for result in results}):
        members = [(r, short(r.training["code_digest"])) for r in results if r.family == name]
        rows.append(_compared(f"code of {name}", members))
    dirty = [result.label for result in results if result.training["dirty"]]
    rows.append(_row("no uncommitted changes", not dirty, ", ".join(dirty)))
    base = baseline(results) or results[0]
    large = [f"{r.label} {percent(gap)}" for r in results if abs(gap := _gap(r, base, "parameters")) > PARAMETER_GAP]
    rows.append(_row(f"parameters within {PARAMETER_GAP:.0%} of {base.label}", not large, ", ".join(large)))
    broken = [what for what, holds, _ in rows if holds != "yes"]
    sentence = (
        f"Not in every respect, so read differences with care: {'; '.join(map(str, broken))}."
        if broken
        else "Yes: all that should be equal is. The last table shows what the designs themselves make different."
    )
    caption = f"Code is compared inside a family: another family runs other code by design. {source(results)}"
    checks = table("What should hold", ("equal in every model", "holds", "value"), rows, caption, labels=3)
    return Section("audit", "Was the comparison fair?", (sentence, checks, _gaps(results, base)))


def _windows(result: Result) -> str:
    windows = result.evaluation["windows"]
    return f"{windows['count']:,} of {windows['documents']:,} documents, {windows['score_tokens']:,} fixed targets"


def _compared(what: str, values: Sequence[tuple[Result, str]]) -> list[Cell | str]:
    """Equal when there is one value; else each value with the models that have it."""
    models: dict[str, list[str]] = {}
    for result, value in values:
        models.setdefault(value, []).append(result.label)
    if len(models) == 1:
        return _row(what, True, next(iter(models)))
    return _row(what, False, "; ".join(f"{value}: {', '.join(names)}" for value, names in models.items()))


def _row(what: str, holds: bool, value: str) -> list[Cell | str]:
    return [what, "yes" if holds else Cell("no", strong=True), value]


def _gap(result: Result, base: Result, key: str) -> float:
    return result.training[key] / base.training[key] - 1


def _gaps(results: Sequence[Result], base: Result) -> Table:
    """What a design may legitimately differ in, as gaps to the baseline."""
    rows = []
    for result in results:
        texts = (
            f"{result.training['parameters']:,}",
            percent(_gap(result, base, "parameters")),
            percent(_gap(result, base, "training_flops_per_token")),
            count(result.training["tokens_per_second"]),
        )
        rows.append([result.label, *(Cell(text, result.provenance) for text in texts)])
    columns = ("model", "parameters", "gap", "gap in training\nFLOPs/token", "training\ntokens/s")
    return table("Size and compute", columns, rows, f"Gaps to {base.label}. {source(results)}")


def limits(results: Sequence[Result]) -> Section:
    """What the run can show and what it cannot."""
    sizes = sorted(result.training["parameters"] for result in results)
    seeds: dict[str, set[int]] = {}
    for result in results:
        seeds.setdefault(f"{result.training['family']} {result.config}", set()).add(result.training["seed"])
    fewest = min(len(each) for each in seeds.values())
    documents = results[0].evaluation["windows"]["documents"]
    reported_tokens = paper("mela")["training"]["tokens"]
    verdicts = (
        f"{plural(fewest, 'seed')} per model gives no idea of how far two seeds of one model differ; a verdict needs "
        f"{SEEDS_NEEDED}"
        if fewest < SEEDS_NEEDED
        else "verdicts over seeds belong in an ablation table; this page compares run by run"
    )
    sentences = (
        "It can show that the models train, stream and evaluate as stated, what they cost, how their state and their "
        "perplexity grow with context on this text, and whether a trained model uses its memory on it (the controls).",
        f"It cannot show which architecture is better: {verdicts}.",
        f"The models have {count(sizes[0])} to {count(sizes[-1])} parameters and saw "
        f"{count(results[0].training['tokens'])} tokens; the paper's smallest has 400M and saw "
        f"{count(reported_tokens)}. Effects may appear, vanish or turn around with scale.",
        f"The scored text is {plural(documents, 'held-out document')} of one corpus: intervals over documents hold for "
        "such text only. Perplexity also depends on the tokenizer; bits per byte compares across tokenizers.",
        "The training objective is next-token prediction alone: recall at chance says that it was not learnt from this "
        "corpus, not that it cannot be learnt.",
    )
    return Section("limits", "What this run can and cannot show", (sentences,))


def runs(results: Sequence[Result]) -> Section:
    """Where every number comes from."""
    keys = {"run_id": "run", "commit": "commit", "data_digest": "data", "code_digest": "code", "fingerprint": "cell"}
    rows = []
    for result in results:
        digests = [_digest(result.training[key]) for key in keys]
        dirty = "yes" if result.training["dirty"] else "no"
        rows.append([result.label, str(result.training["seed"]), *digests, dirty, _digest(result.evaluation["commit"])])
    columns = ("model", "seed", *keys.values(), "uncommitted\nchanges", "evaluated\nat commit")
    caption = "The first eight characters of each; whole in `artifacts/<model>/metrics.json` and in the MLflow run."
    return Section("runs", "Runs", (table("Source of every number", columns, rows, caption, labels=len(columns)),))


def _digest(value: str | None) -> Cell:
    return Cell(short(value), value or "")


def plural(n: int, noun: str) -> str:
    """`1 seed`, `3 seeds`."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
