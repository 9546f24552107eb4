"""Images and their batches: what is read and refused, and that order and augmentation are functions of numbers."""

import gzip
import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from sublayer.data import images as module
from sublayer.data.images import Augment, ImageBatches, Images, idx, image_folder, images, whole
from sublayer.errors import InputError, SpecError, UsageError
from sublayer.recipes import vit
from tests.assets import debian

PIXELS = np.random.default_rng(0).integers(0, 256, (10, 5, 6), np.uint8)
LABELS = np.arange(10, dtype=np.uint8) % 4


def encoded(values: np.ndarray) -> bytes:
    return bytes([0, 0, 8, values.ndim]) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()


def written(folder: Path, split: str = "train", packed: bool = False) -> Path:
    for name, values in (("images-idx3", PIXELS), ("labels-idx1", LABELS)):
        data = encoded(values)
        path = folder / f"{split}-{name}-ubyte{'.gz' if packed else ''}"
        path.write_bytes(gzip.compress(data) if packed else data)
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Images:
    return images(written(tmp_path))


# --- IDX ---


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("split", "name"), [("train", "train"), ("test", "t10k")])
def test_idx_files_are_found_by_their_names(split: module.Split, name: str, packed: bool, tmp_path: Path) -> None:
    found = images(written(tmp_path, name, packed), split)
    assert len(found) == 10
    assert found.shape == (1, 5, 6)
    assert found.classes == ("0", "1", "2", "3")
    assert found.labels.tolist() == LABELS.tolist()
    assert all(np.array_equal(found.pixels(i)[0], PIXELS[i]) for i in range(10))
    assert found.where(3).endswith(", image 3")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an IDX file of bytes in 3 dimensions"),
        (encoded(LABELS), "not an IDX file of bytes in 3 dimensions"),
        (b"\0\0\x0d\3" + encoded(PIXELS)[4:], "not an IDX file"),
        (encoded(PIXELS)[:-1], "the header says 300 bytes, the file holds 299"),
        (encoded(PIXELS) + b"\0", "the header says 300 bytes, the file holds more"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 2**31, 2**31), "claims 9903520314283042199192993792 bytes"),
        (bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**11, 2**11, 2**10), "says 4294967296 bytes, the file holds 0"),
        (encoded(PIXELS[:9]), "9 images, but 10 labels"),
    ],
)
def test_a_broken_file_is_refused_by_name(data: bytes, message: str, tmp_path: Path) -> None:
    (written(tmp_path) / "train-images-idx3-ubyte").write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        images(tmp_path)
    assert "train-images-idx3-ubyte" in str(caught.value)


@pytest.mark.parametrize("cut", [5, -4])
def test_a_cut_gzip_is_refused(cut: int, tmp_path: Path) -> None:
    path = written(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match="cannot be read"):
        images(tmp_path)


@pytest.mark.parametrize("packed", [False, True])
def test_a_short_file_that_claims_gigabytes_takes_no_memory(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("x.gz" if packed else "x")
    data = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**15, 2**8, 2**8) + bytes(2**20)
    path.write_bytes(gzip.compress(data) if packed else data)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="says 2147483648 bytes, the file holds 1048576"):
            idx(path, path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_labels_beyond_the_classes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="label 3 of 3 classes"):
        images(written(tmp_path), classes=("a", "b", "c"))


def test_a_stamp_changes_with_what_is_read(tmp_path: Path) -> None:
    first = images(written(tmp_path)).stamp
    assert images(tmp_path).stamp == first
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + bytes([int(PIXELS[-1, -1, -1]) ^ 1]))
    assert images(tmp_path).stamp != first


def test_a_part_has_its_own_numbers_and_stamp(source: Images) -> None:
    part = source.only([7, 2])
    assert len(part) == 2
    assert part.labels.tolist() == [3, 2]
    assert np.array_equal(part.pixels(1)[0], PIXELS[2])
    assert part.where(0).endswith("image 7")
    assert len({source.stamp, part.stamp, source.only([2, 7]).stamp}) == 3
    assert sorted(numbers(ImageBatches(part, 4).at(0))) == [2, 2, 7, 7]


# --- folders ---


def drawn(folder: Path) -> Path:
    for name, shade in (("cat", 200), ("dog", 40)):
        (folder / "train" / name).mkdir(parents=True)
        for i, suffix in enumerate(("png", "jpg")):
            wide = np.full((8, 16, 3), 255, np.uint8)
            wide[:, 4:12] = (shade, shade // 2, 10)
            Image.fromarray(wide).save(folder / "train" / name / f"{i}.{suffix}", quality=100)
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    (folder / "train" / ".cache").mkdir()
    return folder


def test_a_folder_for_each_class_gives_middle_squares_of_one_size(tmp_path: Path) -> None:
    found = images(drawn(tmp_path), size=4)
    assert found.classes == ("cat", "dog")
    assert found.labels.tolist() == [0, 0, 1, 1]
    assert found.shape == (3, 4, 4)
    for index, shade in ((0, 200), (1, 200), (2, 40), (3, 40)):
        pixels = found.pixels(index)
        assert pixels.dtype == np.uint8
        assert np.abs(pixels[:, 1:3, 1:3] - np.array([shade, shade // 2, 10], float)[:, None, None]).max() <= 6
    assert found.where(0).endswith("cat/0.png")
    grey = images(tmp_path, size=4, channels=1)
    assert grey.pixels(0).shape == (1, 4, 4)


def test_images_of_one_size_keep_it(tmp_path: Path) -> None:
    found = images(drawn(tmp_path))
    assert found.shape == (3, 8, 16)
    with Image.open(tmp_path / "train" / "cat" / "0.png") as file:
        assert (found.pixels(0) == np.asarray(file).transpose(2, 0, 1)).all()
    lying = Image.new("L", (8, 16))
    lying.getexif()[0x0112] = 6  # to be turned by a quarter, and then as wide as the others
    lying.save(tmp_path / "train" / "cat" / "2.jpg", exif=lying.getexif())
    assert images(tmp_path).pixels(2).shape == (3, 8, 16)


def test_the_classes_of_training_count_the_labels_of_the_test(tmp_path: Path) -> None:
    drawn(tmp_path)
    (tmp_path / "val" / "dog").mkdir(parents=True)
    Image.new("L", (9, 5), 7).save(tmp_path / "val" / "dog" / "grey.png")
    train = images(tmp_path, size=4)
    test = images(tmp_path, "test", size=4, classes=train.classes)
    assert test.labels.tolist() == [1]
    assert (test.pixels(0) == 7).all()
    (tmp_path / "val" / "dog").rename(tmp_path / "val" / "dogs")
    with pytest.raises(InputError, match=r"dogs: an unknown class \(did you mean 'dog'\?\)"):
        images(tmp_path, "test", size=4, classes=train.classes)


@pytest.mark.parametrize("cut", [0, 20, -30])
@pytest.mark.parametrize("name", ["0.png", "1.jpg"])
def test_a_file_that_is_no_whole_image_is_named(name: str, cut: int, tmp_path: Path) -> None:
    path = drawn(tmp_path) / "train" / "cat" / name
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(InputError, match=f"{name}: not a whole image"):
        images(tmp_path, size=4).pixels(int(name[0]))


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch) -> None:
    drawn(tmp_path)
    monkeypatch.setattr(module, "MAX_PIXELS", 100)
    with pytest.raises(InputError, match="16 × 8 pixels, more than 100"):
        images(tmp_path, size=4).pixels(0)


def test_deeper_pixels_are_refused_and_not_made_white(tmp_path: Path) -> None:
    Image.fromarray(np.full((8, 8), 3000, np.uint16)).save(drawn(tmp_path) / "train" / "cat" / "0.png")
    with pytest.raises(InputError, match="0.png: pixels of the kind I;16 do not fit into 8 bits"):
        images(tmp_path, size=4).pixels(0)


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"no train images: neither train-images-idx3-ubyte"):
        images(tmp_path)
    with pytest.raises(UsageError, match=r"split='tests' \(did you mean 'test'\?\)"):
        images(tmp_path, "tests")  # pyright: ignore[reportArgumentType]
    Image.new("L", (9, 5)).save(drawn(tmp_path) / "train" / "dog" / "small.png")
    with pytest.raises(UsageError, match=r"small.png: 9 × 5 pixels, and 0.png 16 × 8: data.size .size=. is missing"):
        images(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty: no images"):
        image_folder(tmp_path / "empty", 4)
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"need Pillow: pip install 'sublayer\[images\]'"):
        images(tmp_path, size=4)


# --- batches ---


def numbers(batch: module.Pictures) -> list[int]:
    return [int(where.rpartition(" ")[2]) for where in batch.where]


def test_each_epoch_holds_every_image_once_in_another_order(source: Images) -> None:
    batches = ImageBatches(source, 4, seed=3)
    rows = [number for step in range(5) for number in numbers(batches.at(step))]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    assert rows[:10] != rows[10:] != list(range(10)) != rows[:10]
    assert [batches.epochs(step) for step in (0, 5)] == [0.0, 2.0]
    other = ImageBatches(source, 4, seed=4)
    assert [number for step in range(5) for number in numbers(other.at(step))] != rows


def test_ranks_take_their_rows_of_the_same_batch_and_parts_are_its_rows(source: Images) -> None:
    batches = ImageBatches(source, 6, augment=Augment(2, flip=True))
    batch = batches.at(7)
    shares = [batches.at(7, rank, 3) for rank in range(3)]
    assert torch.equal(torch.cat([share.images for share in shares]), batch.images)
    assert torch.equal(torch.cat([part.labels for part in batch.split(4)]), batch.labels)
    assert [len(part.where) for part in batch.split(4)] == [4, 2]
    for rank, ranks in ((0, 4), (3, 3), (-1, 3)):
        with pytest.raises(UsageError, match="cannot be shared"):
            batches.at(0, rank, ranks)
    with pytest.raises(UsageError, match="counted from 0"):
        batches.at(-1)
    with pytest.raises(UsageError, match="0 rows"):
        ImageBatches(source, 0)


def test_pixels_are_normalised_and_labels_belong_to_them(source: Images) -> None:
    batch = ImageBatches(source, 10, mean=0.25, std=0.5).at(0)
    assert batch.images.dtype == torch.float32
    assert batch.labels.dtype == torch.int64
    for i, number in enumerate(numbers(batch)):
        wanted = (torch.from_numpy(PIXELS[number]) / 255 - 0.25) / 0.5
        torch.testing.assert_close(batch.images[i, 0], wanted, rtol=0, atol=1e-6)
        assert batch.labels[i] == LABELS[number]


@pytest.mark.parametrize("bad", [{"mean": (0.1, 0.2)}, {"std": 0.0}, {"std": (1.0, -1.0, 1.0)}, {"mean": ()}])
def test_a_normalisation_that_cannot_be_meant_is_refused(bad: dict, source: Images) -> None:
    with pytest.raises(UsageError, match="one number or 1, for as many channels"):
        ImageBatches(source, 2, **bad)


def test_whole_is_every_image_in_order_unchanged(source: Images) -> None:
    batches = list(whole(source, 4, mean=0.0, std=1.0))
    assert [number for batch in batches for number in numbers(batch)] == list(range(10))
    assert torch.equal(torch.cat([batch.images for batch in batches])[:, 0], torch.from_numpy(PIXELS) / 255)


def test_augmentation_is_a_function_of_seed_epoch_and_image(source: Images) -> None:
    augment = Augment(2, flip=True)
    found = [augment(source.pixels(0), seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(9)]
    again = [augment(source.pixels(0), seed, epoch, index) for seed in (0, 1) for epoch in (0, 1) for index in range(9)]
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    assert len({x.tobytes() for x in found}) > 18  # of 50 that there are
    batches = ImageBatches(source, 10, augment=augment)
    first, second = batches.at(0), batches.at(1)
    same = [numbers(second).index(number) for number in numbers(first)]
    assert not torch.equal(first.images, second.images[same])
    assert torch.equal(first.labels, second.labels[same])


def test_a_shift_moves_by_at_most_so_many_pixels_and_a_flip_mirrors_half(source: Images) -> None:
    pixels = source.pixels(4)
    seen = set()
    for index in range(200):
        moved = Augment(1)(pixels, 0, 0, index)
        places = [
            (y, x)
            for y in (-1, 0, 1)
            for x in (-1, 0, 1)
            if np.array_equal(np.pad(pixels, ((0, 0), (1, 1), (1, 1)))[:, 1 + y : 6 + y, 1 + x : 7 + x], moved)
        ]
        seen |= set(places)
        assert len(places) == 1
    assert len(seen) == 9
    flips = [Augment(flip=True)(pixels, 0, 0, index) for index in range(200)]
    mirrored = sum(np.array_equal(x, pixels[:, :, ::-1]) for x in flips)
    assert mirrored + sum(np.array_equal(x, pixels) for x in flips) == 200
    assert 70 < mirrored < 130
    assert Augment()(pixels, 0, 0, 0) is pixels
    with pytest.raises(SpecError, match="shift must not be below 0"):
        Augment(-1)


@pytest.mark.assets
def test_a_small_vit_learns_fashion_mnist() -> None:
    """200 steps of 128 images, half a minute on one core."""
    folder = debian("dataset-fashion-mnist") / "usr/share/datasets/fashion-mnist"
    train, test = images(folder), images(folder, "test").only(range(2000))
    model = vit(64, 3, 4, 10, 28, 7, channels=1).build(seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, 200, pct_start=0.1, cycle_momentum=False)
    batches = ImageBatches(train, 128, seed=1, augment=Augment(1))
    for step in range(200):
        batch = batches.at(step)
        loss = F.cross_entropy(model(batch.images)[:, 0], batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        hits = [model(batch.images)[:, 0].argmax(-1) == batch.labels for batch in whole(test, 500)]
    accuracy = float(torch.cat(hits).float().mean())
    assert accuracy > 0.75, accuracy


@pytest.mark.assets
def test_fashion_mnist_is_read() -> None:
    folder = debian("dataset-fashion-mnist") / "usr/share/datasets/fashion-mnist"
    train, test = images(folder), images(folder, "test")
    assert (len(train), len(test), train.shape, len(train.classes)) == (60_000, 10_000, (1, 28, 28), 10)
    assert np.bincount(train.labels).tolist() == [6000] * 10
    assert np.bincount(test.labels).tolist() == [1000] * 10
    mean = np.mean([train.pixels(i).mean() for i in range(0, 60_000, 100)]) / 255
    assert mean == pytest.approx(0.286, abs=0.01)  # as published
