"""LoopLM against Gemma2 called once per loop, and its objective written out."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import Gemma2Config, Gemma2Model

from models import build_model, preset
from models.language_model import state_bytes
from models.looped.looplm import LoopLM

SHAPE: dict[str, Any] = {"vocab_size": 31, "width": 16, "layers": 2, "loops": 3, "heads": 4, "hidden": 24}


def build(**fields: Any) -> LoopLM:
    model = build_model(preset("looplm_tiny", **{**SHAPE, **fields}), seed=1)
    assert isinstance(model, LoopLM)
    return model


def tokens(length: int = 12, batch: int = 2) -> torch.Tensor:
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(0))


def gemma(model: LoopLM) -> Gemma2Model:
    """The same layers and closing norm; Gemma multiplies its embeddings by sqrt(width) and adds 1 to norm weights."""
    config = model.config
    reference = Gemma2Model(
        Gemma2Config(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.groups,
            head_dim=config.head_width,
            query_pre_attn_scalar=config.head_width,
            hidden_activation="silu",
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            layer_types=["full_attention"] * config.layers,
            use_cache=False,
        )
    )
    names = {
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "o_proj": "self_attn.o_proj",
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
        "mlp.gate_proj": "mlp.gate_proj",
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    }
    state = {"embed_tokens.weight": model.embedding.weight, "norm.weight": model.norm.weight - 1}
    for i, layer in enumerate(model.layers):
        for ours, theirs in names.items():
            weight = layer.get_parameter(f"{ours}.weight")
            state[f"layers.{i}.{theirs}.weight"] = weight - 1 if "norm" in ours else weight
    reference.load_state_dict({name: tensor.detach() for name, tensor in state.items()})
    return reference


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_every_loop_is_a_pass_through_gemma2(kv_heads):
    model = build(kv_heads=kv_heads)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
    reference = gemma(model)
    with torch.no_grad():
        x = model.embedding(tokens())
        for state in model.loop_states(tokens()):
            x = reference(inputs_embeds=x).last_hidden_state
            torch.testing.assert_close(state, x, rtol=0, atol=1e-5)


@torch.no_grad()
def test_logits_of_every_loop_end_with_those_of_forward():
    model = build()
    logits = model.loop_logits(tokens())
    assert logits.shape == (3, 2, 12, 31)
    assert torch.equal(logits[-1], model(tokens()))


def test_the_objective_written_out():
    model = build(exit_entropy=0.05).double()
    inputs, targets = tokens()[:, :-1], tokens()[:, 1:]
    loss, scalars = model.training_loss(inputs, targets)
    gradients = torch.autograd.grad(loss, list(model.parameters()))

    states = model.loop_states(inputs)
    gate = model.exit_gate
    assert gate is not None
    first, second = torch.sigmoid(gate(states[0]))[..., 0], torch.sigmoid(gate(states[1]))[..., 0]
    p = torch.stack([first, (1 - first) * second, (1 - first) * (1 - second)])
    losses = torch.stack(
        [functional.cross_entropy(model.head(state).transpose(1, 2), targets, reduction="none") for state in states]
    )
    entropy = -(p * p.log()).sum(0)
    expected = ((p * losses).sum(0) - 0.05 * entropy).mean()
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(model.parameters())), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    for loop in range(3):
        assert scalars[f"cross_entropy/loop_{loop + 1}"].item() == pytest.approx(losses[loop].mean().item())
        assert scalars[f"exit_probability/loop_{loop + 1}"].item() == pytest.approx(p[loop].mean().item())


@torch.no_grad()
def test_leaving_early_takes_the_logits_of_that_loop():
    whole, leaving = build(), build(exit_threshold=0.6)
    states = whole.loop_states(tokens())
    p = torch.sigmoid(whole.exit_logits(states))
    cumulated = torch.stack([p[0], p[0] + (1 - p[0]) * p[1], torch.ones_like(p[0])])
    loop = (cumulated >= 0.6).int().argmax(0)
    assert len(set(loop.flatten().tolist())) > 1
    expected = whole.loop_logits(tokens()).gather(0, loop[None, ..., None].expand(1, 2, 12, 31))[0]
    torch.testing.assert_close(leaving(tokens()), expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_state_grows_with_the_loops():
    sizes = []
    for loops in (1, 2, 3):
        model = build(loops=loops)
        _, state = model.extend(tokens(), model.init_state(2))
        sizes.append(state_bytes(state))
    assert sizes == [sizes[0], 2 * sizes[0], 3 * sizes[0]]


def test_one_loop_has_no_exit_gate():
    model = build(loops=1)
    loss, _ = model.training_loss(tokens()[:, :-1], tokens()[:, 1:])
    loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_ouro_on_the_meta_device():
    with torch.device("meta"):
        model = build_model(preset("ouro_1b4"))
    assert model.cost(1).total_parameters == 1_434_652_673
    assert model.cost(1).total_parameters == sum(parameter.numel() for parameter in model.parameters())
