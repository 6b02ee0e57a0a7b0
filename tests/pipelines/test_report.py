"""The report on made-up results: complete, sourced, repeatable, honest in both directions, refusals in one line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from pipelines import accounts, controls, curves, report, sections
from pipelines.audit import audit
from pipelines.comparisons import change, paired_interval, verdict
from pipelines.figures import Drawing
from pipelines.recall_section import Answers, recall
from pipelines.reported import length_curves
from pipelines.results import ReportError, Result, load_results
from pipelines.tables import number
from tests.pipelines.stage_outputs import CONTEXTS, MODELS, write_model


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Results of every made-up model, and the report on them."""
    root = tmp_path_factory.mktemp("results")
    for name in MODELS:
        write_model(root, name)
    assert report.main(_arguments(root)) == 0
    return root


@pytest.fixture(scope="module")
def results(root) -> list[Result]:
    return load_results(root / "artifacts", root / "evaluations")


def _arguments(root: Path) -> list[str]:
    return [word for name in ("artifacts", "evaluations") for word in (f"--{name}", str(root / name))] + [
        "--output", str(root / "reports"),
    ]  # fmt: skip


def _text(section: sections.Section) -> str:
    """Everything a section says."""
    return report.markdown(report.Report("", [], [section]))


def test_the_page_needs_nothing_but_itself(root):
    page = root / "reports" / "index.html"
    text = page.read_text("utf-8")
    assert page.stat().st_size < 6e6
    assert not re.findall(r"<script|<link|<iframe|@import|src=|url\((?!#)", text)
    assert not re.findall(r'href="(?!#)', text)
    anchors = {anchor[1:] for anchor in re.findall(r'href="(#[a-z]+)"', text)}
    assert anchors == set(re.findall(r'<section id="([a-z]+)"', text))
    assert len(anchors) == 10


def test_every_perplexity_carries_its_run(root, results):
    text = (root / "reports" / "index.html").read_text("utf-8")
    for result in results:
        tip = re.escape(result.provenance)
        for word in ("run ", "seed 0", "commit cccccccc", "data dddddddd"):
            assert word in result.provenance
        for protocol in ("fixed_targets", "window_mean"):
            for value in result.perplexity(protocol).values():
                assert re.search(f'title="{tip}">(<strong>)?{re.escape(number(value))}<', text)


def test_markdown_shows_the_figures_beside_it(root):
    text = (root / "reports" / "report.md").read_text("utf-8")
    figures = re.findall(r"!\[([^]]+)\]\(([^)]+)\)", text)
    names = ["context", "controls", "position", "training"]
    assert [name for _, name in figures] == [f"figures/{name}.png" for name in names]
    for words, name in figures:
        assert len(words) > 40
        assert (root / "reports" / name).read_bytes().startswith(b"\x89PNG")


def test_again_the_same_bytes_and_a_terminal_that_ends_with_the_path(root, capsys):
    before = _files(root / "reports")
    assert report.main(_arguments(root)) == 0
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == str(root / "reports" / "index.html")
    assert output == (root / "reports" / "summary.txt").read_text("utf-8")
    assert [output.count(f" {context:,} ") for context in CONTEXTS] == [len(MODELS)] * len(CONTEXTS)
    assert _files(root / "reports") == before
    assert set(before) >= {"index.html", "report.md", "summary.txt", "figures/context.png", "figures/context.svg"}


def _files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_report_survives_a_failing_one(root, monkeypatch, capsys):
    before = (root / "reports" / "index.html").read_bytes()

    def full(self):
        raise OSError(28, "No space left on device", "context.png")

    monkeypatch.setattr(Drawing, "png", full)
    assert report.main(_arguments(root)) == 1
    assert capsys.readouterr().err == "error: No space left on device: context.png\n"
    assert (root / "reports" / "index.html").read_bytes() == before
    assert not list((root / "reports").rglob(".*"))


def test_ours_and_the_papers_numbers_never_share_axes(results):
    figure = next(block for block in sections.context(results).blocks if isinstance(block, Drawing)).figure
    same, mean, paper = (
        {round(float(y), 6) for line in axes.lines for y in np.ravel(line.get_ydata()) if y > 1} for axes in figure.axes
    )
    assert paper == {round(y, 6) for curve in length_curves() for y in curve.perplexity.values()}
    assert same == {round(y, 6) for r in results for y in r.perplexity("fixed_targets").values()}
    assert mean == {round(y, 6) for r in results for y in r.perplexity("window_mean").values()}
    assert not paper & (same | mean)


def test_the_papers_figures_are_theirs():
    found = {(curve.model, curve.size): curve.perplexity for curve in length_curves()}
    assert found["mela", "400m"] == {1024: 12.53, 4096: 12.01, 8192: 12.64, 16384: 14.43, 32768: 14.50}
    assert found["transformer_pp", "1b2"][32768] == 597.37
    assert len(found) == 6


@pytest.mark.parametrize(
    ("factor", "spread", "said"),
    [
        (1.05, 0.01, "its own memory helps on these documents"),
        (0.95, 0.01, "it does better on these documents without its own memory"),
        (1.05, 0.5, "no effect stands out"),
    ],
)
def test_the_memory_is_judged_in_both_directions(results, factor, spread, said):
    mela = _with_control(results[-1], factor, spread)
    (sentence,) = controls.findings([mela])[:1]
    assert said in sentence
    assert sentence.startswith("Mela tiny, memory zeroed, at 4,096 tokens: perplexity ")
    assert "over 6 documents" in sentence


def _with_control(result: Result, factor: float, spread: float) -> Result:
    """The result with another effect of the control `zero`, more or less alike over documents."""
    documents = result.documents.copy()
    on = documents[documents.control == "on"].set_index(["document", "context", "protocol"]).loss_sum
    zero = documents.control == "zero"
    keys = pd.MultiIndex.from_frame(documents.loc[zero, ["document", "context", "protocol"]])
    noise = spread * np.cos(3 * documents.loc[zero, "document"])
    noise -= noise.groupby(documents.loc[zero, "context"]).transform("mean")
    documents.loc[zero, "loss_sum"] = on.loc[keys].to_numpy() + 256 * (np.log(factor) + noise)
    values = {n: factor * p for n, p in result.evaluation["fixed_targets"]["on"].items()}
    evaluation = result.evaluation | {"fixed_targets": result.evaluation["fixed_targets"] | {"zero": values}}
    return replace(result, evaluation=evaluation, documents=documents)


def test_flatness_is_credited_to_local_attention_where_that_does_as_well(results):
    local, full = results[1:3], results[0]
    assert "a flat curve is no evidence for the memory" in controls.findings([full, *local, results[-1]])[1]
    assert "local attention alone does not explain" in controls.findings([_rename(full), *local])[1]
    assert "stays open" in controls.findings([full, results[-1]])[1]


def _rename(result: Result) -> Result:
    """The full Transformer++ with a switch on a memory, and better than any local one."""
    lower = {n: 0.5 * p for n, p in result.evaluation["fixed_targets"]["on"].items()}
    documents = result.documents.assign(loss_sum=result.documents.loss_sum - 256 * np.log(2))
    documents = pd.concat([documents, documents.assign(control="zero")])
    evaluation = result.evaluation | {"fixed_targets": {"on": lower, "zero": lower}}
    return replace(result, evaluation=evaluation, documents=documents)


def test_a_change_is_the_paired_interval_over_documents(results):
    base, arm = results[0], results[-1]
    found = change(arm, base, 4096, "reset")
    losses = [r.document_losses("fixed_targets", c, 4096).loss for r, c in ((arm, "reset"), (base, "on"))]
    expected = stats.ttest_rel(*losses).confidence_interval()
    assert found.interval is not None
    assert found.interval.low == pytest.approx(np.expm1(expected.low))
    assert found.interval.high == pytest.approx(np.expm1(expected.high))
    assert found.value == pytest.approx(52.3 * 1.004 / 73.3 - 1)


def test_weights_of_documents_are_those_of_a_ratio_estimate():
    rng = np.random.default_rng(0)
    weights = rng.integers(1, 5, 12)
    differences = rng.normal(0.3, 1, 12)
    found = paired_interval(differences, weights)
    totals, mean = weights * differences, weights.mean()
    ratio = totals.sum() / weights.sum()
    variance = np.sum((totals - ratio * weights) ** 2) / 11 / 12 / mean**2
    assert found.mean == pytest.approx(ratio)
    assert found.high - found.low == pytest.approx(2 * stats.t.ppf(0.975, 11) * np.sqrt(variance))


def test_no_verdict_below_three_seeds(results):
    assert verdict(results[-1], results) == "not shown (1 seed)"
    seeds = [replace(r, training=r.training | {"seed": seed}) for seed in range(3) for r in results]
    assert verdict(results[-1], seeds[:8]) == "not shown (2 seeds)"
    assert "3 seeds" in verdict(results[-1], seeds)


def test_positions_with_too_few_tokens_are_not_drawn(results):
    few = [replace(result, positions=result.positions.assign(tokens=127)) for result in results]
    assert "raise `evaluate.windows`" in _text(curves.position(few))


def test_nothing_is_compared_without_a_baseline(results):
    assert "nothing to compare with" in _text(sections.headline(results[1:], []))


def test_recall_stands_out_only_beyond_luck(results):
    said = _text(recall(results))
    assert "Above chance somewhere: Mela tiny." in said
    assert "| facts | 1 chunk later | 448 | 3.1% | 3.1% | 3.1% | 3.1% | **100.0%** |" in said
    assert said.count("**") == 4, "the title and one accuracy"
    assert "No model is shown to recall above chance" in _text(recall(results[:-1]))
    without = [replace(r, evaluation={k: v for k, v in r.evaluation.items() if k != "recall"}) for r in results]
    assert "Not measured" in _text(recall(without))


def test_luck_is_counted_over_the_whole_table():
    lucky = Answers("MQAR", "512 tokens", 6 / 64, 64)  # at a chance of 1/32: p = 0.014
    assert lucky.beats(1 / 32, 0.05)
    assert not lucky.beats(1 / 32, 0.05 / 60)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 999_424}, "training tokens"),
        ({"commit": "a" * 40}, "commit of training"),
        ({"code_digest": "a" * 64}, "code of Transformer++"),
        ({"seed": 1}, "seed"),
        ({"dirty": True}, "no uncommitted changes"),
        ({"parameters": 1_100_000}, "parameters within 1% of"),
    ],
)
def test_the_audit_names_what_is_not_equal(results, change, named):
    assert "All that is listed here as due to be equal is" in _text(audit(results))
    other = replace(results[0], training=results[0].training | change)
    first, *_ = audit([other, *results[1:]]).blocks
    assert isinstance(first, str)
    assert first.startswith("Not in every respect")
    assert named in first


def test_limits_say_how_small_this_is(results):
    text = _text(accounts.limits(results))
    assert "1 seed per model" in text
    assert "1.05M tokens; the Mela paper's smallest has 400M" in text


def _unevaluate(root):
    for folder in (root / "evaluations").iterdir():
        (folder / "metrics.json").unlink()


def _remove(path):
    return lambda root: (root / path).unlink()


def _write(path, text):
    return lambda root: (root / path).write_text(text)


def _other_weights(root):
    path = root / "evaluations/mela_tiny/metrics.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fingerprint": "b" * 64}))


BROKEN = {
    "no evaluation": (_unevaluate, "no evaluation in"),
    "no weights": (_remove("artifacts/mela_tiny/config.json"), "artifacts/mela_tiny/config.json is missing"),
    "no loss": (_remove("artifacts/mela_tiny/loss.csv"), "artifacts/mela_tiny/loss.csv is missing"),
    "no positions": (_remove("evaluations/mela_tiny/positions.csv"), "positions.csv is missing"),
    "no documents": (_remove("evaluations/mela_tiny/documents.parquet"), "documents.parquet is missing"),
    "half a file": (_write("evaluations/mela_tiny/metrics.json", '{"model": '), "metrics.json cannot be read"),
    "not a table": (_write("evaluations/mela_tiny/documents.parquet", "x"), "documents.parquet cannot be read"),
    "an empty table": (_write("artifacts/mela_tiny/loss.csv", ""), "loss.csv cannot be read"),
    "fields missing": (_write("artifacts/mela_tiny/metrics.json", "{}"), "lacks family, seed"),
    "other weights": (_other_weights, "evaluates cell bbbbbbbb"),
    "other data": (
        lambda root: write_model(root, "mela_tiny", data="a" * 64),
        "different data are not comparable: mela_tiny on aaaaaaaa, transformer_pp_tiny on dddddddd",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_cannot_be_reported_is_one_line(case, tmp_path, capsys):
    for name in ("mela_tiny", "transformer_pp_tiny"):
        write_model(tmp_path, name)
    spoil, said = BROKEN[case]
    spoil(tmp_path)
    assert report.main(_arguments(tmp_path)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert said in error
    assert not (tmp_path / "reports").exists()


def test_a_model_without_evaluation_is_left_out_aloud(tmp_path, capsys, monkeypatch):
    for name in ("mela_tiny", "transformer_pp_tiny"):
        write_model(tmp_path, name)
    (tmp_path / "evaluations" / "mela_tiny" / "metrics.json").unlink()
    monkeypatch.setattr(report, "run", lambda *folders: (sections.measures(load_results(*folders[:2])), Path("page")))
    assert report.main(_arguments(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"left out: {tmp_path / 'artifacts' / 'mela_tiny'} is not evaluated: ")
    assert "Mela tiny" not in captured.out


def test_an_imported_model_is_left_out_aloud(tmp_path, capsys):
    for name in ("looplm_tiny", "transformer_pp_tiny"):
        write_model(tmp_path, name)
    for kind in ("artifacts", "evaluations"):
        file = tmp_path / kind / "looplm_tiny" / "metrics.json"
        unknown = dict.fromkeys(("run_id", "seed", "data_digest"))
        file.write_text(json.dumps(json.loads(file.read_text()) | unknown))
    (tmp_path / "artifacts" / "looplm_tiny" / "loss.csv").unlink()
    assert report.main(_arguments(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith(f"left out: {tmp_path / 'evaluations' / 'looplm_tiny'} is of an imported model")
    assert "LoopLM" not in captured.out


def test_a_model_evaluated_on_other_windows_is_left_out_aloud(tmp_path, capsys):
    for name in ("mela_tiny", "transformer_pp_tiny", "transformer_pp_tiny_window"):
        write_model(tmp_path, name)
    file = tmp_path / "evaluations" / "mela_tiny" / "metrics.json"
    metrics = json.loads(file.read_text())
    file.write_text(json.dumps(metrics | {"windows": metrics["windows"] | {"count": 1, "documents": 1}}))
    documents = tmp_path / "evaluations" / "mela_tiny" / "documents.parquet"
    pd.read_parquet(documents).query("document == 0").to_parquet(documents, index=False)
    assert report.main(_arguments(tmp_path)) == 0
    captured = capsys.readouterr()
    assert f"left out: {tmp_path / 'evaluations' / 'mela_tiny'} scored other windows" in captured.err
    assert "Mela tiny" not in captured.out


def test_a_model_evaluated_at_other_contexts_is_left_out_aloud(tmp_path, capsys):
    for name in ("mela_tiny", "transformer_pp_tiny", "transformer_pp_tiny_window"):
        write_model(tmp_path, name)
    folder = tmp_path / "evaluations" / "mela_tiny"
    metrics = json.loads((folder / "metrics.json").read_text())
    for measure in ("fixed_targets", "window_mean"):
        for by_context in metrics[measure].values():
            by_context.pop("1024", None)
            by_context.pop("2048", None)
    (folder / "metrics.json").write_text(json.dumps(metrics))
    documents = folder / "documents.parquet"
    pd.read_parquet(documents).query("context in (512, 4096)").to_parquet(documents, index=False)
    assert report.main(_arguments(tmp_path)) == 0
    captured = capsys.readouterr()
    assert captured.err == f"left out: {folder} scored other windows or contexts than the rest; evaluate alike\n"
    assert "Mela tiny" not in captured.out


def test_only_report_errors_are_the_users(tmp_path):
    with pytest.raises(ReportError, match="dvc repro"):
        load_results(tmp_path, tmp_path)
