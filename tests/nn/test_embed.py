"""The token front end: what each addend is, and which ids it takes."""

import pytest
import torch
from torch.testing import assert_close

from sublayer.errors import InputError, SpecError
from sublayer.nn.embed import Embed, EmbedOp
from sublayer.nn.norm import LayerNorm
from sublayer.nn.op import Context
from sublayer.nn.position import Learned, Sinusoidal
from sublayer.step import Step

IDS = torch.tensor([[3, 1, 4], [1, 5, 0]])


def drawn(spec: Embed, dim: int = 4, dtype: torch.dtype = torch.float64) -> EmbedOp:
    op = spec.build(dim, Context()).to(dtype).eval()
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_()
    return op


def test_the_sum_is_scaled_tokens_plus_positions_plus_types_then_the_norm() -> None:
    op = drawn(Embed(6, 3.0, Learned(8, offset=2), types=2, norm=LayerNorm(0.1)))
    pos, types = torch.tensor([[0, 1, 2], [4, 5, 0]]), torch.tensor([[0, 1, 1], [0, 0, 1]])
    x, step = op(IDS, Step(pos=pos, types=types))
    assert op.types is not None
    assert op.norm is not None
    wanted = (
        3 * op.get_parameter("tokens.weight")[IDS]
        + op.get_parameter("position.weight")[pos + 2]
        + op.types.weight[types]
    )
    assert_close(x, op.norm(wanted), rtol=0, atol=1e-12)
    assert step.types is types


def test_without_positions_and_types_given_they_count_from_zero() -> None:
    op = drawn(Embed(6, position=Learned(8), types=2))
    given = op(IDS, Step(pos=torch.arange(3).expand(2, 3), types=torch.zeros_like(IDS)))[0]
    assert torch.equal(op(IDS, Step())[0], given)


def test_sinusoids_are_added_in_the_tables_dtype() -> None:
    op = drawn(Embed(6, position=Sinusoidal()), dtype=torch.bfloat16)
    x, _ = op(IDS, Step())
    assert x.dtype == torch.bfloat16
    wave = Sinusoidal().table(torch.arange(3)[None], 4, torch.bfloat16)
    assert torch.equal(x, op.get_parameter("tokens.weight")[IDS] + wave)


def test_a_scale_is_rounded_to_the_models_dtype_first() -> None:
    """Gemma multiplies by sqrt(3072) rounded to bfloat16, 55.5, and was trained so."""
    op = drawn(Embed(6, 3072**0.5), dtype=torch.bfloat16)
    assert torch.equal(
        op(IDS, Step())[0], (op.get_parameter("tokens.weight")[IDS] * torch.tensor(55.5, dtype=torch.bfloat16))
    )


@pytest.mark.parametrize("bad", [6, -1, 10**12, -(10**12)])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(InputError, match=f"token id {bad} is outside the vocabulary of 6"):
        drawn(Embed(6))(torch.tensor([[0, 5, bad]]), Step())


def test_dropout_acts_in_training_only() -> None:
    op = drawn(Embed(6, dropout=0.5), dim=200)
    assert torch.equal(op(IDS, Step())[0], op.get_parameter("tokens.weight")[IDS])
    op.train()
    x = op(IDS, Step())[0]
    kept = x != 0
    assert_close(x[kept], 2 * op.get_parameter("tokens.weight")[IDS][kept])
    assert 0.4 < kept.double().mean().item() < 0.6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"vocab": 0}, "vocab must be above 0"),
        ({"vocab": 3, "types": -1}, "types must not be below 0"),
        ({"vocab": 3, "dropout": 1}, "dropout is a share"),
        ({"vocab": 3, "position": LayerNorm()}, "Embed.position: expected Learned or Sinusoidal or None"),
    ],
)
def test_what_describes_no_table_is_refused(values: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Embed(**values)
