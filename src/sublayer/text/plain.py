"""What Bytes and the tokenizers that only count share: text is looked up piece by piece, and nothing is merged."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..files import write_json
from .tokenizer import Ids, Names, Policy, check_policy, utf8


class Plain(ABC):
    """Encoding and saving of a tokenizer that says how a text without special tokens is looked up."""

    @property
    @abstractmethod
    def eos(self) -> tuple[int, ...]: ...

    @property
    @abstractmethod
    def names(self) -> Names:
        """Its special tokens."""

    @abstractmethod
    def look_up(self, text: str, place: int) -> Ids:
        """The ids of a text that begins at `place` of a longer one; special tokens' names in it are text."""

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` reads back from a tokenizer.json."""

    def encode(self, text: str, *, framed: bool = False, specials: Policy = "text") -> list[int]:
        """As Tokenizer.encode; framed: after the id that ends texts, with which documents begin in training too.

        Raises InputError also for what the tokenizer cannot look up.
        """
        ids = self._encode(text, specials).tolist()
        return [*self.eos, *ids] if framed else ids

    def encode_batch(self, texts: Sequence[str], *, specials: Policy = "text") -> list[Ids]:
        return [self._encode(text, specials) for text in texts]

    def _encode(self, text: str, specials: Policy) -> Ids:
        check_policy(specials)
        if specials == "error":
            self.names.refuse(text)
        if specials != "special":
            return self.look_up(text, 0)
        utf8(text)  # refuses a surrogate with its place in the whole text
        parts, place = [np.empty(0, np.uint32)], 0
        for part in self.names.split(text):
            if isinstance(part, str):
                parts.append(self.look_up(part, place))
                place += len(part)
            else:
                parts.append(np.array([part], np.uint32))
                place += self.names.length(part)
        return np.concatenate(parts)

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.json into folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "tokenizer.json", self.to_json())
