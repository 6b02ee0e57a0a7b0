"""Who is called when, and where gradients flow: against recursions written out by hand, and transformers' HRM."""

import pytest
import torch
from torch import Tensor, nn

from models.mela.recursion import differentiated, recurse


class Recorded(nn.Module):
    """A smooth map that notes in a shared list that it was called, and whether with gradient."""

    def __init__(self, name: str, calls: list[str], width: int = 5) -> None:
        super().__init__()
        self.name, self.calls = name, calls
        generator = torch.Generator().manual_seed(ord(name))
        self.weight = nn.Parameter(torch.randn(width, width, dtype=torch.float64, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(self.name if torch.is_grad_enabled() else self.name.lower())
        return torch.tanh(x @ self.weight)


def modules() -> tuple[Recorded, Recorded, list[str], Tensor]:
    calls: list[str] = []
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(3, 5).requires_grad_()
    return Recorded("L", calls), Recorded("H", calls), calls, x


def gradients(output: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output.square().sum(), inputs))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("hlr", "llh llh LLH"),  # lower case: without gradient
        ("trm", "llh llh LLH"),
        ("hrm", "llh llh lLH"),
        ("titans", "H"),
    ],
)
def test_the_order_of_calls_and_their_gradients(kind, expected):
    low, high, calls, x = modules()
    states = recurse(kind, low, high, x, 3, 2)
    assert "".join(calls) == expected.replace(" ", "")
    assert len(states) == (1 if kind == "titans" else 3)
    counts = tuple(calls.count(name) for name in "lLhH")
    assert counts == differentiated(kind, 3, 2)


@pytest.mark.parametrize("kind", ["hlr", "trm"])
def test_only_the_last_cycle_is_differentiated(kind):
    """Gradients equal those of one cycle that starts from the precomputed states of the others."""
    low, high, _, x = modules()
    states = recurse(kind, low, high, x, 3, 2)
    h, l = (state.detach() for state in states[1])  # noqa: E741
    for _ in range(2):
        l = low(l + h + x)  # noqa: E741
    h = high(h + l)
    parameters = (low.weight, high.weight, x)
    assert torch.equal(states[2][0], h)
    for found, expected in zip(
        gradients(states[2][0] + states[2][1], *parameters), gradients(h + l, *parameters), strict=True
    ):
        assert torch.equal(found, expected)
        assert found.any()


def test_hrm_differentiates_the_last_call_of_each_module():
    low, high, _, x = modules()
    h, l = recurse("hrm", low, high, x, 2, 3)[0]  # noqa: E741
    with torch.no_grad():
        for _ in range(2):
            l = low(l + h + x)  # noqa: E741
    expected = high(h + low(l.detach() + h.detach() + x))
    output = recurse("hrm", low, high, x, 2, 3)[-1][0]
    parameters = (low.weight, high.weight, x)
    assert torch.equal(output, expected)
    for found, wanted in zip(gradients(output, *parameters), gradients(expected, *parameters), strict=True):
        assert torch.equal(found, wanted)


def graph_size(output: Tensor) -> int:
    seen, waiting = set(), [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [parent for parent, _ in node.next_functions]
    return len(seen)


def test_the_graph_does_not_grow_with_the_outer_cycles():
    low, high, _, x = modules()
    sizes = [graph_size(recurse("hlr", low, high, x, cycles, 2)[-1][0]) for cycles in (2, 3, 9)]
    assert sizes[0] == sizes[1] == sizes[2]


def test_the_calls_are_those_of_transformers_hrm():
    """`hrm_text` calls its modules in the same order; of the last cycle it differentiates the same calls."""
    from transformers.models.hrm_text import HrmTextConfig, HrmTextModel

    config = HrmTextConfig(vocab_size=11, hidden_size=8, num_attention_heads=2, H_cycles=3, L_cycles=2, L_bp_cycles=[1])
    model = HrmTextModel(config)
    calls: list[str] = []
    for module, name in ((model.L_module, "L"), (model.H_module, "H")):
        module.register_forward_hook(
            lambda *_, name=name: calls.append(name if torch.is_grad_enabled() else name.lower())
        )
    model(torch.arange(5)[None])
    low, high, ours, x = modules()
    recurse("hrm", low, high, x, 3, 2)
    assert [name.lower() for name in calls] == [name.lower() for name in ours]
    assert calls[-3:] == ours[-3:] == ["l", "L", "H"]
