"""The two phases: where they start, what they minimise, and what they must not touch."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models import build_model, preset
from models.configuration import ConfigError
from models.looped.distillation import (
    Objective,
    alignment,
    base_rows,
    distill,
    gate_histograms,
    interpolation_weight,
    pool_heads,
    require_pair,
    start_from,
    training_flops,
)
from models.looped.looped_model import Trace
from models.looped.looplm import LoopLM
from models.looped.melt import Base, Chunks, Melt
from tests.models.flops import counted_flops

SHAPE: dict[str, Any] = {"vocab_size": 31, "width": 16, "layers": 2, "loops": 3, "heads": 4, "hidden": 24}


def teacher_of(**fields: Any) -> LoopLM:
    model = build_model(preset("looplm_tiny", **{**SHAPE, **fields}), seed=1)
    assert isinstance(model, LoopLM)
    return model.double()


def student_of(teacher: LoopLM | None, **fields: Any) -> Melt:
    model = build_model(preset("melt_tiny", **{**SHAPE, "chunk": 4, **fields}), seed=2)
    assert isinstance(model, Melt)
    model.double()
    if teacher is not None:
        start_from(model, teacher)
    return model


def tokens(length: int = 11, batch: int = 2) -> Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def interpolated_logits(student: Melt, teacher: LoopLM, weight: float) -> Tensor:
    """Logits of every loop `[R, B, T, V]`."""
    rows, state, out = [Chunks()] * student.config.layers, teacher.init_state(2), []
    for chunk in student.chunks(tokens()):
        teacher.extend_states(chunk, state)
        base = Base(base_rows(state, student.config.groups), weight)
        out.append(torch.stack(student.run_chunk(chunk, rows, base)))
    return student.head(torch.cat(out, dim=2))


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk", [1, 4, None])
@torch.no_grad()
def test_interpolation_weight_0_is_the_teacher(loops, chunk):
    teacher = teacher_of(loops=loops)
    student = student_of(teacher, loops=loops, chunk=chunk)
    logits = interpolated_logits(student, teacher, 0.0)
    torch.testing.assert_close(logits, teacher.loop_logits(tokens()), rtol=0, atol=1e-9)


@torch.no_grad()
def test_interpolation_weight_1_is_melt():
    teacher = teacher_of()
    student = student_of(teacher)
    torch.testing.assert_close(
        interpolated_logits(student, teacher, 1.0), student.loop_logits(tokens()), rtol=0, atol=1e-12
    )


@torch.no_grad()
def test_keys_and_values_are_interpolated_between_the_two():
    """One loop of one layer over two tokens, mixed by hand."""
    teacher, weight = teacher_of(layers=1, loops=1), 0.3
    student = student_of(None, layers=1, loops=1, chunk=None)
    pair = tokens(2, 1)
    state = teacher.init_state(1)
    teacher.extend_states(pair, state)
    base = base_rows(state, 4)
    (out,) = student.run_chunk(pair, [Chunks()], Base(base, weight))

    layer = student.layers[0]
    x, cos_sin = student.embedding(pair), student._rope(0, 2)
    stream = layer.attention_norm(x)  # type: ignore[operator]
    own = layer.keys_values(stream, cos_sin)  # type: ignore[operator]
    keys, values = (weight * ours + (1 - weight) * theirs for ours, theirs in zip(own, base[0][0], strict=True))
    scores = layer.queries(stream, cos_sin) @ keys.transpose(2, 3) * 4**-0.5  # type: ignore[operator]
    attended = scores.masked_fill(torch.ones(2, 2).triu(1).bool(), -torch.inf).softmax(-1) @ values
    expected = student.norm(layer.close(x, attended.transpose(1, 2).flatten(2)))  # type: ignore[operator]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_the_weight_goes_from_0_to_1_linearly():
    assert [interpolation_weight(step, 5) for step in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert interpolation_weight(0, 1) == 1.0


@pytest.mark.parametrize("every_loop", [True, False])
def test_the_divergence_is_the_mean_over_loops_and_tokens(every_loop):
    teacher = teacher_of()
    student = student_of(teacher)
    result = distill(student, teacher, tokens(), Objective(every_loop=every_loop))
    ours = student.loop_logits(tokens()).log_softmax(-1)
    theirs = teacher.loop_logits(tokens()).detach().log_softmax(-1)
    by_loop = functional.kl_div(ours, theirs, reduction="none", log_target=True).sum(-1).mean((1, 2))
    expected = by_loop.mean() if every_loop else by_loop[-1]
    torch.testing.assert_close(result.loss, expected, rtol=0, atol=1e-12)
    assert len(result.divergence) == (3 if every_loop else 1)
    assert result.divergence[-1].item() == pytest.approx(by_loop[-1].item())
    parameters = list(student.parameters())
    for ours_gradient, direct in zip(
        torch.autograd.grad(result.loss, parameters, allow_unused=True),
        torch.autograd.grad(expected, parameters, allow_unused=True),
        strict=True,
    ):
        assert (ours_gradient is None) == (direct is None)
        if direct is not None:
            torch.testing.assert_close(ours_gradient, direct, rtol=0, atol=1e-12)


def test_alignment_is_the_squared_distance_of_the_attended_values():
    ours, theirs = [torch.ones(2, 3, 4), torch.zeros(2, 3, 4)], [torch.zeros(2, 3, 4), torch.full((2, 3, 4), 2.0)]
    assert alignment(ours, theirs).item() == (4 * 1 + 4 * 4) / 2


def test_phase_2_adds_beta_times_the_alignment():
    teacher = teacher_of()
    student = student_of(teacher)
    plain, aligned = (distill(student, teacher, tokens(), Objective(alignment=beta)) for beta in (0.0, 0.1))
    assert plain.alignment.item() == 0.0
    torch.testing.assert_close(aligned.loss - plain.loss, 0.1 * aligned.alignment, rtol=0, atol=1e-12)
    told, state = Trace(), teacher.init_state(2)
    teacher.extend_states(tokens(), state, told)
    seen = [Trace() for _ in range(3)]
    rows = [Chunks()] * 2
    for chunk, trace in zip(student.chunks(tokens()), seen, strict=True):
        student.run_chunk(chunk, rows, trace=trace)
    attended = [torch.cat(parts, dim=1) for parts in zip(*(trace.attended for trace in seen), strict=True)]
    torch.testing.assert_close(aligned.alignment, alignment(attended, told.attended).detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("objective", [Objective(weight=0.4), Objective(alignment=0.1)])
def test_nothing_reaches_the_teacher(objective):
    teacher = teacher_of()
    student = student_of(teacher)
    before = {name: tensor.clone() for name, tensor in teacher.state_dict().items()}
    distill(student, teacher, tokens(), objective).loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in teacher.state_dict().items())
    missing = [name for name, parameter in student.named_parameters() if parameter.grad is None]
    assert missing == ["exit_gate.weight", "exit_gate.bias"]


@pytest.mark.parametrize("objective", [Objective(weight=0.4), Objective(alignment=0.1)])
def test_recomputed_activations_give_the_same_gradients(objective):
    teacher = teacher_of()
    student = student_of(teacher)
    gradients = []
    for recompute in (False, True):
        student.recompute = recompute
        loss = distill(student, teacher, tokens(), objective).loss
        gradients.append(torch.autograd.grad(loss, list(student.parameters()), allow_unused=True))
    for kept, again in zip(*gradients, strict=True):
        assert (kept is None) == (again is None)
        if kept is not None:
            torch.testing.assert_close(again, kept, rtol=0, atol=1e-14)


def test_the_student_starts_with_the_weights_of_its_teacher_and_its_own_gates():
    teacher = teacher_of()
    fresh, student = student_of(None).state_dict(), student_of(teacher).state_dict()
    for name, tensor in student.items():
        assert torch.equal(tensor, fresh[name] if ".gate." in name else teacher.state_dict()[name]), name


@torch.no_grad()
def test_fewer_heads_start_from_the_mean_of_a_group():
    teacher = teacher_of()
    student = student_of(teacher, kv_heads=2)
    ours, theirs = student.state_dict(), teacher.state_dict()
    heads = theirs["layers.0.k_proj.weight"].view(4, 4, 16)
    expected = torch.cat([(heads[0] + heads[1]) / 2, (heads[2] + heads[3]) / 2])
    torch.testing.assert_close(ours["layers.0.k_proj.weight"], expected, rtol=0, atol=0)

    state = teacher.init_state(2)
    teacher.extend_states(tokens(), state)
    cos_sin, stream = student._rope(0, 11), teacher.layers[0].attention_norm(teacher.embedding(tokens()))  # type: ignore[operator]
    keys, values = student.layers[0].keys_values(stream, cos_sin)  # type: ignore[operator]
    torch.testing.assert_close(base_rows(state, 2)[0][0], (keys, values), rtol=0, atol=1e-12)


def test_pooling_one_head_into_one_changes_nothing():
    x = torch.randn(2, 4, 5, 3)
    assert pool_heads(x, 4) is x


@torch.no_grad()
def test_gates_by_loop_and_layer_are_those_of_a_plain_run():
    student = student_of(teacher_of())
    scalars = distill(student, teacher_of(), tokens(), Objective()).scalars()
    assert [name for name in scalars if name.endswith("std")] == [
        f"gate/loop_{loop}/layer_{layer}/std" for loop in (2, 3) for layer in (1, 2)
    ]
    whole, traces = [Chunks()] * 2, [Trace() for _ in range(3)]
    for chunk, trace in zip(student.chunks(tokens()), traces, strict=True):
        student.run_chunk(chunk, whole, trace=trace)
    for index, gates in enumerate(zip(*(trace.gates for trace in traces), strict=True)):
        values = torch.cat(gates, dim=1)
        name = f"gate/loop_{index // 2 + 2}/layer_{index % 2 + 1}"
        assert scalars[f"{name}/mean"].item() == pytest.approx(values.mean().item(), abs=1e-6)
        assert scalars[f"{name}/std"].item() == pytest.approx(values.std(correction=0).item(), abs=1e-5)


@torch.no_grad()
def test_histograms_of_the_gates():
    student = student_of(teacher_of())
    scalars = distill(student, teacher_of(), tokens(), Objective()).scalars()
    histograms = gate_histograms(student, tokens(), bins=100)
    assert histograms.shape == (2, 2, 100)
    torch.testing.assert_close(histograms.sum(-1), torch.ones(2, 2, dtype=torch.float64))
    middles = (torch.arange(100) + 0.5) / 100
    for loop, layer in ((2, 1), (3, 2)):
        mean = (histograms[loop - 2, layer - 1] * middles).sum().item()
        assert mean == pytest.approx(scalars[f"gate/loop_{loop}/layer_{layer}/mean"].item(), abs=0.01)


@torch.no_grad()
def test_fixed_gates_have_statistics_too():
    student = student_of(None, gate="ema")
    scalars = distill(student, teacher_of(), tokens(), Objective()).scalars()
    assert scalars["gate/loop_2/layer_1/mean"].item() == pytest.approx(0.2)
    assert scalars["gate/loop_2/layer_1/std"].item() == pytest.approx(0, abs=1e-3)


@torch.no_grad()
def test_a_student_of_one_loop_has_no_gates_to_report():
    teacher = teacher_of(loops=1)
    result = distill(student_of(teacher, loops=1), teacher, tokens(), Objective())
    assert list(result.scalars()) == ["divergence/loop_1", "alignment"]
    assert result.loss.item() == pytest.approx(0, abs=1e-12)


@torch.no_grad()
def test_the_last_loop_alone_is_named_by_its_number():
    result = distill(student_of(None), teacher_of(), tokens(), Objective(every_loop=False))
    assert next(iter(result.scalars())) == "divergence/loop_3"


@pytest.mark.parametrize(
    ("fields", "same_loops", "message"),
    [
        ({"width": 32}, True, "model.width=32 does not match the teacher's width=16"),
        ({"layers": 3}, False, "model.layers=3 does not match the teacher's layers=2"),
        ({"kv_heads": 4}, True, None),
        ({"kv_heads": 2}, True, None),
        ({"loops": 2}, False, None),
        ({"loops": 2}, True, "model.loops=2 does not match the teacher's loops=3"),
    ],
)
def test_a_pair_that_does_not_match_is_refused_by_name(fields, same_loops, message):
    pair = preset("melt_tiny", **{**SHAPE, **fields}), teacher_of().config
    if message is None:
        require_pair(*pair, same_loops)  # type: ignore[arg-type]
    else:
        with pytest.raises(ConfigError, match=message):
            require_pair(*pair, same_loops)  # type: ignore[arg-type]


def test_more_key_value_heads_than_the_teacher_are_refused():
    with pytest.raises(ConfigError, match="kv_heads=4 must divide the teacher's 2"):
        require_pair(student_of(None).config, teacher_of(kv_heads=2).config, same_loops=True)


@pytest.mark.parametrize("fields", [{}, {"kv_heads": 2, "chunk": None}])
@pytest.mark.parametrize("every_loop", [True, False])
def test_flops_agree_with_the_counter(fields, every_loop):
    teacher = teacher_of()
    student = student_of(teacher, **fields)
    objective = Objective(weight=0.4, every_loop=every_loop)
    for parameter in (*teacher.parameters(), *student.exit_gate.parameters()):  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    counted = counted_flops(lambda: distill(student, teacher, tokens(), objective).loss.backward())
    assert counted / 22 == pytest.approx(training_flops(student, teacher, 11, every_loop), rel=0.02)
