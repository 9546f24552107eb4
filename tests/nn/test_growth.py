"""What a mixer computes in a training pass grows with length as it says: counted, not timed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sublayer.nn.delta import GatedDelta
from sublayer.nn.gated_convolution import GatedConvolution
from sublayer.nn.linear_attention import LinearAttention
from sublayer.nn.mamba import Mamba, Mamba2
from sublayer.nn.op import Context, Part
from sublayer.nn.s4 import S4
from sublayer.step import Step

LINEAR = {
    "gated convolution": GatedConvolution(),
    "linear attention": LinearAttention(1, head_size=32),
    "gated delta": GatedDelta(key_heads=1, value_heads=2, key_size=4, value_size=4),
    "S4": S4(4),
    "S4D": S4(4, structure="diagonal"),
    "Mamba": Mamba(inner=8, state_size=4),
    "Mamba-2": Mamba2(heads=2, head_size=4, state_size=4),
}


class Written(TorchDispatchMode):
    """Counts the elements of all that operators return."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        views = getattr(func, "is_view", False)
        self.elements += 0 if views else sum(leaf.numel() for leaf in tree_leaves(found) if isinstance(leaf, Tensor))
        return found


def written(part: Part, length: int) -> int:
    op = part.build(8, Context())
    for parameter in op.parameters():
        torch.nn.init.constant_(parameter, 0.1)
    x = torch.randn(1, length, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Written() as count:
        op(x, Step()).sum().backward()
    return count.elements


@pytest.mark.parametrize("name", LINEAR)
def test_twice_the_length_is_twice_the_numbers(name: str) -> None:
    assert written(LINEAR[name], 4096) <= 2.1 * written(LINEAR[name], 2048)
