"""MELT in the report, on made-up results: what it says follows from the files, both ways; what is missing is told."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pipelines import accounts, curves, kv_table, looped_costs, looped_gates, looped_quality, report, sections
from pipelines.audit import audit
from pipelines.comparisons import baseline
from pipelines.figures import Drawing
from pipelines.looped_results import Pair, load_pairs
from pipelines.reported import paper
from pipelines.results import Result, load_results
from tests.pipelines.stage_outputs import CONTEXTS, MODELS, STRATEGIES, WINDOWS, write_model, write_pair, write_sharing

ANCHORS = ["melt", "loops", "gates", "memory", "speed"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Results of four families, and the report on them."""
    root = tmp_path_factory.mktemp("results")
    for name in MODELS:
        write_model(root, name)
    write_pair(root)
    assert _report(root) == 0
    return root


@pytest.fixture
def pair_only(tmp_path) -> Path:
    """Teacher and student alone, to be spoilt."""
    write_pair(tmp_path)
    return tmp_path


def _report(root: Path) -> int:
    folders = [word for name in ("artifacts", "evaluations") for word in (f"--{name}", str(root / name))]
    return report.main([*folders, "--output", str(root / "reports")])


def _load(root: Path) -> tuple[list[Result], list[Pair]]:
    results = load_results(root / "artifacts", root / "evaluations")
    return results, load_pairs(results, root / "artifacts", root / "evaluations")


def _text(*made: sections.Section) -> str:
    return report.markdown(report.Report("", [], list(made)))


def _change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_page_has_a_section_for_each_question_and_only_where_there_is_a_student(root):
    page = (root / "reports" / "index.html").read_text("utf-8")
    assert re.findall(r'<section id="([a-z]+)"', page)[6:11] == ANCHORS
    assert "<title>Transformer++, LoopLM, Mela and MELT, side by side</title>" in page
    results = [result for result in _load(root)[0] if result.name != "melt_tiny"]
    assert not {section.anchor for section in report.compose(results, [])} & {*ANCHORS}


def test_figures_are_written_beside_the_text_and_name_their_numbers(root):
    text = (root / "reports" / "report.md").read_text("utf-8")
    figures = dict(re.findall(r"!\[([^]]+)\]\(([^)]+)\)", text))
    assert {f"figures/{name}.png" for name in ("quality_melt_tiny", "loops", "gates_melt_tiny")} <= {*figures.values()}
    for name in figures.values():
        assert (root / "reports" / name).read_bytes().startswith(b"\x89PNG")
    (said,) = (words for words, name in figures.items() if name.startswith("figures/quality"))
    for perplexity, _ in STRATEGIES.values():
        assert f"{perplexity:.2f}" in said


def test_every_number_of_a_strategy_carries_where_it_comes_from(root):
    page = (root / "reports" / "index.html").read_text("utf-8")
    _, (pair,) = _load(root)
    assert pair.provenance.count("run ") == 2
    assert "decoded at commit bbbbbbbb" in pair.provenance
    for perplexity, _ in STRATEGIES.values():
        assert f'title="{pair.provenance}">{perplexity:.2f}<' in page


def test_the_student_is_held_to_its_promise_with_an_interval_over_windows(root):
    results, (pair,) = _load(root)
    first, second, _, sure = looped_quality.sentences(pair, results)
    assert first.startswith("MELT tiny against its teacher LoopLM tiny, decoding 256 tokens after prompts of 256: ")
    assert "perplexity +2.0 % (95 % over 8 windows: +1.2 % to +2.8 %)." in first
    assert first.endswith("it stays within the 5 % that distillation is held to.")
    assert "perplexity +30.0 % against a cache per loop" in second
    assert second.endswith("is clearly worse than the student on these windows.")
    assert sure.startswith("1 seed of MELT tiny")
    assert {first, second} <= {
        *_text(sections.headline(results, looped_quality.findings([pair]))).replace("- ", "").split("\n")
    }


@pytest.mark.parametrize(
    ("student", "spread", "said"),
    [(1.02, 0.0, "it stays within"), (1.04, 0.05, "its interval reaches beyond"), (1.08, 0.0, "it misses the 5 %")],
)
def test_the_promise_is_judged_in_both_directions(pair_only, student, spread, said):
    _set_loss(pair_only, "student", student, spread)
    _, (pair,) = _load(pair_only)
    assert said in looped_quality.findings([pair])[0]


@pytest.mark.parametrize(
    ("ratio", "spread", "said"),
    [(1.3, 0.0, "is clearly worse"), (1.02, 0.2, "cannot be told apart"), (0.9, 0.0, "without any distillation")],
)
@pytest.mark.parametrize(("loop", "place"), [("last_loop", 1), ("first_loop", 2)])
def test_sharing_without_training_is_judged_in_both_directions(pair_only, loop, place, ratio, spread, said):
    _set_loss(pair_only, loop, ratio, spread)
    _, (pair,) = _load(pair_only)
    assert said in looped_quality.findings([pair])[place]


def _set_loss(root: Path, strategy: str, ratio: float, spread: float) -> None:
    """A strategy's perplexity as a ratio to the teacher's, more or less alike over windows."""
    folder = root / "evaluations" / "melt_tiny" / "sharing"
    metrics, windows = json.loads((folder / "metrics.json").read_text()), pd.read_csv(folder / "windows.csv")
    metrics["strategies"][strategy]["perplexity"] = ratio * metrics["strategies"]["teacher"]["perplexity"]
    _change(folder / "metrics.json", **metrics)
    teacher = windows.loc[windows.strategy == "teacher", "loss"].to_numpy()
    noise = spread * np.cos(3 * np.arange(WINDOWS))
    windows.loc[windows.strategy == strategy, "loss"] = teacher + math.log(ratio) + noise - noise.mean()
    windows.to_csv(folder / "windows.csv", index=False)


def test_one_window_gives_no_interval_and_no_judgement_of_sharing(pair_only):
    folder = pair_only / "evaluations" / "melt_tiny" / "sharing"
    windows = pd.read_csv(folder / "windows.csv")
    windows[windows.document == 0].to_csv(folder / "windows.csv", index=False)
    _, (pair,) = _load(pair_only)
    first, second, _ = looped_quality.findings([pair])
    assert "one window, so no interval" in first
    assert "cannot be told apart" in second


def test_the_papers_figures_stand_apart_from_ours(root):
    results, pairs = _load(root)
    text = _text(looped_quality.quality(results, pairs))
    ours, reported = text.split("**Reported for one cache for every loop (not measured here)**")
    assert "| MELT 1.6B, distilled | 46.7 | 33.3 | 80.2 | 93.4 |" in reported
    assert reported.count("| 0.0 | 0.0 | 0.0 | 0.0 |") == len(paper("melt")["table5_untrained_sharing"]["strategies"])
    assert "AIME" not in ours


def test_the_figure_holds_our_strategies_and_nothing_else(root):
    _, (pair,) = _load(root)
    figure = next(block for block in looped_quality.quality([], [pair]).blocks if isinstance(block, Drawing)).figure
    (axes,) = figure.axes
    points = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines}  # type: ignore[index]
    assert points == {(float(kept), perplexity) for perplexity, kept in STRATEGIES.values()}
    assert axes.get_xscale() == "log"
    colours = [line.get_color() for line in axes.lines]
    assert len({*colours}) == len(colours)


def test_recall_beyond_luck_stands_out(pair_only):
    folder = pair_only / "evaluations" / "melt_tiny" / "sharing"
    strategies = json.loads((folder / "metrics.json").read_text())["strategies"]
    strategies["teacher"]["mqar"] = 0.5
    _change(folder / "metrics.json", strategies=strategies)
    results, pairs = _load(pair_only)
    text = _text(looped_quality.quality(results, pairs))
    assert re.findall(r"\*\*\d+\.\d%\*\*", text) == ["**50.0%**"]
    assert "chance 3.1%" in text


def test_loss_by_loop_is_a_row_per_model_and_loop(root):
    text = _text(looped_quality.loops(_load(root)[1]))
    assert "| LoopLM tiny | 2 | 4.2500 | −0.3600 |" in text
    assert f"| MELT tiny | 4 | {math.log(56.1):.4f} |" in text
    assert "LoopLM tiny: 4.610 after the first loop, 4.007 after the last. Looping lowers it." in text


def test_loops_that_do_not_pay_are_told(pair_only):
    losses = {"teacher": {"1": 4.1, "2": 4.3, "3": 4.7}, "student": {"1": 4.8, "2": 4.5, "3": 4.9}}
    write_sharing(pair_only / "evaluations" / "melt_tiny" / "sharing", loop_losses=losses)
    text = _text(looped_quality.loops(_load(pair_only)[1]))
    assert "LoopLM tiny: 4.100 after the first loop, 4.700 after the last. Looping does not lower it. MELT" in text
    assert "4.900 after the last. Looping does not lower it. It is lowest after loop 2, at 4.500." in text


def test_gates_have_a_panel_and_a_row_per_layer_and_loop(root):
    section = looped_gates.gates(_load(root)[1])
    drawing = next(block for block in section.blocks if isinstance(block, Drawing))
    assert len(drawing.figure.axes) == 6
    text = _text(section)
    assert [text.count(f"| layer {layer} | loop {loop} |") for layer in (1, 2) for loop in (2, 3, 4)] == [1] * 6
    assert "| layer 1 | loop 3 | 0.20 |" in text
    assert "| layer 2 | loop 4 | 0.40 |" in text


def test_live_caches_are_compared_with_their_configurations(root):
    results, pairs = _load(root)
    text = _text(looped_costs.memory(results, pairs))
    assert text.count("| equal |") == 3 * len(CONTEXTS)
    assert "25.00% of it, where one cache for 4 loops should be 25.00%." in text
    for figure in ("0.196608", "25.76980", "3.441 [3.442]"):
        assert figure in text
    assert kv_table.large_table().title in text


def test_a_live_cache_that_is_not_what_it_should_be_stands_out(pair_only):
    file = pair_only / "evaluations" / "melt_tiny" / "metrics.json"
    _change(file, state_bytes={str(n): 2049 * n for n in CONTEXTS})
    text = _text(looped_costs.memory(*_load(pair_only)))
    assert text.count("**different**") == len(CONTEXTS)


def test_a_students_training_stands_on_its_teachers(root):
    results, pairs = _load(root)
    text = _text(looped_costs.speed(results, pairs))
    assert "decodes 310 tokens/s, 1.00 times its teacher's 310" in text
    assert re.search(r"\| MELT tiny, distillation \| 524k \| 128 \| 6.50M \| 3.41T \| 5,000 \| 90 \| 256.00 MiB", text)
    assert re.search(
        r"\| MELT tiny, with its teacher's \| 1.57M \| 256 \| 6.50M \| 10.2T \| – \| 290 \| 256.00 MiB", text
    )
    assert "A student stands on its teacher's training" in text


def test_speeds_that_were_not_measured_are_told(pair_only):
    _change(pair_only / "evaluations" / "melt_tiny" / "metrics.json", timing={"seconds": 1.0})
    assert "`evaluate.timing` was off" in _text(looped_costs.speed(*_load(pair_only)))


def test_the_audit_judges_only_what_can_be_equal(root):
    results, _ = _load(root)
    verdict, unjudged, *_ = audit(results).blocks
    assert isinstance(verdict, str)
    assert verdict.startswith("All that is listed here as due to be equal is.")
    assert isinstance(unjudged, tuple)
    loops, student = unjudged
    assert "LoopLM tiny, 4 loops: parameters −47.6 %" in loops
    assert "1.05M tokens of training, and learns from its predictions on 524k more: 1.57M in all" in student
    text = _text(audit(results))
    assert "| training tokens (pretrained) | yes | 1,048,576 |" in text
    assert "(without loops) | yes |" in text


def test_the_audit_still_names_a_pretrained_model_with_other_tokens(tmp_path):
    write_pair(tmp_path)
    write_model(tmp_path, "transformer_pp_tiny", tokens=999_424)
    verdict, *_ = audit(_load(tmp_path)[0]).blocks
    assert isinstance(verdict, str)
    assert "training tokens (pretrained)" in verdict


def test_lead_costs_and_limits_say_whose_training_a_student_stands_on(root):
    results, _ = _load(root)
    assert accounts.lead(results)[0].startswith("6 models, those pretrained on 1.05M tokens (1 seed")
    assert accounts.lead(results)[1].endswith("1.57M in all.")
    assert "its teacher's own comes on top" in _text(accounts.costs(results))
    limits = _text(accounts.limits(results))
    assert "the MELT paper's has 1.6B and was distilled on 256M" in limits
    assert "a student learns its teacher's predictions" in limits


def test_divergence_is_not_drawn_among_training_losses(root):
    results, _ = _load(root)
    (drawing,) = curves.training(results).blocks
    assert isinstance(drawing, Drawing)
    trained, distilled, validated = drawing.figure.axes
    assert [axes.get_title(loc="left") for axes in drawing.figure.axes] == [
        "Training loss", "Distillation loss", "Validation loss",
    ]  # fmt: skip
    assert [len(axes.lines) for axes in (trained, distilled, validated)] == [5, 1, 6]
    student = validated.lines[-1]
    assert min(np.asarray(student.get_xdata())) > 1_048_576, "after its teacher's tokens"


def test_what_was_not_measured_is_told_not_refused(pair_only):
    (pair_only / "evaluations" / "melt_tiny" / "sharing" / "metrics.json").unlink()
    (pair_only / "artifacts" / "melt_tiny" / "gates.csv").unlink()
    assert _report(pair_only) == 0
    text = (pair_only / "reports" / "report.md").read_text("utf-8")
    command = "python -m pipelines.sharing teacher="
    assert text.count("metrics.json` is missing: run `dvc repro`, or `" + command) == 2
    assert "`gates.csv` is missing" in text
    assert "at 512 tokens, as evaluated: perplexity +2.0 % (95 % over 6 documents" in text


def test_a_student_of_one_loop_needs_no_gate(pair_only):
    (pair_only / "artifacts" / "melt_tiny" / "gates.csv").write_text("loop,layer,from,to,share\n")
    assert "one loop needs no gate" in _text(looped_gates.gates(_load(pair_only)[1]))


def test_a_teacher_is_known_by_its_weights_wherever_it_lies(pair_only):
    for kind in ("artifacts", "evaluations"):
        (pair_only / kind / "looplm_tiny").rename(pair_only / kind / "renamed")
    results, (pair,) = _load(pair_only)
    assert pair.teacher.name == "renamed"
    assert accounts.lead(results)[1].endswith("1.57M in all.")


def test_a_teacher_that_was_trained_again_is_no_teacher(pair_only, capsys):
    _change(pair_only / "artifacts" / "looplm_tiny" / "config.json", sha256="b" * 64)
    assert _report(pair_only) == 2
    said = capsys.readouterr().err
    assert "melt_tiny was distilled from weights looplm_t" in said
    assert "looplm_tiny holds bbbbbbbb" in said


def test_a_student_without_its_teacher_is_reported_as_such(pair_only):
    (pair_only / "evaluations" / "looplm_tiny" / "metrics.json").unlink()
    results, pairs = _load(pair_only)
    assert not pairs
    assert "from `looplm_tiny`, which is not evaluated here" in accounts.lead(results)[1]
    assert baseline(results) is None
    assert _report(pair_only) == 0


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: write_sharing(folder, fingerprint="b" * 64), "fingerprint bbbbbbbb, melt_tiny has melt_tin"),
        (lambda folder: write_sharing(folder, data_digest="a" * 64), "data_digest aaaaaaaa"),
        (lambda folder: write_sharing(folder, teacher_weights="b" * 64), "teacher_weights bbbbbbbb"),
        (lambda folder: (folder / "windows.csv").unlink(), "windows.csv is missing"),
        (lambda folder: (folder / "metrics.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "metrics.json").write_text("{}"), "lacks fingerprint, teacher_weights, data_digest"),
    ],
)
def test_sharing_of_something_else_is_refused_in_one_line(pair_only, capsys, spoil, said):
    spoil(pair_only / "evaluations" / "melt_tiny" / "sharing")
    assert _report(pair_only) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
