"""Neural memory: per head, a small network whose weights learn key -> value pairs while the model reads.

    read    y_t = RMSNorm(f(q_t; M_{c-1}))                               for every patch t of chunk c
    loss    sum_t theta_t ||f(k_t; M_{c-1}) - v_t||^2
    write   S_c = eta_c S_{c-1} - gradient,   M_c = alpha_c M_{c-1} + NewtonSchulz(S_c)

Special here:
- the gradient is in closed form, so memory learns under `no_grad` and `inference_mode` as well;
- a patch never reads the update of its own chunk, and an unfinished chunk writes nothing;
- S is kept raw, never orthogonalised; M and S are fp32 or wider;
- the chunk loop is sequential (Newton-Schulz is not linear); rows, heads and layers share one batched product.

Source: Titans (Behrouz et al. 2025, eq. 8-14) with Mela's Newton-Schulz. Our assumptions: theta from each patch, eta
and alpha from the mean of the chunk, queries and keys of length 1, theta divided by C (the inner step then does not
grow with the chunk, and a one-layer memory without Newton-Schulz cannot diverge), SiLU in the two-layer memory.

Shapes: `B` rows, `N` patches, `D` width, `H` heads, `K = D / H`, `E` hidden width of a memory, `C` patches per chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from models.layers import Linear
from models.mela.inner_loss import read
from models.mela.memory_scan import MemoryState, write_chunks
from models.mela.newton_schulz import full_precision, newton_schulz_flops


class NeuralMemory(nn.Module):
    """`[B, N, D] -> [B, N, D]`, reading and writing its memories chunk by chunk."""

    def __init__(
        self,
        width: int,
        heads: int,
        chunk: int,
        depth: int = 1,
        expansion: int = 1,
        newton_schulz_steps: int = 5,
        retention_init: float = 0.95,
        retention_bound: float = 0.99,
        noop_gate: bool = False,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.heads, self.chunk, self.head_width = heads, chunk, width // heads
        self.steps, self.retention_bound = newton_schulz_steps, retention_bound
        self.q_proj = Linear(width, width)
        self.k_proj = Linear(width, width)
        self.v_proj = Linear(width, width)
        self.theta = Rate(width, heads, 0.5)
        self.eta = Rate(width, heads, 0.5)
        self.alpha = Rate(width, heads, retention_init / retention_bound)
        self.threshold = nn.Parameter(torch.empty(heads)) if noop_gate else None
        self.initial = nn.Parameter(torch.empty(depth, heads, self.head_width, expansion * self.head_width))
        self.o_proj = Linear(width, width, scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """M_0 as linear maps of the keys' direction; the no-op threshold low, so that fresh models write."""
        with torch.no_grad():
            for layer, fan_in in zip(self.initial, self.initial.shape[-2:], strict=False):
                layer.normal_(std=fan_in**-0.5)
            if self.threshold is not None:
                self.threshold.fill_(0.1)

    def init_state(self, batch_size: int) -> MemoryState:
        """M_0 for every row, and no momentum."""
        weights = self.initial.to(torch.promote_types(self.initial.dtype, torch.float32))
        weights = weights[:, None].expand(-1, batch_size, -1, -1, -1).flatten(1, 2)
        return MemoryState(weights, torch.zeros_like(weights))

    def forward(self, x: Tensor, state: MemoryState, writes: int) -> tuple[Tensor, MemoryState]:
        """`x [B, N, D]`, starting at a chunk boundary -> `[B, N, D]` and the state after the first `writes` chunks."""
        batch, length, _ = x.shape
        full = writes * self.chunk
        written = x[:, :full]
        means = written.unflatten(1, (writes, self.chunk)).mean(2)  # [B, writes, D]
        eta, alpha = self._per_head(self.eta(means), 1), self._per_head(self.alpha(means) * self.retention_bound, 1)
        theta = self._per_head(self.theta(written) / self.chunk, self.chunk)
        keys = unit(self._per_head(self.k_proj(written), self.chunk))
        values = self._per_head(self.v_proj(written), self.chunk)
        queries = self.q_proj(x)
        threshold = None if self.threshold is None else self.threshold.repeat(batch).view(-1, 1, 1)
        with full_precision(x.device):
            reads = []
            if writes:  # all written chunks are read in one product, then what follows them
                history, state = write_chunks(keys, values, theta, eta, alpha, threshold, state, self.steps)
                query = unit(self._per_head(queries[:, :full], self.chunk)).flatten(0, 1)
                y = read([layer.flatten(0, 1) for layer in history.unbind(0)], query)
                reads.append(self._together(y.unflatten(0, (writes, -1)), batch))
            if full < length:
                query = unit(self._per_head(queries[:, full:], length - full))[0]
                reads.append(self._together(read(state.weights.unbind(0), query)[None], batch))
        y = torch.cat(reads, dim=1) if len(reads) > 1 else reads[0]
        return self.o_proj(y.to(x.dtype)), state

    def flops(self, length: int, writes: int) -> dict[str, tuple[float, float]]:
        """FLOPs of one row of `length` patches, by part: forward, and forward with backward."""
        width, full = self.heads * self.head_width, writes * self.chunk
        depth, _, k, e = self.initial.shape
        projections = 4.0 * width * width * (length + full) + 2.0 * width * self.heads * (full + 2 * writes)
        layer = 2.0 * self.heads * k * e
        inner = layer * (depth * length + (3 * depth - 1) * full)  # reads; predictions and their gradient
        forward, training = newton_schulz_flops(k, e, self.steps)
        matrices = depth * self.heads * writes
        return {
            "projections": (projections, 3 * projections),
            "inner_memory": (inner, 3 * inner),
            "newton_schulz": (matrices * forward, matrices * training),
        }

    def _per_head(self, x: Tensor, size: int) -> Tensor:
        """`[B, n * size, H * w] -> [n, B * H, size, w]`, fp32 or wider."""
        x = x.unflatten(2, (self.heads, -1)).unflatten(1, (-1, size)).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def _together(self, reads: Tensor, batch: int) -> Tensor:
        """RMSNorm and the inverse of `_per_head`: `[n, B * H, size, K] -> [B, n * size, D]`."""
        y = unit(reads, self.head_width**0.5).unflatten(1, (batch, self.heads))
        return y.permute(1, 0, 3, 2, 4).flatten(3, 4).flatten(1, 2)


def unit(x: Tensor, length: float = 1.0) -> Tensor:
    """Each row of `x [..., K]` scaled to `length` (`sqrt(K)` makes it an RMSNorm); a zero row has gradient zero."""
    return _Unit.apply(x, length)


class _Unit(torch.autograd.Function):
    """`y = length x / |x|`, `dx = (dy - y (y . dy) / length^2) length / |x|`: half the passes of autograd."""

    @staticmethod
    def forward(ctx, x: Tensor, length: float) -> Tensor:  # type: ignore[override]
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.where(norm > 1e-12, length / norm, 0.0)
        y = x * scale
        ctx.save_for_backward(y, scale)
        ctx.length = length
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        y, scale = ctx.saved_tensors
        along = torch.linalg.vecdot(gradient, y)[..., None]
        return torch.addcmul(gradient, y, along, value=-(ctx.length**-2)).mul_(scale), None


class Rate(nn.Linear):
    """`sigmoid(x W + b)`, one per head; starts at `value` for every input."""

    def __init__(self, width: int, heads: int, value: float) -> None:
        self.value = value
        super().__init__(width, heads)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.constant_(self.bias, math.log(self.value / (1 - self.value)))

    def forward(self, x: Tensor) -> Tensor:
        """fp32 or wider: near 1, where a memory lasts long, half precision knows few values."""
        scores = super().forward(x)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)).sigmoid()
