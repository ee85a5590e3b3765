"""``S(n)`` against loops over its sums."""

from __future__ import annotations

import pytest
import torch

from realvr.maths import saliency

L, B, H, R, N = 3, 2, 4, 5, 6


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_saliency_is_the_mean_over_layers_heads_and_content() -> None:
    weights, gradient = noise(L, B, H, R, N, seed=1).softmax(-1), noise(L, B, H, R, N, seed=2)
    content = [[0, 3], [1, 2, 4]]
    marked = torch.tensor([[row in some for row in range(R)] for some in content])
    found = saliency.saliency(weights, gradient, marked)
    assert found.shape == (B, N)
    for b in range(B):
        for n in range(N):
            total = 0.0
            for layer in range(L):
                for h in range(H):
                    for j in content[b]:
                        total += abs(float(weights[layer, b, h, j, n]) * float(gradient[layer, b, h, j, n]))
            assert float(found[b, n]) == pytest.approx(total / (L * H * len(content[b])), rel=1e-12)


def test_no_content_and_half_precision() -> None:
    weights, gradient = noise(L, B, H, R, N, seed=1).softmax(-1), noise(L, B, H, R, N, seed=2)
    none = torch.zeros(B, R, dtype=torch.bool)
    assert float(saliency.saliency(weights, gradient, none).abs().sum()) == 0
    assert saliency.attribution(weights.bfloat16(), gradient.bfloat16()).dtype == torch.float32
    with pytest.raises(ValueError, match="differ in shape"):
        saliency.attribution(weights, gradient[..., :-1])
