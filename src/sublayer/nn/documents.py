"""The documents of packed rows as a batch of their own, so that a recurrence reads them side by side.

B rows, L tokens, n documents of at most T tokens, K documents of a row at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..step import Step, document_positions, document_starts


@dataclass(frozen=True)
class Documents:
    """Row by row and in order. A row's first is the one it continues: it is there even where all tokens are padding."""

    shape: tuple[int, int]  # B, L
    row: Tensor  # [n] the row of each document
    place: Tensor  # [n] which of its row's documents it is, from 0
    number: Tensor  # [n] its number in `segment`; 0 where the row has no token
    length: Tensor  # [n] tokens
    cells: Tensor  # [tokens] where in [B · L] each token lies
    spots: Tensor  # [tokens] where in [n · T]
    longest: int  # T, at least 1

    @classmethod
    def of(cls, segment: Tensor) -> Documents:
        """The documents of `segment` [B, L], in neighbouring runs, 0 being padding. It waits for the device."""
        starts, real = document_starts(segment), segment != 0
        place = starts.long().cumsum(1)
        count = place[:, -1] + 1
        first = count.cumsum(0) - count
        row = torch.arange(len(segment), device=segment.device).repeat_interleave(count)
        document = (first[:, None] + place)[real]
        length = torch.zeros_like(row).scatter_add(0, document, torch.ones_like(document))
        number = torch.zeros_like(row).scatter(0, document, segment[real].long())
        longest = max(1, int(length.max()))
        within = document_positions(segment, starts)[real]
        cells = real.flatten().nonzero()[:, 0]
        places = torch.arange(len(row), device=row.device) - first[row]
        return cls(
            (segment.shape[0], segment.shape[1]),
            row,
            places,
            number,
            length,
            cells,
            document * longest + within,
            longest,
        )

    def split(self, x: Tensor) -> Tensor:
        """[B, L, …] → [n, T, …], zeros behind the tokens."""
        wide = x.new_zeros(len(self.row) * self.longest, *x.shape[2:])
        wide = wide.index_copy(0, self.spots, x.flatten(0, 1)[self.cells])
        return wide.view(-1, self.longest, *x.shape[2:])

    def join(self, y: Tensor) -> Tensor:
        """[n, T, …] → [B, L, …], zeros at padding."""
        wide = y.new_zeros(self.shape[0] * self.shape[1], *y.shape[2:])
        return wide.index_copy(0, self.cells, y.flatten(0, 1)[self.spots]).view(*self.shape, *y.shape[2:])

    def reversed(self, x: Tensor) -> Tensor:
        """[n, T, …], each document from its last token to its first; its own inverse."""
        places = torch.arange(self.longest, device=x.device)
        turned = self.length[:, None] - 1 - places
        order = torch.where(turned >= 0, turned, places)
        return x[torch.arange(len(x), device=x.device)[:, None], order]

    def alike(self) -> list[tuple[Tensor, Documents]]:
        """(which of the n, these alone): those of about one length together, within a factor of 2, the longest first;
        those without tokens are left out. Padded to their longest, all take twice their tokens at most."""
        document, within = self.spots // self.longest, self.spots % self.longest
        found: list[tuple[Tensor, Documents]] = []
        for bits in range(self.longest.bit_length() - 1, -1, -1):
            chosen = self.length >> bits == 1
            numbers, mine = chosen.nonzero()[:, 0], chosen[document]
            if len(numbers):
                length = self.length[numbers]
                longest, rank = int(length.max()), chosen.long().cumsum(0) - 1
                spots = rank[document[mine]] * longest + within[mine]
                about = (self.row[numbers], self.place[numbers], self.number[numbers], length)
                found.append((numbers, Documents(self.shape, *about, self.cells[mine], spots, longest)))
        return found

    def packed(self, back: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """(the documents that have tokens, the longest first; how many of them have a first token, a second, …; where
        each token lies among all first tokens, then all second ones, …). back: counted from a document's last token."""
        order = self.length.argsort(descending=True, stable=True)
        order = order[: int((self.length > 0).sum())]
        sizes = len(order) - torch.bincount(self.length[order], minlength=self.longest + 1).cumsum(0)[:-1]
        rank = torch.zeros_like(self.length).index_copy(0, order, torch.arange(len(order), device=order.device))
        document, within = self.spots // self.longest, self.spots % self.longest
        within = self.length[document] - 1 - within if back else within
        return order, sizes, (sizes.cumsum(0) - sizes)[within] + rank[document]

    def last(self, y: Tensor) -> Tensor:
        """[n, T, …] → [n, …]: at each document's last token (at its first cell where it has none)."""
        return y[torch.arange(len(y), device=y.device), (self.length - 1).clamp(min=0)]

    def by_row(self, values: Tensor) -> Tensor:
        """[n, …] → [B, K, …], zeros where a row has fewer documents."""
        table = values.new_zeros(self.shape[0], int(self.place.max()) + 1, *values.shape[1:])
        return table.index_put((self.row, self.place), values)

    @property
    def newest(self) -> Tensor:
        """[B]: which of the n is each row's last."""
        return torch.bincount(self.row).cumsum(0) - 1


def beginning(step: Step, layer: int, rows: Tensor, numbers: Tensor | None) -> Tensor | None:
    """[n, S]: what Step.condition [B, K, layers, S] gives the documents of these rows and `segment` numbers to start
    from in a layer; zeros for a document that the memory does not have. None: there is no condition.

    The K are the documents of the memory in order. Where tokens or memory name none, all start from the first.
    """
    if step.condition is None:
        return None
    states = step.condition[:, :, layer]
    if numbers is None or step.memory_segment is None:
        return states[rows, 0]
    memory = step.memory_segment.long()
    document = torch.where(memory != 0, document_starts(memory).long().cumsum(1) + 1, 0)
    named = memory.new_zeros(len(memory), states.shape[1] + 1).scatter(1, document, memory)[:, 1:]
    same = (named[rows] == numbers[:, None]) & (numbers != 0)[:, None]
    found = states[rows, same.int().argmax(1)]  # a row without tokens begins with the first document
    return torch.where((same.any(1) | (numbers == 0))[:, None], found, 0)
