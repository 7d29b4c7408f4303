"""Chunk by chunk the loss and its gradients are those of all positions at once."""

import pytest
import torch
from torch import Tensor, nn

from forerun.train import fused
from forerun.train.fused import fused_sum
from forerun.train.losses import Law, Mixture


class Head(nn.Module):
    """A head with a part that no loss uses and one that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.say, self.unused = nn.Linear(8, 30), nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, made: Tensor) -> Tensor:
        said: Tensor = self.say(made * self.frozen)
        return said


@pytest.mark.parametrize("count", [0, 1, 7, 8, 29])
def test_gradients_are_those_of_the_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK", 7)
    torch.manual_seed(count)
    head, below = Head(), nn.Linear(8, 8)
    x, tokens = torch.randn(count, 8), torch.randint(30, (count,))
    law = Law(None, torch.randn(count, 30).log_softmax(-1))
    mixture = Mixture(0.5, 0.3, 0.2)

    def losses(made: Tensor, part: slice) -> Tensor:
        return mixture(law.at(part), head(made), tokens[part])

    whole = losses(below(x), slice(None)).sum() * 3
    whole.backward()
    expected = [
        None if p.grad is None else p.grad.clone()
        for p in (*head.parameters(), *below.parameters())
    ]
    for module in (head, below):
        module.zero_grad()
    mine = fused_sum(below(x), head, losses) * 3
    mine.backward()
    assert torch.allclose(mine, whole, rtol=1e-5)
    for parameter, gradient in zip(
        (*head.parameters(), *below.parameters()), expected, strict=True
    ):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(fused_sum(below(x), head, losses) * 3, whole, rtol=1e-5)


def test_no_more_than_a_chunk_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "CHUNK", 4)
    head, sizes = Head(), []

    def losses(made: Tensor, part: slice) -> Tensor:
        sizes.append(len(made))
        return head(made).logsumexp(-1)

    fused_sum(torch.randn(10, 8, requires_grad=True), head, losses).backward()
    assert sizes == [4, 4, 2]
