"""What operators make, counted where a test says how large it may be."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocated(TorchDispatchMode):
    """Names of the operations that ran, and the elements of the largest tensor any of them made."""

    def __enter__(self) -> Any:
        self.names, self.largest = set[str](), 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for made in result if isinstance(result, tuple | list) else (result,):
            if isinstance(made, torch.Tensor):
                self.largest = max(self.largest, made.untyped_storage().nbytes() // made.element_size())
        return result
