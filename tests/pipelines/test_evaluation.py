"""The tables of an evaluation, on toys with closed-form losses and on a real model with local attention."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from models import build_model, preset
from models.configuration import ConfigError
from models.language_model import CausalLM
from pipelines.config import EvaluateConfig
from pipelines.evaluation import Evaluation, HeldOut, evaluate_model
from pipelines.protocol import Window, score
from tests.pipelines.toys import VOCAB, Bigram, Positional, positional_loss

SEPARATOR = VOCAB - 1
BYTES = np.array([*range(1, VOCAB), 0])  # token t stands for t + 1 bytes, the separator for none


def text_of(*lengths: int) -> HeldOut:
    random = np.random.default_rng(0)
    return HeldOut([np.append(random.integers(SEPARATOR, size=n), SEPARATOR).astype(np.uint16) for n in lengths], BYTES)


def config_of(**fields: object) -> EvaluateConfig:
    values = {
        "contexts": (8, 16, 32),
        "score_tokens": 4,
        "windows": 6,
        "controls": True,
        "recall": True,
        "timing": True,
    }
    return EvaluateConfig(**(values | fields))  # type: ignore[arg-type]


TEXT = text_of(70, 20, 33, 64)  # windows of 32: two, none, one, two


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate_model(Positional(), TEXT, config_of(), batch_tokens=64)


def test_targets_are_the_tokens_that_follow_in_their_document(evaluation: Evaluation) -> None:
    assert sorted(evaluation.windows, key=lambda w: (w.document, w.start)) == [
        Window(0, 0), Window(0, 32), Window(2, 0), Window(3, 0), Window(3, 32),
    ]  # fmt: skip
    for row, window in enumerate(evaluation.windows):
        targets = TEXT.documents[window.document][window.start + 1 : window.start + 33].astype(int)
        assert evaluation.byte_counts[row].tolist() == BYTES[targets].tolist()
        for context in (8, 16, 32):
            expected = [positional_loss(i % context, int(target)) for i, target in enumerate(targets)]
            assert evaluation.losses["on"][context][row].tolist() == pytest.approx(expected, abs=1e-4)


def test_the_last_target_of_a_document_may_be_its_separator(evaluation: Evaluation) -> None:
    last = next(row for row, window in enumerate(evaluation.windows) if window == Window(3, 32))
    assert evaluation.byte_counts[last, -1] == 0


def test_metrics_are_perplexities_by_control_and_context(evaluation: Evaluation) -> None:
    metrics = evaluation.metrics()
    assert list(metrics["window_mean"]) == ["on", "shuffle"]
    assert list(metrics["fixed_targets"]["on"]) == ["8", "16", "32"]
    assert list(metrics["window_mean"]["on"]) == ["8", "16", "32"]
    losses = evaluation.losses["on"][16].double()
    assert metrics["window_mean"]["on"]["16"] == pytest.approx(losses.mean().exp().item())
    assert metrics["fixed_targets"]["on"]["16"] == pytest.approx(losses[:, -4:].mean().exp().item())
    assert metrics["windows"] == {"count": 5, "documents": 3, "tokens": 160, "score_tokens": 20}


def test_bits_per_byte_divide_by_the_bytes_of_the_scored_text() -> None:
    evaluation = evaluate_model(Bigram(), TEXT, config_of(), batch_tokens=64)
    losses = evaluation.losses["on"][8].double()
    expected = losses.sum().item() / math.log(2) / evaluation.byte_counts.sum().item()
    assert evaluation.metrics()["bits_per_byte"] == pytest.approx({"8": expected, "16": expected, "32": expected})


def test_documents_and_contexts_add_up_to_the_metrics(evaluation: Evaluation) -> None:
    metrics, documents = evaluation.metrics(), evaluation.document_rows()
    assert len(documents) == 3 * (3 + 3 + 3 + 1)  # documents x contexts of each control and protocol
    by_column = {
        f"{protocol}{suffix}": (protocol, control)
        for protocol in ("window_mean", "fixed_targets")
        for suffix, control in (("", "on"), ("_shuffle", "shuffle"))
    }
    stated = [
        (row["context"], *by_column[key], row[key])
        for row in evaluation.context_rows()
        for key in set(row) - {"context"}
    ]
    assert len(stated) == 3 + 3 + 3 + 1
    for context, protocol, control, perplexity in stated:
        key = {"control": control, "protocol": protocol, "context": context}
        parts = [part for part in documents if key.items() <= part.items()]
        tokens, loss_sum = (sum(part[name] for part in parts) for name in ("tokens", "loss_sum"))
        assert metrics[protocol][control][str(context)] == perplexity == pytest.approx(math.exp(loss_sum / tokens))
        assert tokens == {"window_mean": 160, "fixed_targets": 20}[protocol]
        assert [part["document"] for part in parts] == [0, 2, 3]


def test_positions_are_those_of_the_longest_context_and_of_the_stream(evaluation: Evaluation) -> None:
    positions = evaluation.position_rows()
    assert {row["kind"] for row in positions} == {"position", "stream"}  # this toy has no text chunk
    window = [row for row in positions if row["kind"] == "position" and row["control"] == "on"]
    assert {row["context"] for row in window} == {32}
    assert [row["start"] for row in window] == [0, 1, 2, 4, 8, 16]
    assert sum(row["tokens"] for row in window) == 160
    first = evaluation.losses["on"][32][:, 0].double()
    assert window[0]["perplexity"] == pytest.approx(first.mean().exp().item())


def test_a_state_that_stays_small_is_streamed_through_the_longest_document(evaluation: Evaluation) -> None:
    targets = TEXT.documents[0][1:71].astype(int)
    assert evaluation.streamed is not None
    expected = [positional_loss(i, int(target)) for i, target in enumerate(targets)]
    assert evaluation.streamed[0].tolist() == pytest.approx(expected, abs=1e-4)
    capped = evaluate_model(Positional(), text_of(900, 40), config_of(contexts=(8,)), batch_tokens=32)
    assert capped.metrics()["streaming"]["tokens"] == 64


def test_a_growing_state_is_not_streamed() -> None:
    tiny = {"vocab_size": VOCAB, "width": 16, "heads": 2, "layers": 1, "hidden": 16}
    config = config_of(contexts=(8, 16), windows=2)
    for fields, streams in (({}, False), ({"chunk": 5}, True), ({"window": 5}, True)):
        model = build_model(preset("transformer_pp_tiny", **tiny, **fields))
        evaluation = evaluate_model(model, text_of(64), config, batch_tokens=16)
        assert ("streaming" in evaluation.metrics()) == streams
    chunked = build_model(preset("transformer_pp_tiny", **tiny, chunk=4))
    positions = evaluate_model(chunked, text_of(64), config, batch_tokens=16).position_rows()
    assert [row["start"] for row in positions if row["kind"] == "chunk"] == [0, 1, 2, 3]


def test_only_attention_inside_chunks_makes_text_chunks() -> None:
    """A MELT's chunks are how it trains: its tokens see all before, so it is measured as its teacher is."""
    shape = {"vocab_size": VOCAB, "width": 16, "layers": 1, "loops": 2, "heads": 2, "hidden": 16}
    config = config_of(controls=False)
    looped = {"looplm_tiny": {}, "melt_tiny": {"chunk": 8}}
    for model in (build_model(preset(name, **shape, **fields)) for name, fields in looped.items()):
        evaluation = evaluate_model(model, TEXT, config, batch_tokens=64)
        assert evaluation.chunk is None
        assert not [row for row in evaluation.position_rows() if row["kind"] == "chunk"]
    local = (small("mela_tiny"), small("transformer_pp_tiny", chunk=8), small("transformer_pp_tiny"))
    assert [evaluate_model(model, TEXT, config, 64).chunk for model in local] == [8, 8, None]


SMALL = {
    "transformer_pp_tiny": {"layers": 2, "heads": 2},
    "mela_tiny": {
        "patch_size": 2,
        "memory_chunk": 2,
        "text_chunk": 8,
        "memory_tokens": 4,
        "heads": 2,
        "memory_heads": 2,
    }
    | {"decoder_heads": 2, "decoder_layers": 2},
}


def small(name: str, **fields: int) -> CausalLM:
    return build_model(preset(name, **{"vocab_size": VOCAB, "width": 16, "hidden": 16} | SMALL[name] | fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("transformer_pp_tiny", {}),
        ("transformer_pp_tiny", {"window": 5}),
        ("transformer_pp_tiny", {"chunk": 5}),
        ("mela_tiny", {}),
    ],
)
def test_streamed_losses_are_those_of_forward(name: str, fields: dict[str, int]) -> None:
    model = small(name, **fields).eval()
    windows = torch.randint(VOCAB, (2, 65), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(score(model, windows, 64, 14), score(model, windows, 64, 1000), atol=1e-4, rtol=0)


def test_controls_of_mela_change_what_its_memory_adds() -> None:
    """Without memory, context before the text chunk changes nothing; with it, every control gives other losses."""
    losses = evaluate_model(small("mela_tiny"), TEXT, config_of(), batch_tokens=64).losses
    assert list(losses) == ["on", "zero", "reset", "shuffle"]
    assert all(not torch.equal(losses["on"][32], losses[control][32]) for control in ("zero", "reset", "shuffle"))
    torch.testing.assert_close(losses["zero"][16][:, -4:], losses["zero"][32][:, -4:], atol=1e-5, rtol=0)
    assert (losses["on"][16][:, -4:] - losses["on"][32][:, -4:]).abs().max() > 1e-4


def test_every_control_is_evaluated_on_request_only() -> None:
    model, seen = Positional(), []
    off = evaluate_model(model, TEXT, config_of(controls=False), 64, lambda scored, total: seen.append((scored, total)))
    assert list(off.losses) == ["on"]
    assert {control for _, control, _ in model.calls} == {"on"}
    assert sum(scored for scored, _ in seen) == seen[0][1] == 3 * 5 * 32 + 70
    evaluate_model(model, TEXT, config_of(), 64)
    assert {control for _, control, _ in model.calls} == {"on", "shuffle"}
    assert model.control == "on"


def test_controls_are_scored_where_the_fixed_targets_need_it(evaluation: Evaluation) -> None:
    """The toy ignores its control, so the losses of the last pieces must be those of normal operation."""
    metrics = evaluation.metrics()
    assert metrics["fixed_targets"]["shuffle"] == metrics["fixed_targets"]["on"]
    assert metrics["window_mean"]["shuffle"] == {"32": metrics["window_mean"]["on"]["32"]}
    for context in (8, 16, 32):
        assert torch.equal(evaluation.losses["shuffle"][context], evaluation.losses["on"][context][:, -context:])


def test_shuffle_with_one_window_and_short_documents_are_refused_before_scoring() -> None:
    model = Positional()
    with pytest.raises(ConfigError, match=r"shuffle needs two windows .*evaluate\.controls=false"):
        evaluate_model(model, text_of(40), config_of(), 64)
    with pytest.raises(ConfigError, match="no held-out document has 32 tokens; the longest has 31"):
        evaluate_model(model, text_of(31, 12), config_of(), 64)
    assert not model.calls


def test_evaluations_repeat_exactly() -> None:
    model = build_model(preset("transformer_pp_tiny", vocab_size=VOCAB, width=16, heads=2, layers=1, hidden=16))
    first, second = (evaluate_model(model, TEXT, config_of(), batch_tokens=64) for _ in range(2))
    assert first.metrics() == second.metrics()
    assert first.document_rows() == second.document_rows()
    assert first.position_rows() == second.position_rows()
