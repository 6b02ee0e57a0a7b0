"""Every gate against the recurrence it stands for."""

import pytest
import torch
from torch import Tensor, nn

from models.looped.gates import LearnedGate, build_gate, remember

LOOPS, WIDTH = 4, 8


def streams() -> list[Tensor]:
    """The normed layer input of one token in each loop."""
    return list(torch.randn(LOOPS, 1, 1, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64))


def memories(name: str) -> list[Tensor]:
    gate = build_gate(name, WIDTH, bias=-1.4, ema=0.2)  # type: ignore[arg-type]
    x = streams()
    memory, out = x[0], [x[0]]
    for loop in range(1, LOOPS):
        memory = remember(x[loop], memory, gate(x[loop], memory, loop))
        out.append(memory)
    return out


def draw(gate: nn.Module) -> None:
    for module in (gate, *gate.children()):
        module.reset_parameters()  # type: ignore[operator]


def test_mean_is_the_mean_of_the_loops_so_far():
    for loop, memory in enumerate(memories("mean")):
        torch.testing.assert_close(memory, torch.stack(streams()[: loop + 1]).mean(0), rtol=0, atol=1e-15)


def test_ema_unrolled():
    x = streams()
    expected = 0.008 * x[0] + 0.032 * x[1] + 0.16 * x[2] + 0.8 * x[3]
    torch.testing.assert_close(memories("ema")[-1], expected, rtol=0, atol=1e-15)


def test_last_and_first_are_exact():
    assert torch.equal(memories("last")[-1], streams()[-1])
    assert torch.equal(memories("first")[-1], streams()[0])


@pytest.mark.parametrize("values", [WIDTH, 1])
def test_learned_gates_follow_equation_1(values):
    gate = LearnedGate(WIDTH, values, bias=-1.4).double()
    draw(gate)
    x, memory = streams()[:2]
    z = torch.sigmoid(x @ gate.w_z.weight.T + memory @ gate.u_z.weight.T + gate.b_z)
    assert z.shape[-1] == values
    torch.testing.assert_close(gate(x, memory, 1), z, rtol=0, atol=1e-15)
    torch.testing.assert_close(remember(x, memory, z), z * memory + (1 - z) * x, rtol=0, atol=1e-15)


def test_a_fresh_gate_keeps_about_a_fifth():
    gate = build_gate("elementwise", 256, bias=-1.4, ema=0.2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        draw(gate)
        z = gate(torch.randn(64, 256), torch.randn(64, 256), 1)
    assert z.mean().item() == pytest.approx(0.2, abs=0.01)
