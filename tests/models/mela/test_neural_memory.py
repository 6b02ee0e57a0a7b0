"""The neural memory against `torch.func.grad`, a loop written out by hand, and titans-pytorch."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models.mela.inner_loss import descend, read
from models.mela.neural_memory import NeuralMemory, Rate, unit
from models.mela.newton_schulz import newton_schulz


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def fast_weights(depth: int, rows: int = 3, width: int = 4, expansion: int = 2) -> list[Tensor]:
    hidden = width if depth == 1 else expansion * width
    return [numbers(rows, width, hidden, seed=layer + 1) for layer in range(depth)]


def memory_of(width: int = 8, heads: int = 2, chunk: int = 3, **options) -> NeuralMemory:
    """A memory whose rates depend on the input, as after some training; fp64."""
    torch.manual_seed(0)
    memory = NeuralMemory(width, heads, chunk, **options).double()
    for rate in (memory.theta, memory.eta, memory.alpha):
        nn.init.normal_(rate.weight, std=0.5)
    return memory


def by_hand(memory: NeuralMemory, x: Tensor) -> Tensor:
    """`forward` as the equations say it: one row, one head, one chunk at a time, gradients by `torch.func`."""
    batch, length, _ = x.shape
    heads, k = memory.heads, memory.head_width
    outputs = torch.zeros(batch, length, heads, k, dtype=x.dtype)
    for b in range(batch):
        q, key, v = (proj(x[b]).view(length, heads, k) for proj in (memory.q_proj, memory.k_proj, memory.v_proj))
        for h in range(heads):
            weights = [layer[h].detach() for layer in memory.initial]
            momenta = [torch.zeros_like(layer) for layer in weights]
            for start in range(0, length, memory.chunk):
                part = slice(start, start + memory.chunk)
                rows, mean = x[b, part], x[b, part].mean(0)
                queries, keys = (functional.normalize(a[part, h], dim=-1) for a in (q, key))
                outputs[b, part, h] = functional.rms_norm(read([w[None] for w in weights], queries[None])[0], (k,))
                theta = memory.theta(rows)[:, h] / memory.chunk
                eta = memory.eta(mean)[h]
                alpha = memory.alpha(mean)[h] * memory.retention_bound

                def loss(*layers, keys=keys, values=v[part, h], theta=theta):
                    error = read([layer[None] for layer in layers], keys[None])[0] - values
                    return (theta * error.square().sum(-1)).sum()

                gradients = torch.func.grad(loss, argnums=tuple(range(len(weights))))(*weights)
                momenta = [eta * s - g for s, g in zip(momenta, gradients, strict=True)]
                updates = [newton_schulz(s, memory.steps) if memory.steps else s for s in momenta]
                weights = [alpha * m + u for m, u in zip(weights, updates, strict=True)]
    return memory.o_proj(outputs.flatten(2))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_closed_form_is_minus_the_gradient(depth):
    weights, keys, values = fast_weights(depth), numbers(3, 5, 4, seed=5), numbers(3, 5, 4, seed=6)
    theta = numbers(3, 5, 1, seed=7).sigmoid()

    def loss(*layers):
        return (theta * (read(layers, keys) - values).square()).sum()

    expected = torch.func.grad(loss, argnums=tuple(range(depth)))(*weights)
    descent, (error, *_) = descend(weights, keys, values, theta)
    torch.testing.assert_close(error, values - read(weights, keys))
    torch.testing.assert_close(descent, -torch.stack(expected))


@pytest.mark.parametrize(
    "options", [{}, {"depth": 2, "expansion": 2}, {"newton_schulz_steps": 0}, {"newton_schulz_steps": 1, "depth": 2}]
)
@pytest.mark.parametrize("length", [12, 10, 2])
def test_it_is_the_equations_written_out(options, length):
    memory, x = memory_of(**options), numbers(2, length, 8)
    y, _ = memory(x, memory.init_state(2), writes=-(-length // 3) - 1)
    torch.testing.assert_close(y, by_hand(memory, x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("depth", [1, 2])
def test_outer_gradients_are_the_true_ones(depth):
    """Through reads, inner gradients, momentum, Newton-Schulz and forgetting, to the input and the initial memory."""
    memory, x = memory_of(4, 1, 2, depth=depth, newton_schulz_steps=2), numbers(1, 6, 4).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: memory(x, memory.init_state(1), 2)[0], x)
    assert torch.autograd.gradcheck(
        lambda initial: torch.func.functional_call(memory, {"initial": initial}, (x, memory.init_state(1), 2))[0],
        memory.initial,
        nondet_tol=0.0,
    )


@pytest.mark.parametrize("length", [4.0**0.5, 1.0])
def test_unit_rows_have_their_length_and_their_gradient(length):
    x = numbers(2, 3, 4).requires_grad_()
    torch.testing.assert_close(unit(x, length).norm(dim=-1), torch.full((2, 3), length, dtype=torch.float64))
    assert torch.autograd.gradcheck(lambda x: unit(x, length), x)
    zero = torch.zeros(1, 4, requires_grad=True)
    unit(zero, length).sum().backward()
    assert zero.grad is not None
    assert not zero.grad.any()


def test_a_patch_does_not_read_its_own_chunk():
    memory, x = memory_of(), numbers(1, 9, 8)
    y, _ = memory(x, memory.init_state(1), writes=3)
    for t in range(9):
        changed = x.clone()
        changed[0, t] += 1
        again, _ = memory(changed, memory.init_state(1), writes=3)
        differs = (again - y).abs().amax(-1)[0] > 0
        next_chunk = (t // 3 + 1) * 3
        assert differs.nonzero().flatten().tolist() == [t, *range(next_chunk, 9)]


def test_an_unfinished_chunk_writes_nothing():
    memory, x = memory_of(), numbers(2, 8, 8)
    _, after = memory(x, memory.init_state(2), writes=2)
    _, whole = memory(x[:, :6], memory.init_state(2), writes=2)
    torch.testing.assert_close(after.weights, whole.weights)
    torch.testing.assert_close(after.momentum, whole.momentum)


def test_the_state_goes_on_where_it_was():
    memory, x = memory_of(depth=2), numbers(2, 12, 8)
    y, end = memory(x, memory.init_state(2), writes=4)
    first, state = memory(x[:, :6], memory.init_state(2), writes=2)
    second, state = memory(x[:, 6:], state, writes=2)
    torch.testing.assert_close(torch.cat((first, second), 1), y)
    torch.testing.assert_close(state.weights, end.weights)


def test_momentum_is_kept_raw():
    memory, x = memory_of(), numbers(1, 3, 8)
    _, state = memory(x, memory.init_state(1), writes=1)
    key, value = (proj(x).view(3, 2, 4).transpose(0, 1) for proj in (memory.k_proj, memory.v_proj))
    theta = memory.theta(x)[0].mT[..., None] / 3
    descent, _ = descend(list(memory.init_state(1).weights), functional.normalize(key, dim=-1), value, theta)
    torch.testing.assert_close(state.momentum, descent)


@pytest.mark.parametrize("steps", [0, 5])
def test_memory_stays_bounded_however_long_it_reads(steps):
    """`||M|| <= 1.2 / (1 - bound)` with Newton-Schulz; without it, a small multiple of the values it stores."""
    memory = memory_of(newton_schulz_steps=steps, retention_bound=0.9, retention_init=0.8)
    nn.init.constant_(memory.alpha.bias, 20.0)  # as much retention, momentum and learning as there can be
    nn.init.constant_(memory.theta.bias, 20.0)
    nn.init.constant_(memory.eta.bias, 3.0)
    state, x = memory.init_state(1), numbers(1, 300, 8)
    x[:, 150:] = x[:, :1]  # the same key again and again
    with torch.no_grad():
        y, state = memory(x, state, writes=100)
    assert y.isfinite().all()
    largest = torch.linalg.matrix_norm(state.weights, ord=2).max()
    assert largest < (1.2 / (1 - 0.9) if steps else 10 * memory.v_proj(x).view(1, 300, 2, 4).norm(dim=-1).max())


def test_retention_starts_at_its_initial_value():
    memory = NeuralMemory(8, 2, 3, retention_init=0.95, retention_bound=0.99)
    torch.testing.assert_close(memory.alpha(torch.randn(4, 8)) * 0.99, torch.full((4, 2), 0.95))


def test_it_learns_without_autograd():
    memory, x = memory_of(depth=2), numbers(2, 9, 8)
    y, state = memory(x, memory.init_state(2), writes=3)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            again, after = memory(x, memory.init_state(2), writes=3)
        assert torch.equal(again, y)
        assert torch.equal(after.weights, state.weights)


def test_memories_are_full_precision_under_autocast():
    memory = memory_of().float()
    x = numbers(2, 9, 8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = memory(x, memory.init_state(2), writes=3)
    assert state.weights.dtype == state.momentum.dtype == torch.float32
    exact, _ = memory(x, memory.init_state(2), writes=3)
    assert (y - exact).abs().max() < 0.1


@pytest.mark.parametrize("score", [5.0, 7.0, 9.0])
def test_a_long_retention_is_not_rounded_under_autocast(score):
    rate = Rate(8, 1, value=0.5)
    nn.init.constant_(rate.bias, score)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        retention = rate(torch.zeros(1, 8))
    retention.sum().backward()
    exact = torch.tensor(score).sigmoid()
    torch.testing.assert_close(1 - retention, (1 - exact).expand(1, 1), rtol=0.01, atol=0)
    torch.testing.assert_close(rate.bias.grad, (exact * (1 - exact)).expand(1), rtol=0.02, atol=0)


def test_the_noop_gate_leaves_memory_alone_below_its_threshold():
    memory, x = memory_of(noop_gate=True), numbers(2, 9, 8)
    assert memory.threshold is not None
    with torch.no_grad():
        memory.threshold.copy_(torch.tensor([20.0, -20.0]))  # the first head never writes, the second always
    start = memory.init_state(2)
    y, state = memory(x, start, writes=3)
    still = (state.weights == start.weights).flatten(2).all(-1)[0]
    assert still.tolist() == [True, False, True, False]
    without = memory_of()
    without.load_state_dict({name: tensor for name, tensor in memory.state_dict().items() if name != "threshold"})
    torch.testing.assert_close(without(x, start, 3)[1].weights[:, 1::2], state.weights[:, 1::2])
    y.sum().backward()
    assert memory.threshold.grad is not None
    assert memory.threshold.grad.abs().min() > 0


class OurMemory(nn.Module):
    """`silu(k W_1) W_2` or `k W`, as titans-pytorch asks for it."""

    def __init__(self, layers: list[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(layer.clone()) for layer in layers])

    def forward(self, x: Tensor) -> Tensor:
        for index, weight in enumerate(self.weights):
            x = (functional.silu(x) if index else x) @ weight
        return x


@pytest.mark.parametrize("depth", [1, 2])
def test_titans_pytorch_agrees(depth):
    """Its loss is a mean over the width, its decay one minus our retention, its reads are one patch ahead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from titans_pytorch import NeuralMemory as Titans

    width, chunk, length = 6, 4, 16
    memory = memory_of(width, 1, chunk, depth=depth, expansion=1)
    layers = [memory.initial[0, 0].detach(), *(layer[0].detach().mT for layer in memory.initial[1:])]
    theirs = Titans(
        width,
        chunk_size=chunk,
        batch_size=chunk,
        model=OurMemory(layers).float(),
        adaptive_step_transform=lambda step: step.sigmoid() * width / chunk,
        pre_rmsnorm=False,
        mem_model_norm_add_residual=False,
        spectral_norm_surprises=True,
    ).double()
    theirs.q_norm = theirs.k_norm = UnitRows()  # type: ignore[assignment]
    ours = {"to_queries": "q_proj", "to_keys": "k_proj", "to_values": "v_proj", "to_adaptive_step": "theta"}
    with torch.no_grad():
        for name, source in {**ours, "to_momentum": "eta", "to_decay_factor": "alpha"}.items():
            layer = getattr(theirs, name)
            linear = layer if isinstance(layer, nn.Linear) else layer[0]
            linear.load_state_dict(getattr(memory, source).state_dict())
        memory.retention_bound = 1.0
        for parameter in theirs.to_decay_factor.parameters():
            parameter.neg_()  # 1 - sigmoid(x) = sigmoid(-x)
    x = numbers(2, length, width)
    with torch.no_grad():
        y, after = memory(x, memory.init_state(2), writes=length // chunk)
        their_reads, their_state = theirs(x)
    for index, name in enumerate(theirs.memory_model_parameter_names):
        weights = their_state.states[0][name]
        torch.testing.assert_close(after.weights[index], weights.mT if index else weights, rtol=1e-9, atol=1e-9)
    same = torch.arange(length) % chunk != chunk - 1  # the others read a chunk that is not over
    reads = memory.o_proj(unit(their_reads, width**0.5))
    torch.testing.assert_close(y[:, same], reads[:, same], rtol=1e-9, atol=1e-9)


class UnitRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)
