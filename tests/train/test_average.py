"""Averages of weights: the formula, the swap, a state that goes on, and checkpoints on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sublayer.errors import InputError, WeightsError
from sublayer.train.average import Ema, average_into
from sublayer.weights import save
from tests.tiny import tiny


def moved(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape))


@pytest.mark.parametrize("warm", [True, False])
def test_the_average_against_its_formula(warm: bool) -> None:
    """Updates t = 0 … 19 with decay .6: warm, (1 + t) / (10 + t) is the smaller of the two until t = 12."""
    model = nn.Linear(3, 2)
    ema = Ema(model, 0.6, warm=warm)
    expected = model.weight.detach().double()
    for t in range(20):
        moved(model, t)
        ema.update()
        decay = min(0.6, (1 + t) / (10 + t)) if warm else 0.6
        expected = decay * expected + (1 - decay) * model.weight.detach().double()
        torch.testing.assert_close(ema.averages["weight"].double(), expected, rtol=1e-6, atol=1e-6)


def test_the_warm_up_ends_at_the_decay() -> None:
    ema = Ema(nn.Linear(1, 1), 0.6)
    ema.updates = 12
    before = ema.averages["bias"].clone()
    with torch.no_grad():
        ema.parameters["bias"].add_(1)
    ema.update()
    torch.testing.assert_close(ema.averages["bias"], before + 1 - 13 / 22)
    ema.updates = 1000
    before = ema.averages["bias"].clone()
    ema.update()
    torch.testing.assert_close(ema.averages["bias"], before + 0.4 * (ema.parameters["bias"].detach() - before))


def test_averages_of_bfloat16_are_fp32() -> None:
    """1 − .999 of a small change is lost where 8 bits are kept."""
    model = nn.Linear(1, 1).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1)
        ema = Ema(model, 0.999, warm=False)
        model.weight.fill_(1.0078125)
    ema.update()
    assert ema.averages["weight"].item() == pytest.approx(1 + 0.0078125e-3, abs=1e-7)
    with ema.swapped_in():
        assert model.weight.dtype == torch.bfloat16


def test_inside_the_swap_are_the_averages_and_after_it_the_weights() -> None:
    model = tiny().build()
    ema = Ema(model, 0.5, warm=False)
    moved(model, 1)
    ema.update()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with ema.swapped_in():
        for name, p in model.named_parameters():
            assert torch.equal(p, ema.averages[name])
            assert not torch.equal(p, before[name])
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(KeyboardInterrupt), ema.swapped_in():
        raise KeyboardInterrupt
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_the_swap_leaves_the_averages_alone() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model)
    kept = ema.averages["weight"].clone()
    with ema.swapped_in(), torch.no_grad():
        model.weight.zero_()
    assert torch.equal(ema.averages["weight"], kept)


def test_frozen_parameters_are_not_averaged() -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    ema = Ema(model)
    assert list(ema.averages) == ["weight"]
    with ema.swapped_in():
        pass


def test_a_saved_average_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    model = tiny().build()
    whole, first = Ema(model, 0.9), Ema(model, 0.9)
    for step in range(6):
        moved(model, step)
        whole.update()
        if step < 3:
            first.update()
        if step == 2:
            save_file(first.state_tensors(), tmp_path / "average.safetensors")
            again = Ema(model, 0.9)
            again.load_state_tensors(load_file(tmp_path / "average.safetensors"))
        if step > 2:
            again.update()  # pyright: ignore[reportPossiblyUnboundVariable]
    for name, average in whole.averages.items():
        assert torch.equal(average, again.averages[name])  # pyright: ignore[reportPossiblyUnboundVariable]


def test_a_loaded_state_is_a_copy() -> None:
    ema, model = Ema(nn.Linear(1, 1)), nn.Linear(1, 1)
    other = Ema(model)
    other.load_state_tensors(ema.state_tensors())
    kept = ema.averages["weight"].clone()
    moved(model, 0)
    other.update()
    assert torch.equal(ema.averages["weight"], kept)


def test_a_state_that_does_not_fit_is_refused_before_anything_changes() -> None:
    ema = Ema(nn.Linear(2, 3))
    state: dict[str, Any] = {name: value + 1 for name, value in ema.state_tensors().items()}
    before = {name: value.clone() for name, value in ema.state_tensors().items()}
    for tensors, message in (
        ({name: value for name, value in state.items() if name != "#updates"}, "'#updates' is missing"),
        ({**state, "wieght": state["weight"]}, r"'wieght' has no place \(did you mean 'weight'\?\)"),
        ({**state, "bias": state["bias"][:2]}, r"bias is torch.float32 \[2\], not torch.float32 \[3\]"),
        ({**state, "bias": state["bias"].double()}, "torch.float64"),
    ):
        with pytest.raises(WeightsError, match=message):
            ema.load_state_tensors(tensors)
    assert all(torch.equal(value, before[name]) for name, value in ema.state_tensors().items())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.5])
def test_a_decay_that_averages_nothing_is_refused(decay: float) -> None:
    with pytest.raises(InputError, match="between 0 and 1"):
        Ema(nn.Linear(1, 1), decay)


# --- checkpoints ---


def written(folder: Path, count: int) -> list[Path]:
    for seed in range(count):
        save(tiny().build(seed), folder / f"step-{seed}")
    return [folder / f"step-{seed}" for seed in range(count)]


def test_the_mean_of_checkpoints(tmp_path: Path) -> None:
    folders, model = written(tmp_path, 5), tiny().build(seed=9)
    average_into(model, folders)
    models = [dict(tiny().build(seed).named_parameters()) for seed in range(5)]
    for name, p in model.named_parameters():
        mean = torch.stack([each[name].detach().double() for each in models]).mean(0)
        assert torch.equal(p, mean.float()), name


def test_the_mean_of_one_is_itself_and_equal_ones_stay(tmp_path: Path) -> None:
    folders, model = written(tmp_path, 1), tiny().build(seed=9)
    for count in (1, 3):
        average_into(model, folders * count)
        for name, p in tiny().build(0).named_parameters():
            assert torch.equal(p, model.get_parameter(name))


def test_what_cannot_be_averaged_is_refused_before_anything_changes(tmp_path: Path) -> None:
    good, model = written(tmp_path, 1), tiny().build(seed=9)
    save(tiny(heads=2, kv_heads=1).build(), tmp_path / "other")
    tensors = load_file(good[0] / "model.safetensors")
    name = "decoder.norm.weight"
    broken = {
        "short": {key: value for key, value in tensors.items() if key != name},
        "long": {**tensors, "a": tensors[name].clone()},
        "shape": {**tensors, name: tensors[name][:-1]},
    }
    for folder, contents in broken.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "spec.json").write_text((good[0] / "spec.json").read_text())
        save_file(contents, tmp_path / folder / "model.safetensors")
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for folder, message in (
        ("other", "other: another architecture"),
        ("short", f"short: tensor {name} is missing"),
        ("long", "long: tensor a has no place"),
        ("shape", f"{name} is \\[31\\], not \\[32\\]"),
        ("nowhere", "no such folder"),
    ):
        with pytest.raises(WeightsError, match=message):
            average_into(model, [*good, tmp_path / folder])
    with pytest.raises(WeightsError, match="no checkpoints to average"):
        average_into(model, [])
    assert all(torch.equal(p, before[key]) for key, p in model.named_parameters())
