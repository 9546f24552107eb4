"""Alignments of proteins: Stockholm, A3M and aligned FASTA files in bounded memory, and crops of them as batches.

B crops, S sequences, L residues, K columns of an alignment.
"""

from __future__ import annotations

import glob
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from string import ascii_lowercase
from typing import IO, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, UsageError
from ..recipes.evoformer import AMINO_ACIDS, GAP, UNKNOWN

STOCKHOLM, FASTA = (".sto", ".stk", ".stockholm"), (".a3m", ".fasta", ".fa", ".afa")
SUFFIXES = STOCKHOLM + FASTA
LONGEST_LINE = 2**20  # bytes
MAX_CELLS = 2**30  # of one file
MAX_RESIDUES = 2**20  # of a structure
CLASSES = GAP + 1  # what a letter may stand for
# Letters for several amino acids, and rare ones, as AlphaFold reads them.
LETTERS = {letter: i for i, letter in enumerate(AMINO_ACIDS)} | {"B": 3, "Z": 6, "U": 4, "J": UNKNOWN, "O": UNKNOWN}
LETTERS |= {"X": UNKNOWN} | dict.fromkeys("-.~_", GAP)
NO_CELL = 255

_INSERTIONS = dict.fromkeys(map(ord, f"{ascii_lowercase}."))  # in A3M: left out
_TABLE = np.full(256, NO_CELL, np.uint8)
for _letter, _id in LETTERS.items():
    _TABLE[[ord(_letter), ord(_letter.lower())]] = _id


@dataclass(frozen=True)
class Alignment:
    """Sequences whose residues stand in columns."""

    where: str
    """The file, and which alignment of it."""
    names: tuple[str, ...]
    cells: np.ndarray
    """uint8 [S, K]: amino acids in the order of AMINO_ACIDS, UNKNOWN, GAP."""
    coordinates: np.ndarray | None = None
    """float32 [L, 3] in Å: where the residues of the first sequence are (their Cβ, glycine's Cα); NaN: not known."""

    def only(self, rows: np.ndarray) -> Alignment:
        """Some of the sequences; coordinates stay with the first."""
        kept = self.coordinates if len(rows) and rows[0] == 0 else None
        return Alignment(self.where, tuple(self.names[i] for i in rows), self.cells[rows], kept)

    @cached_property
    def profile(self) -> np.ndarray:
        """float32 [K, 22]: the share of each class in each column."""
        counts = np.stack([(self.cells == i).sum(0) for i in range(CLASSES)], -1)
        return (counts / max(len(self.cells), 1)).astype(np.float32)


# --- reading ---


def alignments(paths: str | Sequence[str]) -> list[Alignment]:
    """All alignments of files, folders and globs, in the order of names: .sto, .stk, .a3m, .fasta, .fa, .afa, or .gz
    of these.

    Raises InputError for a path without any, and for damage with file and line.
    """
    found = [one for path in _files(paths) for one in read_alignments(path)]
    if not found:
        raise InputError(f"{paths}: no alignments: expected files {', '.join(SUFFIXES)}")
    return found


def read_alignments(path: Path | str) -> list[Alignment]:
    """The alignments of one file; a FASTA file is one.

    Stockholm: annotation (#=…) is left out. A3M: lower-case letters and dots are insertions and left out, so that the
    columns are the first sequence's residues. Beside FAMILY.sto a FAMILY.npy may lie: `coordinates` of its first
    alignment. Raises InputError with file and line for what is no alignment.
    """
    path = Path(path)
    kind = _kind(path)
    try:
        with cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else open(path, "rb")) as file:
            lines = _lines(file, path)
            found = list(_stockholm(lines, path) if kind in STOCKHOLM else _fasta(lines, path, kind == ".a3m"))
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{path}: cannot be read: {reason}") from None
    if not found:
        raise InputError(f"{path}: no alignment in it")
    structure = Path(str(path).removesuffix(".gz")).with_suffix(".npy")
    if structure.exists():
        first = found[0]
        found[0] = Alignment(first.where, first.names, first.cells, _coordinates(structure, first))
    return found


def _files(paths: str | Sequence[str]) -> Iterator[Path]:
    for name in (paths,) if isinstance(paths, str) else paths:
        path = Path(os.path.expanduser(name))
        if path.is_file():
            yield path
            continue
        within = path.rglob("*") if path.is_dir() else map(Path, glob.glob(str(path), recursive=True))
        inside = sorted(file for file in within if file.is_file() and _kind(file) in SUFFIXES)
        if not inside:
            raise InputError(f"{name}: no alignments: expected files {', '.join(SUFFIXES)}")
        yield from inside


def _kind(path: Path) -> str:
    return Path(str(path).removesuffix(".gz")).suffix.lower()


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, str]]:
    """(number, line without its end) of each line."""
    number, read = 0, 0
    while line := file.readline(LONGEST_LINE + 1):
        number, read = number + 1, read + len(line)
        if len(line) > LONGEST_LINE or read > MAX_CELLS:
            what = f"a line of more than {LONGEST_LINE}" if len(line) > LONGEST_LINE else f"more than {MAX_CELLS}"
            raise InputError(f"{path}, line {number}: {what} bytes is no alignment of proteins")
        yield number, line.decode("utf-8", "replace").rstrip("\r\n")


def _stockholm(lines: Iterable[tuple[int, str]], path: Path) -> Iterator[Alignment]:
    rows: dict[str, list[np.ndarray]] = {}
    open_, number, count = False, 0, 0
    for number, line in lines:
        if not open_:
            if line.strip():
                if not line.startswith("# STOCKHOLM 1."):
                    raise InputError(f"{path}, line {number}: expected '# STOCKHOLM 1.0', found {line[:40]!r}")
                open_ = True
        elif line.startswith("//"):
            count += 1
            yield _whole(rows, f"{path}, alignment {count}" if count > 1 else str(path), number)
            rows, open_ = {}, False
        elif line.strip() and not line.startswith("#"):
            pieces = line.split()
            if len(pieces) != 2:
                raise InputError(f"{path}, line {number}: expected a name and its letters, found {line[:40]!r}")
            rows.setdefault(pieces[0], []).append(_cells(pieces[1], path, number))
    if open_:
        raise InputError(f"{path}, line {number}: the file ends inside an alignment: // is missing")


def _fasta(lines: Iterable[tuple[int, str]], path: Path, insertions: bool) -> Iterator[Alignment]:
    rows: dict[str, list[np.ndarray]] = {}
    name, number = "", 0
    for number, line in lines:
        if line.startswith(">"):
            name = line[1:].split(maxsplit=1)[0] if line[1:].strip() else ""
            while name in rows or not name:  # names say nothing here, but each sequence is one
                name = f"{name}#{len(rows) + 1}"
            rows[name] = []
        elif line.strip() and not (line.startswith("#") and not rows):
            if not rows:
                raise InputError(f"{path}, line {number}: expected '>' and a name, found {line[:40]!r}")
            text = line.strip().translate(_INSERTIONS) if insertions else line.strip()
            rows[name].append(_cells(text, path, number))
    if rows:
        yield _whole(rows, str(path), number)


def _cells(text: str, path: Path, number: int) -> np.ndarray:
    cells = _TABLE[np.frombuffer(text.encode("latin-1", "replace"), np.uint8)]
    wrong = np.flatnonzero(cells == NO_CELL)
    if len(wrong):
        raise InputError(f"{path}, line {number}: {text[wrong[0]]!r} is neither an amino acid nor a gap")
    return cells


def _whole(rows: Mapping[str, list[np.ndarray]], where: str, number: int) -> Alignment:
    """The alignment that ended in line `number`."""
    sequences = [np.concatenate([np.zeros(0, np.uint8), *pieces]) for pieces in rows.values()]
    first = len(sequences[0]) if sequences else 0
    if not first:
        raise InputError(f"{where}, line {number}: an alignment without residues")
    for name, sequence in zip(rows, sequences, strict=True):
        if len(sequence) != first:
            raise InputError(
                f"{where}, line {number}: {name} has {len(sequence)} columns in the alignment that ends here, and"
                f" {next(iter(rows))} has {first}"
            )
    return Alignment(where, tuple(rows), np.stack(sequences))


def _coordinates(path: Path, alignment: Alignment) -> np.ndarray:
    wanted = (int((alignment.cells[0] != GAP).sum()), 3)
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path}: no array of numpy's: {error}") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind != "f" or found.shape != wanted:
        shape = f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else "an archive"
        raise InputError(f"{path}: expected floats {list(wanted)}, a row for each residue of {alignment.names[0]}, "
                         f"found {shape}")  # fmt: skip
    return np.array(found, np.float32)


# --- parting and cropping ---


def parted(alignment: Alignment, share: float) -> tuple[Alignment, Alignment]:
    """(to train on, held out): a sequence's residues alone decide, so copies fall on one side. The sequence whose
    coordinates are known is trained on."""
    held = np.array([_drawn(row[row != GAP].tobytes()) < share for row in alignment.cells])
    if alignment.coordinates is not None:
        held[0] = False
    return alignment.only((~held).nonzero()[0]), alignment.only(held.nonzero()[0])


def _drawn(data: bytes) -> float:
    return int.from_bytes(blake2b(data, digest_size=4).digest(), "little") / 2**32


class Crop(NamedTuple):
    """Some residues of a target, and of sequences aligned to it. Columns where the target has a gap are left out."""

    cells: np.ndarray  # uint8 [S, L]; the first row is the target
    asked: np.ndarray  # bool [S]: sequences that may be asked for: never the target, which the model reads whole
    profile: np.ndarray  # float32 [L, 22], of the sequences that are trained on
    coordinates: np.ndarray | None  # float32 [L, 3]
    where: str


class Crops(NamedTuple):
    """A batch, padded to one size."""

    msa: Tensor
    """int64 [B, S, L]."""
    present: Tensor
    """bool [B, S, L]: what is no padding."""
    target: Tensor
    """int64 [B, L]."""
    segment: Tensor
    """int64 [B, L]: 0 at padding."""
    asked: Tensor
    """bool [B, S, L]: cells that may be asked for."""
    profile: Tensor
    """float32 [B, L, 22]."""
    distances: Tensor | None
    """float32 [B, L, L] in Å, NaN where not known; None where no crop has coordinates."""
    where: Sequence[str]


class AlignmentBatches:
    """Training crops, each a function of the seed and its number alone: which alignment (by the weights), which target
    (the first sequence where its coordinates are known, else any), which residues of it, which other sequences."""

    def __init__(
        self, sources: Sequence[tuple[Alignment, float]], rows: int, length: int, depth: int, seed: int = 0
    ) -> None:
        """rows: B, over all ranks; length: residues of a crop at most; depth: sequences at most, the target's too."""
        if min(rows, length) < 1 or depth < 2:
            raise UsageError(f"batches of {rows} crops of {depth} × {length}: at least 1, and 2 sequences of a residue")
        self.rows, self.length, self.depth, self.seed = rows, length, depth, seed
        self.alignments = [one for one, _ in sources]
        self.targets = [_with_residues(one) for one in self.alignments]
        lonely = next((one for one in self.alignments if len(one.cells) < 2), None)
        if lonely is not None:
            raise InputError(f"{lonely.where}: one sequence to train on is no alignment: give more, or hold out fewer")
        weights = np.array([weight for _, weight in sources])
        self.bounds = np.cumsum(weights) / weights.sum()

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> Crops:
        """The rows of a step, from 0 on: all, or those of one of several ranks.

        Raises UsageError where ranks cannot share B rows evenly.
        """
        if self.rows % ranks or not 0 <= rank < ranks:
            raise UsageError(f"a batch of {self.rows} rows cannot be shared by {ranks} ranks")
        share = self.rows // ranks
        first = step * self.rows + rank * share
        return gathered([self.crop(number) for number in range(first, first + share)])

    def crop(self, number: int) -> Crop:
        """The crop of a number, from 0 on."""
        digest = blake2b(f"{self.seed} alignments {number}".encode(), digest_size=16).digest()
        draw = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
        chosen = min(int(np.searchsorted(self.bounds, draw.random(), side="right")), len(self.alignments) - 1)
        alignment, targets = self.alignments[chosen], self.targets[chosen]
        target = 0 if alignment.coordinates is not None else int(draw.choice(targets))
        start = int(draw.integers(max(residues(alignment, target) - self.length, 0) + 1))
        others = np.delete(np.arange(len(alignment.cells)), target)
        others = draw.permutation(others)[: self.depth - 1]
        return cut(alignment, target, alignment.cells[others], start, self.length)


def held_crops(train: Alignment, held: np.ndarray, length: int, depth: int) -> Iterator[Crop]:
    """All held-out sequences [S, K], in windows over the first target; each beside sequences that are trained on, which
    fill at least half of the depth, where there are as many, and are not asked for."""
    target = int(_with_residues(train)[0])
    others = np.delete(np.arange(len(train.cells)), target)
    context = others[np.linspace(0, len(others) - 1, min(len(others), depth // 2)).astype(int)]
    room = max(depth - 1 - len(context), 1)
    for first in range(0, len(held), room):
        rows = held[first : first + room]
        for start in range(0, residues(train, target), length):
            yield cut(train, target, np.concatenate([rows, train.cells[context]]), start, length, len(rows))


def cut(
    alignment: Alignment, target: int, others: np.ndarray, start: int, length: int, asked: int | None = None
) -> Crop:
    """Residues start … start + length of a target, and the same columns of others [S − 1, K], of which the first
    `asked` may be asked for (None: all)."""
    columns = np.flatnonzero(alignment.cells[target] != GAP)[start : start + length]
    cells = np.concatenate([alignment.cells[target][None], others])[:, columns]
    may = np.zeros(len(cells), np.bool_)
    may[1 : len(cells) if asked is None else asked + 1] = True
    known = None if target or alignment.coordinates is None else alignment.coordinates[start : start + length]
    where = f"{alignment.where}: {alignment.names[target]}, residues {start + 1} to {start + len(columns)}"
    return Crop(cells, may, alignment.profile[columns], known, where)


def residues(alignment: Alignment, row: int) -> int:
    """How many residues a sequence has."""
    return int((alignment.cells[row] != GAP).sum())


def _with_residues(alignment: Alignment) -> np.ndarray:
    """The numbers of the sequences that can be targets."""
    found = np.flatnonzero((alignment.cells != GAP).any(1))
    if not len(found):
        raise InputError(f"{alignment.where}: no sequence with residues to train on")
    return found


def gathered(crops: Sequence[Crop]) -> Crops:
    """A batch of crops."""
    B, S, L = len(crops), max(len(c.cells) for c in crops), max(c.cells.shape[1] for c in crops)
    msa, present = torch.full((B, S, L), GAP), torch.zeros(B, S, L, dtype=torch.bool)
    asked, segment = torch.zeros_like(present), torch.zeros(B, L, dtype=torch.long)
    target, profile = torch.zeros_like(segment), torch.zeros(B, L, CLASSES)
    distances = torch.full((B, L, L), torch.nan) if any(c.coordinates is not None for c in crops) else None
    for i, crop in enumerate(crops):
        rows, length = crop.cells.shape
        msa[i, :rows, :length] = torch.from_numpy(crop.cells.astype(np.int64))
        present[i, :rows, :length] = True
        asked[i, :rows, :length] = torch.from_numpy(crop.asked)[:, None]
        target[i, :length], segment[i, :length] = msa[i, 0, :length], 1
        profile[i, :length] = torch.from_numpy(crop.profile)
        if distances is not None and crop.coordinates is not None:
            apart = crop.coordinates[:, None] - crop.coordinates[None]
            distances[i, :length, :length] = torch.from_numpy(np.sqrt((apart**2).sum(-1)))
    return Crops(msa, present, target, segment, asked, profile, distances, [c.where for c in crops])
