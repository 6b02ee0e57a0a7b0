"""MELT in the report, quality: what one cache for every loop costs in perplexity, and what distillation is good for."""

from __future__ import annotations

from collections.abc import Sequence

from pipelines.comparisons import SEEDS_NEEDED, Change, change
from pipelines.figures import Drawing, Line, Panel, draw, spare_kinds
from pipelines.looped_results import Pair, Sharing, members
from pipelines.recall_section import LUCK, Answers
from pipelines.reported import citation, paper
from pipelines.results import Result, short
from pipelines.sections import Block, Section, source
from pipelines.tables import Cell, Table, number, percent, size, table

PROMISE = 0.05  # how much worse than its teacher a student may be: what the recipe is held to
TASKS = ("AIME24", "AIME25", "AMC23", "MATH-500")  # of the paper's tables 4 and 5
UNTRAINED = {  # strategy -> what later tokens find in the cache
    "first_loop": "untrained, first loop's rows",
    "last_loop": "untrained, last loop's rows",
    "first_loop_prompt_kept": "untrained, first loop's, prompt kept",
    "last_loop_prompt_kept": "untrained, last loop's, prompt kept",
}


def quality(results: Sequence[Result], pairs: Sequence[Pair]) -> Section:
    """Perplexity against cache bytes: teacher, student, and the teacher's cache shared without training."""
    blocks: list[Block] = []
    for pair in pairs:
        blocks += [tuple(sentences(pair, results)), _by_context(pair)]
        if pair.sharing is not None:
            blocks += [_figure(pair, pair.sharing), _strategies(pair, pair.sharing)]
    return Section("melt", "MELT: one cache for every loop", (*blocks, _reported()))


def findings(pairs: Sequence[Pair]) -> list[str]:
    """The sentences that belong at the top."""
    return [sentence for pair in pairs for sentence in (_student(pair), *_untrained(pair))]


def sentences(pair: Pair, results: Sequence[Result]) -> list[str]:
    """What distillation reached, what no training would have, and how sure that is."""
    student = pair.student
    seeds = len({r.training["seed"] for r in results if r.config == student.config and r.teacher is not None})
    sure = (
        f"{seeds} seed{'s' * (seeds != 1)} of {student.label}: the intervals say how far these figures depend on the "
        f"text, not on the seed; no verdict over seeds is given with fewer than {SEEDS_NEEDED}."
        if seeds < SEEDS_NEEDED
        else f"{seeds} seeds of {student.label}: a verdict over them belongs in an ablation table."
    )
    missing = [f"Untrained sharing and loss by loop are not measured: {pair.missing}."] if pair.sharing is None else []
    return [_student(pair), *_untrained(pair), *missing, sure]


def _student(pair: Pair) -> str:
    """The student against its teacher: as decoded, or, before stage `sharing` ran, as evaluated."""
    if pair.sharing is None:
        n = pair.student.contexts[0]
        effect = change(pair.student, pair.teacher, n)
        found, where = effect.text, f"at {n:,} tokens, as evaluated"
    else:
        metrics, effect = pair.sharing.metrics, pair.sharing.change("student", "teacher")
        found = f"{percent(effect.value)} ({pair.sharing.limits(effect)})"
        where = f"decoding {metrics['context'] - metrics['prompt']:,} tokens after prompts of {metrics['prompt']:,}"
    return (
        f"{pair.student.label} against its teacher {pair.teacher.label}, {where}: perplexity {found}. {_kept(effect)}"
    )


def _kept(effect: Change) -> str:
    """Whether the promise holds, for the estimate and over its interval."""
    limit, high = f"{PROMISE:.0%}".replace("%", " %"), effect.interval.high if effect.interval else None
    if effect.value > PROMISE:
        return f"So it misses the {limit} that distillation is held to."
    if high is None or high <= PROMISE:
        return f"So it stays within the {limit} that distillation is held to."
    return f"So it stays within the {limit} that distillation is held to, though its interval reaches beyond."


def _untrained(pair: Pair) -> list[str]:
    """One loop's cache without training, as small as the student's, against teacher and student."""
    if pair.sharing is None:
        return []
    return [_shared(pair, pair.sharing, loop) for loop in ("last", "first")]


def _shared(pair: Pair, sharing: Sharing, loop: str) -> str:
    to_teacher, to_student = (sharing.change(f"{loop}_loop", base) for base in ("teacher", "student"))
    apart = to_student.interval is not None and to_student.interval.excludes_zero
    reading = (
        "cannot be told apart from the student on these windows: distillation is not shown to do anything"
        if not apart
        else "is clearly worse than the student on these windows"
        if to_student.value > 0
        else "is better than the student on these windows: this is one cache without any distillation"
    )
    return (
        f"{pair.teacher.label} with the {loop} loop's cache for every loop, untrained: perplexity "
        f"{percent(to_teacher.value)} against a cache per loop ({sharing.limits(to_teacher)}), "
        f"{percent(to_student.value)} against {pair.student.label}. So sharing it without training {reading}."
    )


def _by_context(pair: Pair) -> Table:
    """Student and teacher as evaluated, at every context length."""
    student, teacher, rows = pair.student, pair.teacher, []
    for n in student.contexts:
        effect, bytes_kept = change(student, teacher, n), [r.measure("state_bytes").get(n) for r in (teacher, student)]
        texts = (
            number(teacher.perplexity("fixed_targets")[n]),
            number(student.perplexity("fixed_targets")[n]),
            percent(effect.value),
            effect.limits,
            *map(size, bytes_kept),
        )
        rows.append([f"{n:,}", *(Cell(text, f"{student.provenance}; teacher: {teacher.provenance}") for text in texts)])
    columns = ("teacher", "student", "change", "95 % over\ndocuments", "teacher's\ncache", "student's\ncache")
    caption = (
        "Perplexity on the same targets, as evaluated: a student reads text in chunks, as it reads a prompt. How "
        f"it does when it decodes one token at a time is measured apart. {source([teacher, student])}"
    )
    return table(f"{student.label} against {teacher.label} by context length", ("context", *columns), rows, caption)


def _figure(pair: Pair, sharing: Sharing) -> Drawing:
    """Perplexity against cache bytes, a point per strategy."""
    (student, teacher), spare = pair.places, spare_kinds(pair.places)
    kinds = {"teacher": teacher, "student": student, **dict(zip(UNTRAINED, spare, strict=False))}
    points = sharing.metrics["strategies"]
    lines = [
        Line(_name(pair, name), {points[name]["cache_bytes"]: points[name]["perplexity"]}, kind)
        for name, kind in kinds.items()
    ]
    x = f"cache of one sequence after {sharing.metrics['context']:,} tokens (bytes; K, M: powers of 1,024)"
    said = ", ".join(
        f"{_name(pair, n)} {number(p['perplexity'])} with {size(p['cache_bytes'])}" for n, p in points.items()
    )
    caption = (
        "Lower and further left is better. Teacher and student as trained; the others are the teacher, decoding with "
        f"the rows of one loop in the cache of all. {source([pair.teacher, pair.student])}"
    )
    panel = Panel("Perplexity against cache", lines, x, "perplexity")
    return draw(f"quality_{pair.student.name}", [panel], f"Perplexity against cache bytes: {said}.", caption)


def _strategies(pair: Pair, sharing: Sharing) -> Table:
    """Every strategy with its interval, recall and cache."""
    metrics, rows = sharing.metrics, []
    whole, level = metrics["strategies"]["teacher"]["cache_bytes"], LUCK / len(metrics["strategies"])
    for name, found in metrics["strategies"].items():
        effect = sharing.change(name, "teacher")
        answers = Answers("MQAR", name, found["mqar"], metrics["recall_questions"])
        same = name == "teacher"
        cells = (
            Cell(number(found["perplexity"]), pair.provenance),
            Cell(percent(None if same else effect.value), pair.provenance),
            Cell("–" if same else effect.limits if effect.interval else "one window", pair.provenance),
            Cell(f"{found['mqar']:.1%}", pair.provenance, answers.beats(metrics["recall_chance"], level)),
            Cell(size(found["cache_bytes"]), pair.provenance),
            Cell(f"{found['cache_bytes'] / whole:.1%}", pair.provenance),
        )
        rows.append([_name(pair, name), *cells])
    columns = ("perplexity", "against\nteacher", "95 % over\nwindows", "MQAR", "cache", "of the\nteacher's")
    windows, documents = metrics["windows"], metrics["documents"]
    caption = (
        f"{sharing.targets:,} targets: {windows:,} windows of {documents:,} held-out documents, each a prompt of "
        f"{metrics['prompt']:,} tokens read at once and {metrics['context'] - metrics['prompt']:,} decoded one by one. "
        "Intervals: Student's t on the windows' log ratios"
        + (", which are not independent where windows share a document" if documents < windows else "")
        + f". MQAR: {metrics['recall_questions']:,} questions, chance {metrics['recall_chance']:.1%}; bold: above it "
        f"beyond luck. Cache of one sequence after {metrics['context']:,} tokens. Decoded at commit "
        f"{short(metrics['commit'])}. {source(members([pair]))}"
    )
    return table("Decoding with one cache for every loop", ("strategy", *columns), rows, caption)


def _name(pair: Pair, strategy: str) -> str:
    own = {"teacher": f"{pair.teacher.label}, teacher", "student": f"{pair.student.label}, student"}
    return own.get(strategy) or UNTRAINED[strategy]


def _reported() -> Table:
    """The paper's table 5, with its trained models beside it."""
    figures = paper("melt")
    ouro = figures["table1"]["columns"].index("ouro")
    shared = figures["table5_untrained_sharing"]
    rows = [
        ["Ouro 1.4B, cache per loop", *(number(figures["table1"][task][ouro], 1) for task in TASKS)],
        ["MELT 1.6B, distilled", *(number(value, 1) for value in figures["table4_cumulative_removal"]["full"])],
        *([f"{name}, untrained", *[number(shared["score"], 1)] * len(TASKS)] for name in shared["strategies"]),
    ]
    caption = (
        f"{citation('melt')}. Solved problems in percent: other tasks and far larger models than ours, so compare the "
        "order, not the values."
    )
    return table("Reported for one cache for every loop (not measured here)", ("strategy", *TASKS), rows, caption)


def loops(pairs: Sequence[Pair]) -> Section:
    """Held-out loss after every loop."""
    measured = [(pair, pair.sharing.metrics["loop_losses"]) for pair in pairs if pair.sharing is not None]
    title = "MELT: loss by loop"
    if not measured:
        return Section("loops", title, tuple(f"Not measured: {pair.missing}." for pair in pairs))
    lines, rows = {}, []
    for pair, losses in measured:
        student, teacher = pair.places
        for role, result, kind in (("teacher", pair.teacher, teacher), ("student", pair.student, student)):
            lines[result.name] = Line(result.label, {int(loop): loss for loop, loss in losses[role].items()}, kind)
            for loop, loss in losses[role].items():
                gain = loss - losses[role][str(int(loop) - 1)] if loop != "1" else None
                texts = (number(loss, 4), "–" if gain is None else f"{gain:+.4f}".replace("-", "−"))
                rows.append([result.label, loop, *(Cell(text, pair.provenance) for text in texts)])
    ends = " ".join(_loops_pay(line) for line in lines.values())
    runs = source(members([pair for pair, _ in measured]))
    caption = (
        "Cross-entropy of the targets of the table above, with the model's head on the state after each loop; no token "
        f"leaves early. {runs}"
    )
    panel = Panel("Held-out loss by loop", list(lines.values()), "loop", "nats per token", log=False, contexts=False)
    figure = draw("loops", [panel], f"Held-out loss by loop. {ends}", caption)
    columns = ("model", "loop", "nats per token", "against the\nloop before")
    return Section("loops", title, (ends, figure, table("Held-out loss by loop", columns, rows, runs, 2)))


def _loops_pay(line: Line) -> str:
    """Whether looping lowers the loss, in words."""
    first, last = line.points[1], line.points[max(line.points)]
    best = min(line.points, key=lambda loop: line.points[loop])
    reading = "Looping lowers it." if last < first else "Looping does not lower it."
    lowest = (
        "" if best in (1, max(line.points)) else f" It is lowest after loop {best}, at {number(line.points[best], 3)}."
    )
    return f"{line.label}: {number(first, 3)} after the first loop, {number(last, 3)} after the last. {reading}{lowest}"
