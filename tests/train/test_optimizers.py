"""Muon: its matrices are orthogonal, its steps are as long as AdamW's, and they are torch's."""

import pytest
import torch
from torch import nn

from forerun.train.optimizers import Muon, make_optimizers, orthogonal


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.up, self.norm = (
            nn.Embedding(9, 8),
            nn.Linear(8, 12, bias=False),
            nn.LayerNorm(12),
        )
        self.lm_head = nn.Linear(12, 9, bias=False)


@pytest.mark.parametrize("shape", [(6, 6), (4, 11), (11, 4)])
def test_matrices_become_nearly_orthogonal(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape), torch.float32))
    assert values.min() > 0.5 and values.max() < 1.3


def test_steps_are_those_of_torch() -> None:
    """Of the same gradients; torch's computes in bfloat16."""
    torch.manual_seed(0)
    start, gradients = torch.randn(6, 10), [torch.randn(6, 10) for _ in range(4)]
    moved = []
    for make in (
        lambda p: Muon([p], 0.01, 0.1, torch.float32),
        lambda p: torch.optim.Muon([p], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    ):
        weight = nn.Parameter(start.clone())
        optimizer = make(weight)
        for gradient in gradients:
            weight.grad = gradient.clone()
            optimizer.step()
        moved.append(weight.detach() - start)
    assert (moved[0] - moved[1]).norm() < 0.02 * moved[1].norm()


def test_which_weights_are_whose() -> None:
    net = Net()
    muon, adam = make_optimizers(net, "muon", 0.01, 0.0, torch.float32)
    assert [len(p) for p in muon.param_groups[0]["params"]] == [12] and isinstance(muon, Muon)
    assert len(adam.param_groups[0]["params"]) == 4
    (only,) = make_optimizers(net, "adamw", 0.01, 0.0, torch.float32)
    assert len(only.param_groups[0]["params"]) == 5
    net.requires_grad_(False)
    net.up.weight.requires_grad_(True)
    assert len(make_optimizers(net, "muon", 0.01, 0.0, torch.float32)) == 1
