"""The sections that account for a comparison: what it cost, what it can show, where it is from. Fairness is `audit`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from models.configuration import config_from
from models.families import family
from models.language_model import Cost
from pipelines.comparisons import SEEDS_NEEDED
from pipelines.reported import paper
from pipelines.results import Result, pretrained, short, teacher_of
from pipelines.sections import Section, source
from pipelines.tables import MISSING, Cell, Table, count, number, size, table


def title(results: Sequence[Result]) -> str:
    """The families compared: `Transformer++ and Mela, side by side`."""
    names = list(dict.fromkeys(result.family for result in results))
    return f"{', '.join(names[:-1])} and {names[-1]}, side by side" if len(names) > 1 else f"{names[0]}, by itself"


def lead(results: Sequence[Result]) -> list[str]:
    """What was compared, and where to look for the source of a number."""
    scratch, seeds = pretrained(results) or results, len({r.training["seed"] for r in results})
    tokens = " or ".join(count(n) for n in sorted({r.training["tokens"] for r in scratch}))
    each = "each trained" if scratch == results else "those pretrained"
    return [
        f"{plural(len(results), 'model')}, {each} on {tokens} tokens ({plural(seeds, 'seed')}, sequences of "
        f"{results[0].training_context:,} tokens), evaluated on held-out documents of the same corpus with up to "
        f"{results[0].contexts[-1]:,} tokens of context.",
        *(f"{distilled(result, results)}." for result in results if result.teacher is not None),
        "Point at a number for the run, commit, data and seed it comes from; the table of runs is at the end.",
    ]


def distilled(student: Result, results: Sequence[Result]) -> str:
    """Whose training a student stands on, and what comes on top."""
    teacher, tokens = teacher_of(student, results), student.training["tokens"]
    if teacher is None:
        said = f"{student.label} is distilled on {count(tokens)} tokens from `{student.teacher}`"
        return f"{said}, which is not evaluated here"
    before = teacher.training["tokens"]
    return (
        f"{student.label} starts from {teacher.label} and its {count(before)} tokens of training, and learns from its "
        f"predictions on {count(tokens)} more: {count(before + tokens)} in all"
    )


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
        f"exactly. {student_note(results)}{source(results)}"
    )
    costs_table = table("Cost of one model", ("model", *columns), rows, caption)
    return Section("costs", "Costs", (costs_table, _parts(results)))


def student_note(results: Sequence[Result]) -> str:
    """What the training figures of a student leave out and include."""
    if pretrained(results) == results:
        return ""
    return "A student's training is its distillation, teacher's passes included; its teacher's own comes on top. "


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
    alone = "" if pretrained(results) == results else " A student is counted alone, without its teacher's passes."
    caption = (
        f"At the training length. Counted by the model itself; tests hold the counts against a FLOP counter.{alone}"
    )
    return table("Cost by part", columns, rows, caption, labels=2)


def model_cost(result: Result, context: int | None = None) -> Cost:
    """The costs a model states at a context length, by default that of its training; no weights are made."""
    module = family(result.training["family"])
    with torch.device("meta"):
        return module.MODEL(config_from(module.CONFIG, result.config)).cost(context or result.training_context)


def limits(results: Sequence[Result]) -> Section:
    """What the run can show and what it cannot."""
    sizes = sorted(result.training["parameters"] for result in results)
    seeds: dict[str, set[int]] = {}
    for result in results:
        seeds.setdefault(f"{result.training['family']} {result.config}", set()).add(result.training["seed"])
    fewest = min(len(each) for each in seeds.values())
    documents = results[0].evaluation["windows"]["documents"]
    tokens = sorted({result.training["tokens"] for result in results})
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
        f"The models have {count(sizes[0])} to {count(sizes[-1])} parameters and were trained on "
        f"{' or '.join(map(count, tokens))} tokens; {_papers(results)}. Effects may appear, vanish or turn around with "
        "scale.",
        f"The scored text is {plural(documents, 'held-out document')} of one corpus: intervals over documents hold for "
        "such text only. Perplexity also depends on the tokenizer; bits per byte compares across tokenizers.",
        f"The training objective is next-token prediction{_objectives(results)}: recall at chance says that it was not "
        "learnt from this corpus, not that it cannot be learnt.",
    )
    return Section("limits", "What this run can and cannot show", (sentences,))


def _papers(results: Sequence[Result]) -> str:
    """The scale of the papers whose designs are compared."""
    mela, melt = paper("mela")["training"], paper("melt")
    distilled = melt["training"]["phase1"]["tokens"] + melt["training"]["phase2"]["tokens"]
    said = f"the Mela paper's smallest has 400M and saw {count(mela['tokens'])}"
    if pretrained(results) == results:
        return said
    parameters = melt["architecture"]["melt_parameters"] / 1e9
    return f"{said}; the MELT paper's has {parameters:.1f}B and was distilled on {count(distilled)}"


def _objectives(results: Sequence[Result]) -> str:
    """What the objectives add to next-token prediction."""
    if not any(result.looped for result in results):
        return " alone"
    student = "" if pretrained(results) == results else "; a student learns its teacher's predictions"
    return f" (LoopLM: after every loop, weighted by its exit gate{student})"


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
