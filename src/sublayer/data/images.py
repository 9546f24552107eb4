"""Labelled images: read from IDX files or folders of PNG and JPEG, in bounded memory, and made into batches.

B rows, C channels, H and W height and width in pixels, N images.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, UsageError, nearest
from ..spec import Spec
from .batches import permuted

MAX_BYTES = 2**33  # of the pixels of an IDX file
MAX_PIXELS = 2**26  # of one image in a folder, before it is made small
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV")  # of 8 bits a channel
SUFFIXES = (".png", ".jpg", ".jpeg")
SPLITS = {"train": ("train",), "test": ("t10k", "test", "val")}
CHUNK = 2**20

Split = Literal["train", "test"]


class NoSplit(InputError):
    """A folder that has no images for a split: neither good ones nor broken ones."""


@dataclass(frozen=True)
class Images:
    """N images of one size with their labels. Pixels are read when they are asked for."""

    shape: tuple[int, int, int]
    """(C, H, W) of each."""
    labels: np.ndarray
    """int64 [N]: the class of each, from 0 on."""
    classes: tuple[str, ...]
    """The names of the classes."""
    stamp: str
    """Another one when files, sizes or labels have changed."""
    pixels: Callable[[int], np.ndarray]
    """uint8 [C, H, W] of an image by its number. Raises InputError for a file that is no whole image."""
    where: Callable[[int], str]
    """Where an image is from, in words."""

    def __len__(self) -> int:
        return len(self.labels)

    def only(self, numbers: Sequence[int] | np.ndarray) -> Images:
        """These of the images, in this order: a part to train on, a part to judge by."""
        chosen = np.asarray(numbers, np.int64)
        return replace(
            self,
            labels=self.labels[chosen],
            stamp=_stamp(self.stamp, chosen.tobytes()),
            pixels=lambda index: self.pixels(int(chosen[index])),
            where=lambda index: self.where(int(chosen[index])),
        )


def images(
    path: Path | str,
    split: Split = "train",
    *,
    size: int | None = None,
    channels: Literal[1, 3] = 3,
    classes: Sequence[str] | None = None,
) -> Images:
    """What a folder holds for one split: IDX files by MNIST's names, or FOLDER/train/CLASS/*.png, *.jpg.

    The test split is named t10k in IDX files, and test or val as a folder. size and channels are those that the images
    of a folder are made to have; size None: all have one size and keep it. IDX files have their own. classes: the names
    that the labels count, such as those of the training split; None: the folders there are.

    Raises NoSplit for a folder without that split, InputError naming the file for what is missing or broken, UsageError
    for images of several sizes where none is given.
    """
    folder = Path(path)
    if split not in SPLITS:
        raise UsageError(f"split={split!r}{nearest(split, SPLITS)}")
    for name in SPLITS[split]:
        pixels, labels = (_idx_file(folder, f"{name}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if pixels is not None and labels is not None:
            return idx(pixels, labels, classes)
        if (folder / name).is_dir():
            return image_folder(folder / name, size, channels, classes)
    raise NoSplit(
        f"{folder}: no {split} images: neither {SPLITS[split][0]}-images-idx3-ubyte and its labels, nor a folder "
        f"{' or '.join(SPLITS[split])} with a folder for each class"
    )


def idx(pixels: Path | str, labels: Path | str, classes: Sequence[str] | None = None) -> Images:
    """The images [N, H, W] of one IDX file and the labels [N] of another, plain or as .gz, kept in memory as bytes.

    Source: the format of yann.lecun.com/exdb/mnist. Raises InputError for files that are not whole or do not fit.
    """
    path, values, tags = Path(pixels), _read_idx(Path(pixels), 3), _read_idx(Path(labels), 1).astype(np.int64)
    if len(values) != len(tags) or not len(tags):
        raise InputError(f"{path}: {len(values)} images, but {len(tags)} labels in {Path(labels).name}")
    names = tuple(classes) if classes is not None else tuple(map(str, range(int(tags.max()) + 1)))
    if int(tags.max()) >= len(names):
        raise InputError(f"{labels}: label {int(tags.max())} of {len(names)} classes, which are counted from 0")
    return Images(
        (1, *values.shape[1:]), tags, names, _stamp(values.shape, tags.tobytes(), blake2b(values.data).digest(), names),
        lambda index: values[index][None], lambda index: f"{path}, image {index}",
    )  # fmt: skip


def image_folder(
    path: Path | str, size: int | None = None, channels: Literal[1, 3] = 3, classes: Sequence[str] | None = None
) -> Images:
    """FOLDER/CLASS/*.png, *.jpg: decoded when asked for, the shorter side made `size`, and the middle square taken.

    size None: the images are as they are, all of one size. Needs Pillow (the extra "images"). Raises InputError for a
    folder without images or of an unknown class, UsageError for images of several sizes.
    """
    folder = Path(path)
    if find_spec("PIL") is None:
        raise UsageError("PNG and JPEG files need Pillow: pip install 'sublayer[images]'")
    if (size is not None and size < 1) or channels not in (1, 3):
        raise UsageError(f"images of {size} pixels and {channels} channels: at least 1, and 1 or 3")
    folders = sorted(item for item in folder.iterdir() if item.is_dir() and not item.name.startswith("."))
    names = tuple(classes) if classes is not None else tuple(item.name for item in folders)
    files: list[Path] = []
    tags: list[int] = []
    for item in folders:
        found = sorted(file for file in item.iterdir() if file.suffix.lower() in SUFFIXES and file.is_file())
        if found and item.name not in names:
            raise InputError(f"{item}: an unknown class{nearest(item.name, names)}")
        files += found
        tags += [names.index(item.name)] * len(found) if found else []
    if not files:
        raise InputError(f"{folder}: no images: expected a folder for each class, with files {', '.join(SUFFIXES)}")
    labels = np.array(tags, np.int64)
    about = [(str(file.relative_to(folder)), file.stat().st_size) for file in files]
    sides = _alike(files) if size is None else (size, size)
    decode = _decoder(sides, channels)
    return Images(
        (channels, *sides), labels, names, _stamp(size, about, names),
        lambda index: decode(files[index]), lambda index: str(files[index]),
    )  # fmt: skip


class Augment(Spec):
    """What training changes in an image, drawn from the seed, the epoch and the image's number alone."""

    shift: int = 0
    """Pixels by which it is moved at most, up or down and left or right; black comes in."""
    flip: bool = False
    """Whether left and right are swapped in half of the cases."""

    def check(self) -> None:
        self.require(self.shift >= 0, f"shift must not be below 0, got {self.shift}")

    def __call__(self, pixels: np.ndarray, seed: int, epoch: int, index: int) -> np.ndarray:
        """pixels: uint8 [C, H, W]. Returns the same shape."""
        drawn = blake2b(f"{seed} {epoch} {index}".encode(), digest_size=24).digest()
        down, right, flip = (int.from_bytes(drawn[i : i + 8], "little") for i in (0, 8, 16))
        if self.shift:
            span = 2 * self.shift + 1
            y, x = down % span, right % span
            wide = np.pad(pixels, ((0, 0), (self.shift, self.shift), (self.shift, self.shift)))
            pixels = wide[:, y : y + pixels.shape[1], x : x + pixels.shape[2]]
        return pixels[:, :, ::-1] if self.flip and flip % 2 else pixels


class Pictures(NamedTuple):
    """A batch of images."""

    images: Tensor
    """float32 [B, C, H, W], normalised."""
    labels: Tensor
    """int64 [B]."""
    where: Sequence[str]
    """[B] where each image comes from, in words."""

    def split(self, rows: int) -> list[Pictures]:
        """These rows in parts of at most so many."""
        parts = [slice(start, start + rows) for start in range(0, len(self.labels), rows)]
        return [Pictures(self.images[part], self.labels[part], self.where[part]) for part in parts]


class ImageBatches:
    """Training batches in an order that the seed alone decides; each epoch is another order of all images.

    Nothing is kept between calls. `at(step)` needs no step before it, so a run that is resumed sees what it would have
    seen; ranks take their rows of the same batch. Where an epoch ends inside a batch, the next one begins there.
    """

    def __init__(
        self,
        source: Images,
        rows: int,
        seed: int = 0,
        *,
        augment: Augment | None = None,
        mean: float | Sequence[float] = 0.5,
        std: float | Sequence[float] = 0.5,
    ) -> None:
        """rows: B, over all ranks. mean, std: of pixels from 0 to 1, one for all channels or one each."""
        if rows < 1:
            raise UsageError(f"batches of {rows} rows: at least 1")
        self.source, self.rows, self.seed, self.augment = source, rows, seed, augment
        self._normal = _Normal(source, mean, std)

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> Pictures:
        """The rows of a step, from 0 on: all, or those of one of several ranks.

        Raises UsageError where ranks cannot share B rows evenly, InputError for a file that is no whole image.
        """
        if self.rows % ranks or not 0 <= rank < ranks:
            raise UsageError(f"a batch of {self.rows} rows cannot be shared by {ranks} ranks")
        share = self.rows // ranks
        return self.take(step * self.rows + rank * share, share)

    def take(self, row: int, count: int) -> Pictures:
        """`count` rows from number `row` on, as if batches were one long list of rows."""
        if row < 0:
            raise UsageError(f"row {row}: steps and rows are counted from 0")
        places = [self._place(number) for number in range(row, row + count)]
        pixels = [self._pixels(epoch, index) for epoch, index in places]
        return self._normal(pixels, [index for _, index in places])

    def epochs(self, step: int) -> float:
        """How often all images have been gone through before this step."""
        return step * self.rows / len(self.source)

    def _place(self, row: int) -> tuple[int, int]:
        epoch, turn = divmod(row, len(self.source))
        return epoch, permuted(turn, len(self.source), _order(self.seed, epoch))

    def _pixels(self, epoch: int, index: int) -> np.ndarray:
        pixels = self.source.pixels(index)
        return pixels if self.augment is None else self.augment(pixels, self.seed, epoch, index)


def whole(
    source: Images, rows: int, *, mean: float | Sequence[float] = 0.5, std: float | Sequence[float] = 0.5
) -> Iterator[Pictures]:
    """All images once, in their order and unchanged, at most `rows` at once: what a model is judged by."""
    normal = _Normal(source, mean, std)
    for start in range(0, len(source), rows):
        indices = range(start, min(start + rows, len(source)))
        yield normal([source.pixels(index) for index in indices], indices)


class _Normal:
    """Pixels as a model reads them: (pixel / 255 − mean) / std."""

    def __init__(self, source: Images, mean: float | Sequence[float], std: float | Sequence[float]) -> None:
        self.source = source
        channels = source.shape[0]
        both = [[value] if isinstance(value, float | int) else list(value) for value in (mean, std)]
        if any(len(values) not in (1, channels) for values in both) or min(both[1], default=0) <= 0:
            raise UsageError(f"mean={mean}, std={std}: one number or {channels}, for as many channels; std above 0")
        self.mean, self.std = (torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) for values in both)

    def __call__(self, pixels: list[np.ndarray], indices: Sequence[int]) -> Pictures:
        values = torch.from_numpy(np.stack(pixels)).float().div_(255).sub_(self.mean).div_(self.std)
        labels = torch.from_numpy(self.source.labels[list(indices)])
        return Pictures(values, labels, [self.source.where(index) for index in indices])


@lru_cache(1024)
def _order(seed: int, epoch: int) -> tuple[int, ...]:
    """The keys of an epoch's permutation, as 64-bit numbers."""
    digest = blake2b(f"images {seed} {epoch}".encode(), digest_size=48).digest()
    return tuple(int.from_bytes(digest[i : i + 8], "little") for i in range(0, 48, 8))


def _idx_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """uint8 of as many dimensions. The sizes that the header claims are checked before they are believed."""
    try:
        with closing(gzip.open(path) if path.suffix == ".gz" else open(path, "rb")) as file:
            header = file.read(4 + 4 * dimensions)
            if header[:4] != bytes([0, 0, 8, dimensions]) or len(header) != 4 + 4 * dimensions:
                raise InputError(f"{path}: not an IDX file of bytes in {dimensions} dimensions")
            shape = tuple(int.from_bytes(header[i : i + 4], "big") for i in range(4, len(header), 4))
            if prod(shape) > MAX_BYTES:
                raise InputError(f"{path}: claims {prod(shape)} bytes, more than {MAX_BYTES}")
            whole = _exactly(cast("IO[bytes]", file), prod(shape), path)
            return np.frombuffer(whole, np.uint8).reshape(shape)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def _exactly(file: IO[bytes], count: int, path: Path) -> bytearray:
    """So many bytes and then the end, read in chunks: a short file takes no more memory than it has."""
    found = bytearray()
    while len(found) <= count and (chunk := file.read(min(CHUNK, count + 1 - len(found)))):
        found += chunk
    if len(found) != count:
        more = "more" if len(found) > count else f"{len(found)}"
        raise InputError(f"{path}: the header says {count} bytes, the file holds {more}")
    return found


def _alike(files: Sequence[Path]) -> tuple[int, int]:
    """(height, width) that all of them have, read from their beginnings."""
    sizes: dict[tuple[int, int], Path] = {}
    for file in files:
        with _opened(file) as image:
            turned = image.getexif().get(0x0112, 1) > 4  # the camera lay on its side
            sizes.setdefault(image.size if turned else image.size[::-1], file)
        if len(sizes) > 1:
            (first, path), (other, _) = sizes.items()
            raise UsageError(
                f"{file}: {_times(other)} pixels, and {path.name} {_times(first)}: data.size (size=) is missing, how "
                "many pixels high and wide they become"
            )
    return next(iter(sizes))


def _decoder(sides: tuple[int, int], channels: int) -> Callable[[Path], np.ndarray]:
    from PIL import Image, ImageOps

    def decode(path: Path) -> np.ndarray:
        with _opened(path) as file:
            if prod(file.size) > MAX_PIXELS:
                raise InputError(f"{path}: {file.size[0]} × {file.size[1]} pixels, more than {MAX_PIXELS}")
            if file.mode not in MODES:
                raise InputError(f"{path}: pixels of the kind {file.mode} do not fit into 8 bits: convert them")
            image: Any = ImageOps.exif_transpose(file).convert("RGB" if channels == 3 else "L")
            fitted = ImageOps.fit(image, (sides[1], sides[0]), Image.Resampling.BICUBIC)
        return np.asarray(fitted).reshape(*sides, channels).transpose(2, 0, 1)

    return decode


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of pixels. Raises InputError where it is none, or where it turns out to be cut while it is read."""
    from PIL import Image

    try:
        with Image.open(path) as file:
            yield file
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a whole image: {error}") from None


def _times(sides: tuple[int, int]) -> str:
    return f"{sides[1]} × {sides[0]}"


def _stamp(*about: object) -> str:
    return blake2b(repr(about).encode(), digest_size=8).hexdigest()
