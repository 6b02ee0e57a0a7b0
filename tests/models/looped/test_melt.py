"""MELT against equation 1 worked through token by token, and the identities that tie it to LoopLM and to itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models import build_model, preset
from models.configuration import ConfigError
from models.language_model import state_bytes
from models.layers import rotate
from models.looped.melt import Melt, MeltConfig, MeltLayer
from tests.models.flops import counted_flops

SHAPE: dict[str, Any] = {"vocab_size": 31, "width": 16, "layers": 2, "loops": 3, "heads": 4, "hidden": 24}
GATES = ["elementwise", "scalar", "mean", "ema", "last", "first"]


def build(dtype: torch.dtype = torch.float64, **fields: Any) -> Melt:
    model = build_model(preset("melt_tiny", **{**SHAPE, "chunk": 4, **fields}), seed=1)
    assert isinstance(model, Melt)
    return model.to(dtype)


def with_config(model: Melt, **fields: Any) -> Melt:
    """The same weights under another config."""
    assert isinstance(model.config, MeltConfig)
    other = Melt(replace(model.config, **fields)).to(model.embedding.weight.dtype)
    other.load_state_dict(model.state_dict())
    return other


def tokens(length: int = 11, batch: int = 2) -> Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(0))


def streamed(model: Melt, pieces: tuple[Tensor, ...]) -> Tensor:
    state, logits = model.init_state(pieces[0].shape[0]), []
    for piece in pieces:
        out, state = model.extend(piece, state)
        logits.append(out)
    return torch.cat(logits, dim=1)


def by_hand(model: Melt, sequence: Tensor, chunk: int) -> Tensor:
    """Logits `[T, V]` of one sequence: one token, one head, one sum at a time."""
    config, final = model.config, {}
    heads, width = config.heads, config.head_width

    def heads_of(vector: Tensor, count: int, position: int, turn: bool) -> Tensor:
        vector = vector.view(1, count, 1, width)
        return (rotate(vector, model._rope(position, 1)) if turn else vector).view(count, width)

    out = []
    for start in range(0, len(sequence), chunk):
        here = range(start, min(start + chunk, len(sequence)))
        x = {i: model.embedding(sequence[i]) for i in here}
        memory: dict[tuple[int, int], Tensor] = {}
        for loop in range(config.loops):
            for n, layer in enumerate(model.layers):
                assert isinstance(layer, MeltLayer)
                stream = {i: layer.attention_norm(x[i]) for i in here}
                for i in here:
                    if loop == 0:
                        memory[n, i] = stream[i]
                    else:
                        assert layer.gate is not None
                        z = layer.gate(stream[i], memory[n, i], loop).view(-1)
                        memory[n, i] = z * memory[n, i] + (1 - z) * stream[i]
                    final[n, i] = (
                        heads_of(layer.k_proj(memory[n, i]), config.groups, i, True),
                        heads_of(layer.v_proj(memory[n, i]), config.groups, i, False),
                    )
                for i in here:
                    queries = heads_of(layer.q_proj(stream[i]), heads, i, True)
                    attended = []
                    for head in range(heads):
                        group = head * config.groups // heads
                        keys = torch.stack([final[n, j][0][group] for j in range(i + 1)])
                        values = torch.stack([final[n, j][1][group] for j in range(i + 1)])
                        attended.append((keys @ queries[head] * width**-0.5).softmax(0) @ values)
                    x[i] = x[i] + layer.attention_out_norm(layer.o_proj(torch.cat(attended)))
                    x[i] = x[i] + layer.mlp_out_norm(layer.mlp(layer.mlp_norm(x[i])))
            x = {i: model.norm(x[i]) for i in here}
        out.extend(model.head(x[i]) for i in here)
    return torch.stack(out)


@pytest.mark.parametrize("chunk", [1, 3, None])
@pytest.mark.parametrize("fields", [{"gate": gate} for gate in GATES] + [{"kv_heads": 2}], ids=[*GATES, "grouped"])
@torch.no_grad()
def test_equation_1_worked_through_token_by_token(fields, chunk):
    model = build(chunk=chunk, **fields)
    expected = torch.stack([by_hand(model, sequence, chunk or 7) for sequence in tokens(7)])
    torch.testing.assert_close(model(tokens(7)), expected, rtol=0, atol=1e-9)


def test_training_runs_the_same_chunks_as_inference():
    model = build()
    with torch.no_grad():
        inferred = model(tokens())
    torch.testing.assert_close(model(tokens()).detach(), inferred, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
@torch.no_grad()
def test_chunk_1_training_is_cached_decoding(gate):
    model = build(gate=gate, chunk=1)
    with torch.enable_grad():
        trained = model.head(model.loop_states(tokens())[-1]).detach()
    decoding = with_config(model, chunk=64)
    torch.testing.assert_close(streamed(decoding, tokens().split(1, dim=1)), trained, rtol=0, atol=1e-9)


@pytest.mark.parametrize("chunk", [1, 2, 4, 5, 11, 20])
@torch.no_grad()
def test_forward_under_a_chunk_is_extend_fed_that_many_tokens(chunk):
    model = build(chunk=chunk)
    expected = model(tokens())
    unchunked = with_config(model, chunk=None)
    torch.testing.assert_close(streamed(unchunked, tokens().split(chunk, dim=1)), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("cuts", [(4,), (8,), (4, 8), ()])
@torch.no_grad()
def test_any_segmentation_at_chunk_boundaries_gives_the_logits_of_forward(cuts):
    model = build(chunk=4)
    torch.testing.assert_close(streamed(model, tokens().tensor_split(cuts, dim=1)), model(tokens()), rtol=0, atol=1e-9)


@torch.no_grad()
def test_evaluation_mode_has_chunks_of_its_own():
    model = build(chunk=None, inference_chunk=3)
    assert torch.equal(model.eval()(tokens()), build(chunk=3)(tokens()))
    assert model.grain == 3
    assert build(chunk=5).grain == 5


@torch.no_grad()
def test_one_loop_is_looplm_with_one_loop():
    model = build(loops=1)
    looped = build_model(preset("looplm_tiny", **{**SHAPE, "loops": 1}), seed=1).double()
    assert looped.state_dict().keys() == model.state_dict().keys()
    whole = with_config(model, chunk=None)
    torch.testing.assert_close(whole(tokens()), looped(tokens()), rtol=0, atol=1e-12)
    torch.testing.assert_close(model(tokens()), looped(tokens()), rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_gate_of_0_is_last_and_a_gate_of_1_is_first():
    model = build()
    for value, name in ((-torch.inf, "last"), (torch.inf, "first")):
        for layer in model.layers:
            layer.get_parameter("gate.b_z").fill_(value)
        fixed = build(gate=name)
        fixed.load_state_dict({key: value for key, value in model.state_dict().items() if ".gate." not in key})
        assert torch.equal(model(tokens()), fixed(tokens()))


@torch.no_grad()
def test_live_cache_bytes_are_one_share_of_looplm_and_do_not_depend_on_the_loops():
    sizes = {}
    for loops in (1, 2, 4):
        for name in ("melt_tiny", "looplm_tiny"):
            model = build_model(preset(name, **{**SHAPE, "loops": loops}))
            _, state = model.extend(tokens(), model.init_state(2))
            sizes[name, loops] = state_bytes(state)
    assert all(sizes["melt_tiny", loops] * loops == sizes["looplm_tiny", loops] for loops in (1, 2, 4))
    assert sizes["melt_tiny", 1] == sizes["melt_tiny", 2] == sizes["melt_tiny", 4]


@torch.no_grad()
def test_decoding_writes_its_rows_in_place():
    model = build()
    state = model.init_state(2)
    _, state = model.extend(tokens(), state)
    buffers = [rows.keys.data_ptr() for rows in state.rows]
    earlier = [rows.keys[:, :, :11].clone() for rows in state.rows]
    for token in tokens(20).split(1, dim=1):
        _, state = model.extend(token, state)
    assert [rows.keys.data_ptr() for rows in state.rows] == buffers
    assert [rows.length for rows in state.rows] == [31, 31]
    assert all(torch.equal(rows.keys[:, :, :11], before) for rows, before in zip(state.rows, earlier, strict=True))


@pytest.mark.parametrize("chunk", [3, None])
@torch.no_grad()
def test_changing_a_token_changes_no_earlier_logit_inside_or_across_chunks(chunk):
    model = build(torch.float32, chunk=chunk)
    logits = model(tokens())
    for t in range(11):
        changed = tokens()
        changed[0, t] = (changed[0, t] + 1) % 31
        again = model(changed)
        assert torch.equal(again[:, :t], logits[:, :t])
        assert torch.equal(again[1], logits[1])
        assert not torch.equal(again[0, t], logits[0, t])


@torch.no_grad()
def test_permuting_rows_permutes_outputs():
    model, order = build(), torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(model(tokens(batch=4)[order]), model(tokens(batch=4))[order], rtol=0, atol=1e-12)


def test_detached_chunks_cut_the_gradient_into_earlier_ones():
    for detach in (False, True):
        model = build(detach_chunks=detach)
        sequence = torch.arange(8)[None]
        model(sequence)[0, -1].sum().backward()
        assert model.embedding.weight.grad is not None
        reaches = model.embedding.weight.grad[:8].any(dim=1).tolist()
        assert reaches == [not detach] * 4 + [True] * 4


def test_recomputed_activations_give_the_same_gradients():
    model = build()
    gradients = []
    for recompute in (False, True):
        model.recompute = recompute
        loss, _ = model.training_loss(tokens()[:, :-1], tokens()[:, 1:])
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for kept, again in zip(*gradients, strict=True):
        torch.testing.assert_close(again, kept, rtol=0, atol=1e-14)


@pytest.mark.parametrize("gate", ["elementwise", "scalar", "mean"])
@pytest.mark.parametrize("loops", [1, 3])
def test_every_parameter_has_a_gradient(gate, loops):
    model = build(gate=gate, loops=loops)
    loss, _ = model.training_loss(tokens()[:, :-1], tokens()[:, 1:])
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


@pytest.mark.parametrize(
    "fields", [{"chunk": 4, "inference_chunk": 2}, {"chunk": None, "kv_heads": 2}, {"gate": "scalar"}]
)
def test_flops_of_chunks_agree_with_the_counter(fields):
    model = build(torch.float32, **fields)
    cost = model.cost(11)
    with torch.no_grad():
        forward = counted_flops(lambda: model.eval()(tokens()))
    model.train()
    pair = tokens(12)[:, :-1], tokens(12)[:, 1:]
    training = counted_flops(lambda: model.training_loss(*pair)[0].backward())
    assert forward / 22 == pytest.approx(cost.total_forward_flops, rel=0.02)
    assert training / 22 == pytest.approx(cost.total_training_flops, rel=0.02)


@torch.no_grad()
def test_leaving_early_is_running_fewer_loops_for_that_token():
    model = build(chunk=1, exit_threshold=0.6)
    loops_taken = set()
    for sequence in tokens().split(1):
        state, logits = model.init_state(1), []
        for token in sequence.split(1, dim=1):
            for loops in (1, 2, 3):
                fewer = with_config(model, loops=loops, exit_threshold=1.0) if loops > 1 else one_loop(model)
                attempt = [type(rows)(rows.keys.clone(), rows.values.clone(), rows.length) for rows in state.rows]
                states = fewer.run_chunk(token, attempt)
                p = torch.sigmoid(model.exit_logits([*states, states[-1]]))[:, 0, 0]
                if loops == 3 or 1 - (1 - p).prod() >= 0.6:
                    break
            loops_taken.add(loops)
            state.rows = attempt
            logits.append(model.head(states[-1]))
        expected = torch.cat(logits, dim=1)
        torch.testing.assert_close(model(sequence), expected, rtol=0, atol=1e-12)
        pieces = sequence.split(1, dim=1)
        torch.testing.assert_close(streamed(model, pieces), expected, rtol=0, atol=1e-12)
    assert len(loops_taken) > 1


def one_loop(model: Melt) -> Melt:
    assert isinstance(model.config, MeltConfig)
    other = Melt(replace(model.config, loops=1, exit_threshold=1.0)).double()
    other.load_state_dict(model.state_dict(), strict=False)
    return other


@torch.no_grad()
def test_leaving_early_skips_the_compute():
    model = build(torch.float32, exit_threshold=0.9)
    assert model.exit_gate is not None
    model.exit_gate.bias.fill_(100.0)
    once = build(torch.float32, loops=1, chunk=1)

    def decode_with(model: Melt) -> int:
        _, state = model.extend(tokens(), model.init_state(2))
        return counted_flops(lambda: model.extend(tokens(1), state))

    exit_gate = 2 * 2 * model.config.width
    assert decode_with(model) == decode_with(once) + exit_gate


@torch.no_grad()
def test_when_one_sequence_leaves_changes_nothing_for_another():
    model = build(chunk=1, exit_threshold=0.6)
    logits = model(tokens())
    for t in range(11):
        changed = tokens()
        changed[0, t] = (changed[0, t] + 1) % 31
        again = model(changed)
        assert torch.equal(again[1], logits[1])
        assert torch.equal(again[0, :t], logits[0, :t])


def test_melt_on_the_meta_device():
    with torch.device("meta"):
        model = build_model(preset("melt_1b6"))
    cost = model.cost(32768)
    assert cost.total_parameters == 1_636_028_417
    assert cost.parameters["memory gate"] == 201_375_744
    assert cost.total_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk": 0}, "chunk=0 must be null or at least 1"),
        ({"gate": "elementwize"}, "did you mean 'elementwise'"),
        ({"ema": 1.5}, r"ema=1.5 must be in \[0, 1\]"),
        ({"loops": 0}, "loops=0 must be at least 1"),
        ({"kv_heads": 3}, "kv_heads=3 must divide heads=4"),
        ({"exit_threshold": 0.0}, "exit_threshold=0.0 must be above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        preset("melt_tiny", **fields)
