import pytest
import torch
from torch import Tensor
from torch.nn import functional

from models.mela.config import MelaConfig
from models.mela.hierarchical_memory import Fusion, HierarchicalMemory, PatchEncoder


def config_of(**fields) -> MelaConfig:
    shape = {"vocab_size": 31, "width": 16, "patch_size": 2, "memory_chunk": 3, "text_chunk": 8, "memory_tokens": 4}
    heads = {"heads": 2, "memory_heads": 2, "decoder_heads": 2, "hidden": 24, "h_blocks": 1}
    return MelaConfig(**{**shape, **heads, **fields})  # type: ignore[arg-type]


def memory_of(**fields) -> HierarchicalMemory:
    torch.manual_seed(0)
    return HierarchicalMemory(config_of(**fields)).double()


def rows(batch: int, length: int, width: int = 16) -> Tensor:
    return torch.randn(batch, length, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_patches_are_a_strided_convolution():
    encoder, x = PatchEncoder(6, 3).double(), rows(2, 12, 6)
    kernel = encoder.conv.weight.view(6, 3, 6).transpose(1, 2)  # [out, in, P]
    expected = functional.conv1d(x.mT, kernel, stride=3).mT
    torch.testing.assert_close(encoder(x), functional.rms_norm(expected, (6,), eps=1e-6))


def test_fusion():
    h, l = rows(1, 3, 4), rows(2, 3, 4)[1:]  # noqa: E741
    mlp = Fusion(4, "mlp").double()
    hidden = functional.silu(torch.cat((h, l), -1) @ mlp.up_proj.weight.mT)
    torch.testing.assert_close(mlp(h, l), hidden @ mlp.down_proj.weight.mT)
    torch.testing.assert_close(Fusion(4, "weighted_sum").double()(h, l), (h + l) / 2)


def test_hlr_written_out():
    """Two cycles of two low calls; every call starts from the initial memories; both cycles are fused."""
    memory, x = memory_of(patch_skip=False), rows(2, 7)
    module = memory.l_module
    assert module is not None
    assert memory.fusion is not None

    def low(x):
        return module(x, module.init_state(2), 2)[0]

    def high(x):
        return memory.h_module(x, memory.h_module.init_state(2), 2)[0]

    h = l = x  # noqa: E741
    expected = []
    for _ in range(2):
        l = low(low(l + h + x) + h + x)  # noqa: E741
        h = high(h + l)
        expected.append(memory.fusion(h, l))
    z, _ = memory(x, memory.init_state(2), 2)
    torch.testing.assert_close(z, torch.stack(expected))


def test_fusion_is_trained_by_cycles_that_are_not_differentiated():
    memory, x = memory_of(patch_skip=False), rows(2, 7).requires_grad_()
    assert memory.fusion is not None
    z, _ = memory(x, memory.init_state(2), 2)
    z[0].sum().backward()
    assert memory.fusion.up_proj.weight.grad is not None
    assert memory.fusion.up_proj.weight.grad.any()
    others = [x.grad, *(p.grad for name, p in memory.named_parameters() if not name.startswith("fusion"))]
    assert not any(gradient.any() for gradient in others if gradient is not None)


def test_the_patch_skip_adds_a_map_of_the_patch_to_the_last_state():
    memory, x = memory_of(), rows(2, 7)
    z, _ = memory(x, memory.init_state(2), 2)
    assert memory.skip is not None
    with torch.no_grad():
        skipped = memory.skip(x)
        memory.skip.weight.zero_()
    without, _ = memory(x, memory.init_state(2), 2)
    torch.testing.assert_close(z[1] - without[1], skipped)
    assert torch.equal(z[0], without[0])


@pytest.mark.parametrize("recursion", ["hrm", "trm", "titans"])
def test_only_hlr_hands_on_the_fast_state(recursion):
    memory = memory_of(recursion=recursion)
    assert memory.fusion is None
    assert (memory.l_module is None) == (recursion != "hrm")
    assert len(memory.init_state(1)) == (1 if recursion == "titans" else 6)


@pytest.mark.parametrize("recursion", ["hlr", "hrm", "trm", "titans"])
def test_every_call_keeps_its_own_memories(recursion):
    """A text read in two parts, split at a chunk boundary, gives what it gives at once."""
    memory, x = memory_of(recursion=recursion, memory_depth=2), rows(2, 8)
    z, _ = memory(x, memory.init_state(2), 2)
    first, state = memory(x[:, :3], memory.init_state(2), 1)
    second, state = memory(x[:, 3:], state, 1)
    torch.testing.assert_close(torch.cat((first, second), dim=2), z)
    weights = [call[0].weights for call in state if call[0] is not None]
    assert all(not torch.equal(one, other) for i, one in enumerate(weights) for other in weights[:i])


@pytest.mark.parametrize("recursion", ["hlr", "hrm", "trm", "titans"])
def test_no_patch_reaches_an_earlier_one(recursion):
    memory, x = memory_of(recursion=recursion, h_cycles=3), rows(1, 8)
    z, _ = memory(x, memory.init_state(1), 2)
    for t in range(8):
        changed = x.clone()
        changed[0, t] += 1
        again, _ = memory(changed, memory.init_state(1), 2)
        assert torch.equal(again[:, :, :t], z[:, :, :t])
        assert not torch.equal(again[:, :, t], z[:, :, t])
