"""Alignments: what is read and refused, and that crops are functions of numbers."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from sublayer.data import alignments as module
from sublayer.data.alignments import (
    Alignment,
    AlignmentBatches,
    alignments,
    cut,
    gathered,
    held_crops,
    parted,
    read_alignments,
)
from sublayer.errors import InputError, UsageError
from sublayer.recipes.evoformer import AMINO_ACIDS, GAP, UNKNOWN

STOCKHOLM = """# STOCKHOLM 1.0
#=GF ID two blocks

one/1-4   AR.N
#=GR one/1-4 SS HHHH
two       -rnD

one/1-4   .C
two       Qe
#=GC SS_cons HH
//
"""
READ = ["AR-N-C", "-RNDQE"]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def spelled(cells: np.ndarray) -> list[str]:
    letters = AMINO_ACIDS + "X-"
    return ["".join(letters[i] for i in row) for row in cells]


def family(count: int = 12, columns: int = 9, seed: int = 0) -> Alignment:
    cells = np.random.default_rng(seed).integers(0, 22, (count, columns)).astype(np.uint8)
    cells[0] = np.arange(columns) % 20
    return Alignment("somewhere", tuple(f"n{i}" for i in range(count)), cells)


# --- files ---


@pytest.mark.parametrize("name", ["f.sto", "f.stk.gz"])
def test_stockholm_is_read_block_by_block(name: str, tmp_path: Path) -> None:
    (found,) = read_alignments(written(tmp_path, name, STOCKHOLM))
    assert found.names == ("one/1-4", "two")
    assert spelled(found.cells) == READ


def test_several_alignments_of_a_file(tmp_path: Path) -> None:
    first, second = read_alignments(written(tmp_path, "f.sto", STOCKHOLM + "\n" + STOCKHOLM.replace("two ", "three ")))
    assert (first.names, second.names) == (("one/1-4", "two"), ("one/1-4", "three"))
    assert second.where.endswith("f.sto, alignment 2")


def test_insertions_of_a3m_are_left_out_and_lower_case_of_fasta_is_not(tmp_path: Path) -> None:
    text = ">query some words\nAR\nN-\n\n>hit\nAarg.RN\nD\n>hit\n--\nDD\n"
    (found,) = read_alignments(written(tmp_path, "f.a3m", text))
    assert spelled(found.cells) == ["ARN-", "ARND", "--DD"]
    assert found.names == ("query", "hit", "hit#3")
    (found,) = read_alignments(written(tmp_path, "f.afa", ">a\nArn.\n>b\n--XB\n"))
    assert spelled(found.cells) == ["ARN-", "--XD"]


def test_every_letter_is_known() -> None:
    assert [module.LETTERS[letter] for letter in AMINO_ACIDS] == list(range(20))
    others = {"B": "D", "Z": "E", "U": "C"}
    assert {letter: AMINO_ACIDS[module.LETTERS[letter]] for letter in others} == others
    assert {module.LETTERS[letter] for letter in "XJO"} == {UNKNOWN}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("f.sto", ">a\nAR\n", r"line 1: expected '# STOCKHOLM 1.0', found '>a'"),
        ("f.sto", "# STOCKHOLM 1.0\na AR\n", "line 2: the file ends inside an alignment: // is missing"),
        ("f.sto", "# STOCKHOLM 1.0\na AR\nb A\n//\n", "line 4: b has 1 columns in the alignment that ends here"),
        ("f.sto", "# STOCKHOLM 1.0\na A R\n//\n", "line 2: expected a name and its letters"),
        ("f.sto", "# STOCKHOLM 1.0\na A1\n//\n", "line 2: '1' is neither an amino acid nor a gap"),
        ("f.sto", "# STOCKHOLM 1.0\na A€\n//\n", "'€' is neither"),
        ("f.sto", "# STOCKHOLM 1.0\n//\n", "line 2: an alignment without residues"),
        ("f.sto", "", "no alignment in it"),
        ("f.a3m", "AR\n", "line 1: expected '>' and a name"),
        ("f.a3m", ">a\nAR\n>b\nA\n", "b has 1 columns"),
        ("f.a3m", ">a\n>b\n", "an alignment without residues"),
    ],
)
def test_what_is_no_alignment_is_refused_with_its_line(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(InputError) as caught:
        read_alignments(path)
    assert str(caught.value).startswith(str(path))
    assert said in str(caught.value)


def test_what_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "f.a3m.gz", ">a\n" + "A" * 100 + "\n" + "R" * 100)
    monkeypatch.setattr(module, "LONGEST_LINE", 99)
    with pytest.raises(InputError, match="line 2: a line of more than 99 bytes"):
        read_alignments(path)
    monkeypatch.setattr(module, "LONGEST_LINE", 1000)
    monkeypatch.setattr(module, "MAX_CELLS", 150)
    with pytest.raises(InputError, match="line 3: more than 150 bytes"):
        read_alignments(path)


def test_a_torn_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "f.sto.gz", STOCKHOLM * 50)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="cannot be read"):
        read_alignments(path)


def test_folders_and_globs_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name in ("b.sto", "a.sto.gz", "in/c.a3m"):
        written(tmp_path, name, ">q\nARN\n" if name.endswith("a3m") else STOCKHOLM)
    written(tmp_path, "notes.txt", "not read")
    names = [Path(one.where).name for one in alignments(str(tmp_path))]
    assert names == ["a.sto.gz", "b.sto", "c.a3m"]
    assert len(alignments(str(tmp_path / "*.sto"))) == 1
    with pytest.raises(InputError, match="no alignments"):
        alignments(str(tmp_path / "*.txt"))


def test_coordinates_lie_beside_an_alignment(tmp_path: Path) -> None:
    path = written(tmp_path, "f.sto.gz", STOCKHOLM)
    np.save(tmp_path / "f.npy", np.arange(12.0).reshape(4, 3))
    (found,) = read_alignments(path)
    assert found.coordinates is not None
    assert (found.coordinates.dtype, found.coordinates[1].tolist()) == (np.float32, [3, 4, 5])
    for wrong in (np.zeros((6, 3)), np.zeros((4, 3), int), np.array([{}])):
        np.save(tmp_path / "f.npy", wrong)
        with pytest.raises(InputError, match=r"f.npy: (expected floats \[4, 3\]|no array)"):
            read_alignments(path)


# --- crops ---


def test_a_crop_is_the_columns_of_its_target() -> None:
    cells = np.array([[0, GAP, 2, 3, 4], [5, 6, GAP, 8, 9], [1, 1, 1, 1, 1]], np.uint8)
    one = Alignment("f", ("a", "b", "c"), cells, np.arange(12, dtype=np.float32).reshape(4, 3))
    crop = cut(one, 0, cells[1:], 1, 2)
    assert crop.cells.tolist() == [[2, 3], [GAP, 8], [1, 1]]
    assert crop.asked.tolist() == [False, True, True]
    assert crop.coordinates is not None
    assert crop.coordinates.tolist() == [[3, 4, 5], [6, 7, 8]]
    assert crop.profile[0, [1, 2, GAP]].tolist() == pytest.approx([1 / 3] * 3)
    assert crop.where == "f: a, residues 2 to 3"
    assert cut(one, 1, cells[:1], 0, 9).coordinates is None, "they are the first sequence's"


def test_a_batch_is_padded_to_one_size() -> None:
    one, other = family(4, 5), family(3, 9)
    known = np.array([[0, 0, 0], [3, 4, 0], [np.nan] * 3], np.float32)
    crops = [cut(one, 0, one.cells[1:], 2, 2), cut(other, 0, other.cells[1:2], 0, 3)._replace(coordinates=known)]
    batch = gathered(crops)
    assert batch.msa.shape == (2, 4, 3)
    assert batch.segment.tolist() == [[1, 1, 0], [1, 1, 1]]
    assert batch.present.sum((1, 2)).tolist() == [8, 6]
    assert batch.target.tolist() == [[2, 3, 0], [0, 1, 2]]
    assert not batch.asked[:, 0].any()
    assert batch.asked.sum((1, 2)).tolist() == [6, 3]
    assert batch.distances is not None
    assert batch.distances[0].isnan().all()
    assert batch.distances[1, :2, :2].tolist() == [[0, 5], [5, 0]]
    assert batch.distances[1, 2].isnan().all()


def test_crops_are_functions_of_seed_and_number() -> None:
    sources = [(family(12, 30, i), 1.0) for i in range(3)]
    batches, again, other = (AlignmentBatches(sources, 4, 8, 5, seed) for seed in (1, 1, 2))
    later = again.at(7)
    assert torch.equal(batches.at(7).msa, later.msa)
    assert not torch.equal(batches.at(7).msa, batches.at(8).msa)
    assert not torch.equal(batches.at(7).msa, other.at(7).msa)
    halves = [batches.at(7, rank, 2) for rank in range(2)]
    assert [where for half in halves for where in half.where] == later.where
    assert len({where for step in range(20) for where in batches.at(step).where}) > 60
    with pytest.raises(UsageError, match="cannot be shared"):
        batches.at(0, 0, 3)


def test_crops_hold_all_residues_and_sequences_and_never_one_twice() -> None:
    one = family(12, 30)
    batches, seen = AlignmentBatches([(one, 1.0)], 1, 8, 5), set[bytes]()
    for number in range(200):
        crop = batches.crop(number)
        assert crop.cells.shape[0] == 5
        assert crop.cells.shape[1] <= 8
        assert GAP not in crop.cells[0]
        assert len(np.unique(crop.cells, axis=0)) == 5
        seen.add(crop.where.encode())
    assert {where.split(b": ")[1].split(b",")[0] for where in seen} == {f"n{i}".encode() for i in range(12)}
    assert any(b"residues 23 to 30" in where for where in seen)


def test_the_target_of_a_known_structure_is_its_own_sequence() -> None:
    one = family(12, 30)
    known = Alignment(one.where, one.names, one.cells, np.zeros((30, 3), np.float32))
    batches = AlignmentBatches([(known, 1.0)], 4, 8, 5)
    assert all(" n0, " in where for step in range(5) for where in batches.at(step).where)
    assert batches.at(0).distances is not None


def test_sources_have_their_weights() -> None:
    batches = AlignmentBatches([(family(4, 9, 0), 1.0), (family(5, 7, 1), 3.0)], 1, 9, 5)
    second = sum(batches.crop(number).cells.shape[0] == 5 for number in range(400))
    assert second == pytest.approx(300, abs=40)


def test_copies_of_a_sequence_are_held_out_together() -> None:
    one = family(400, 9)
    cells = np.concatenate([one.cells, one.cells])
    cells = np.concatenate([cells, np.full_like(cells[:, :1], GAP)], 1)
    cells[400:] = np.roll(cells[400:], 1, axis=1)  # the same residues, in other columns
    both = Alignment("f", tuple(map(str, range(800))), cells)
    train, held = parted(both, 0.2)
    assert len(train.cells) + len(held.cells) == 800
    assert len(held.cells) == pytest.approx(160, abs=50)
    numbers = {int(name) for name in held.names}
    assert {(number + 400) % 800 for number in numbers} == numbers
    known = Alignment("f", one.names, one.cells, np.zeros((9, 3), np.float32))
    assert all(parted(known, share)[0].names[0] == "n0" for share in (0.2, 0.5, 0.99))


def test_every_held_out_cell_is_asked_for_once() -> None:
    train, held = family(20, 30), family(23, 30, 9)
    crops = list(held_crops(train, held.cells, 8, 6))
    pieces = [crop.cells[crop.asked] for crop in crops]
    for first in range(0, 23, 2):  # 6 rows: the target, 3 to read, 2 to tell
        rows = np.concatenate(pieces[first // 2 * 4 : first // 2 * 4 + 4], 1)
        assert np.array_equal(rows, held.cells[first : first + 2])
    assert sum(piece.size for piece in pieces) == held.cells.size
    assert all(len(crop.cells) <= 6 and not crop.asked[0] for crop in crops)


def test_too_few_sequences_are_refused() -> None:
    with pytest.raises(InputError, match="one sequence to train on is no alignment"):
        AlignmentBatches([(family(1), 1.0)], 1, 8, 4)
    gaps = Alignment("f", ("a", "b"), np.full((2, 3), GAP, np.uint8))
    with pytest.raises(InputError, match="f: no sequence with residues"):
        AlignmentBatches([(gaps, 1.0)], 1, 8, 4)
    with pytest.raises(UsageError, match="at least 1, and 2"):
        AlignmentBatches([(family(), 1.0)], 1, 8, 1)
