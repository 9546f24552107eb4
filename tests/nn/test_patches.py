"""The front end for images: against a convolution, positions by hand, and what it refuses."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import InputError, SpecError
from sublayer.nn.initialise import Init, initialise
from sublayer.nn.op import Context
from sublayer.nn.patches import Grid, Patches, PatchesOp
from sublayer.nn.position import Sinusoidal
from sublayer.step import Step

PLAIN = Patches((8, 12), (4, 2))


def drawn(spec: Patches, dim: int = 8, dtype: torch.dtype = torch.float64) -> PatchesOp:
    op = spec.build(dim, Context()).to(dtype).eval()
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_()
    return op


def images(height: int = 8, width: int = 12, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def test_patches_are_a_convolution_whose_stride_is_its_kernel() -> None:
    op = drawn(PLAIN)
    x, step = op(images(), given := Step())
    expected = F.conv2d(images(), op.weight, op.bias, stride=(4, 2)).flatten(2).transpose(1, 2)
    assert x.shape == (2, 12, 8)
    assert_close(x, expected, rtol=0, atol=1e-12)
    assert step is given


def test_class_token_then_registers_then_patches_and_positions_for_all_but_registers() -> None:
    op = drawn(PLAIN.replace(class_token=True, registers=2, position=Grid()))
    bare = F.conv2d(images(), op.weight, op.bias, stride=(4, 2)).flatten(2).transpose(1, 2)
    assert op.position is not None
    assert op.class_token is not None
    assert op.registers is not None
    x, _ = op(images(), Step())
    assert op.spec.first == 3
    assert_close(x[:, 0], (op.class_token + op.position[0]).expand(2, -1), rtol=0, atol=1e-12)
    assert_close(x[:, 1:3], op.registers.expand(2, -1, -1), rtol=0, atol=0)
    assert_close(x[:, 3:], bare + op.position[1:], rtol=0, atol=1e-12)


def cubic(t: float) -> list[float]:
    """Weights of the four neighbours of a place t behind the second (Keys 1981, a = −3/4)."""
    a = -0.75

    def near(d: float) -> float:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: float) -> float:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(1 + t), near(t), near(1 - t), far(2 - t)]


def resampled(places: Tensor, count: int) -> Tensor:
    """[n, …] → [count, …], pixel centres aligned, edges repeated."""
    n = len(places)
    found = []
    for i in range(count):
        at = (i + 0.5) * n / count - 0.5
        low = math.floor(at)
        terms = [w * places[min(max(low + k - 1, 0), n - 1)] for k, w in enumerate(cubic(at - low))]
        found.append(torch.stack(terms).sum(0))
    return torch.stack(found)


@pytest.mark.parametrize(("height", "width"), [(12, 12), (8, 20), (4, 2), (20, 8)])
def test_a_grid_is_resampled_for_images_of_another_size(height: int, width: int) -> None:
    op = drawn(PLAIN.replace(class_token=True, position=Grid()))
    assert op.position is not None
    x, _ = op(torch.zeros(1, 3, height, width, dtype=torch.float64), Step())
    grid = op.position[1:].unflatten(0, (2, 6))
    wanted = resampled(resampled(grid, height // 4).transpose(0, 1), width // 2).transpose(0, 1).flatten(0, 1)
    assert_close(x[0, 1:], wanted + op.bias, rtol=0, atol=1e-12)
    assert op.class_token is not None
    assert torch.equal(x[0, 0], op.class_token + op.position[0])


def test_an_antialiased_grid_averages_where_it_shrinks() -> None:
    op = drawn(Patches((16, 16), (1, 1), position=Grid(antialias=True)))
    plain = op.spec.replace(position=Grid())
    zeros = torch.zeros(1, 3, 2, 2, dtype=torch.float64)
    averaged = op(zeros, Step())[0].square().mean()
    op.spec = plain
    assert averaged < 0.5 * op(zeros, Step())[0].square().mean()  # a mean of noise is smaller than noise


def test_sinusoids_say_the_column_in_the_first_half_and_the_row_in_the_second() -> None:
    """As in the code of MAE: each half all sines, then all cosines, 1 / 10000^(i / (D / 4))."""
    op = drawn(PLAIN.replace(class_token=True, position=Sinusoidal(layout="half")))
    assert op.class_token is not None
    x, _ = op(torch.zeros(1, 3, 8, 12, dtype=torch.float64), Step())
    assert torch.equal(x[0, 0], op.class_token)
    for row in range(2):
        for column in range(6):
            waves = [f(at * 10000 ** (-i / 2)) for at in (column, row) for f in (math.sin, math.cos) for i in range(2)]
            wanted = torch.tensor(waves, dtype=torch.float64) + op.bias
            assert_close(x[0, 1 + 6 * row + column], wanted, rtol=0, atol=1e-12)


def test_sinusoids_of_another_size_lie_in_the_range_of_the_trained_one() -> None:
    op = drawn(Patches((8, 8), (2, 2), position=Sinusoidal(layout="half")))
    small, _ = op(torch.zeros(1, 3, 8, 8, dtype=torch.float64), Step())
    large, _ = op(torch.zeros(1, 3, 16, 16, dtype=torch.float64), Step())
    every_other = large[0].unflatten(0, (8, 8))[::2, ::2].flatten(0, 1)
    assert_close(every_other, small[0], rtol=0, atol=1e-12)


def test_hidden_patches_are_the_mask_token_and_have_positions() -> None:
    op = drawn(PLAIN.replace(mask_token=True, position=Grid()))
    hidden = torch.zeros(2, 12, dtype=torch.bool)
    hidden[0, 3] = hidden[1, 11] = True
    x, _ = op({"images": images(), "hidden": hidden}, Step())
    plain, _ = op(images(), Step())
    assert op.position is not None
    assert op.mask_token is not None
    assert_close(x[1, 11], op.mask_token + op.position[11], rtol=0, atol=0)
    assert torch.equal(x[~hidden], plain[~hidden])


def test_it_begins_as_its_init_says() -> None:
    spec = Patches((8, 8), (2, 2), class_token=True, registers=3, mask_token=True, position=Grid())
    op = spec.build(256, Context())
    initialise(op, Init("fan_in", embedding=0.5, position=0.1), 0)
    assert op.position is not None
    assert op.class_token is not None
    assert op.mask_token is not None
    found = [float(p.detach().std()) for p in (op.weight, op.class_token, op.position)]
    assert found == pytest.approx([12**-0.5, 0.5, 0.1], rel=0.15)
    assert not op.bias.any()
    assert not op.mask_token.any()


def test_half_precision_grids_are_resampled_in_single() -> None:
    op = drawn(PLAIN.replace(position=Grid()), dtype=torch.bfloat16)
    wide = drawn(PLAIN.replace(position=Grid()), dtype=torch.float32)
    wide.load_state_dict(op.state_dict())
    zeros = torch.zeros(1, 3, 16, 24)
    with torch.no_grad():
        op.bias.zero_()
        wide.bias.zero_()
    found, expected = op(zeros, Step())[0], wide(zeros, Step())[0]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected.bfloat16())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.zeros(2, 1, 8, 12), r"images are \[B, 3, H, W\], got \[2, 1, 8, 12\]"),
        (torch.zeros(3, 8, 12), r"images are \[B, 3, H, W\], got \[3, 8, 12\]"),
        (torch.zeros(2, 3, 8, 12, dtype=torch.uint8), "floating-point, normalised as the model was trained, got"),
        (torch.zeros(2, 3, 9, 12), "images of 9 × 12 pixels are no whole number of patches of 4 × 2: resize"),
        (torch.zeros(2, 3, 8, 0), "images of 8 × 0 pixels"),
        ({"images": torch.zeros(2, 3, 8, 12), "hidden": torch.zeros(2, 12).bool()}, "the model has no mask token"),
    ],
)
def test_what_is_no_image_is_refused_in_one_line(given: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        drawn(PLAIN, dtype=torch.float32)(given, Step())


@pytest.mark.parametrize("hidden", [torch.zeros(2, 11).bool(), torch.zeros(2, 12)])
def test_a_wrong_mask_is_refused(hidden: Tensor) -> None:
    with pytest.raises(InputError, match=r"hidden is bool \[2, 12\]"):
        drawn(PLAIN.replace(mask_token=True))({"images": images(), "hidden": hidden}, Step())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": (8, 13)}, "an image of 8 × 13 is no whole number of patches of 4 × 2"),
        ({"patch": (0, 2)}, "must be above 0"),
        ({"registers": -1}, "registers must not be below 0"),
        ({"dropout": 1.0}, "dropout is a share"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        PLAIN.replace(**change)


def test_sinusoids_need_a_width_of_four_parts() -> None:
    with pytest.raises(SpecError, match="a multiple of 4, not 6"):
        PLAIN.replace(position=Sinusoidal()).build(6, Context())
