"""Models of the Hugging Face hub by their names, org/name or org/name@revision: fetched once, then read from its cache.

What is fetched cannot run code: descriptions, tokenizers and safetensors, or one GGUF file that is asked for as
org/name/FILE.gguf, with all the parts of which it is one. The descriptions come first, so that a model that no recipe
reads costs no more than them.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import WeightsError
from ..gguf_header import model_name, part_count

NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(/(?P<file>(\w[\w.-]*/)*\w[\w.-]*\.gguf))?(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?",
    re.ASCII,
)
DESCRIPTIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "README.md", "LICENSE*")


class HubName(NamedTuple):
    repo: str
    file: str | None
    revision: str | None

    @classmethod
    def read(cls, name: str) -> HubName | None:
        """None for what can only be a path here: it exists, its folder does, or it does not look like a name."""
        if Path(name).exists() or Path(name.split("/")[0]).exists():
            return None
        found = NAME.fullmatch(name)
        return cls(**found.groupdict()) if found else None

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else "") + (f"@{self.revision}" if self.revision else "")


def local(name: Path | str, *, weights: bool = True) -> Path:
    """The path here of a model: a path as it is, the hub's fetched, or, without weights, its descriptions alone.

    The hub is asked at HF_ENDPOINT, not at all where HF_HUB_OFFLINE is set, and again each time: what is there already
    is not fetched again, and serves where there is no network. Raises WeightsError for a name that the hub does not
    have, or not for everyone, and where it cannot be reached; SpecError, before any weights are fetched, for an
    architecture without a recipe.
    """
    asked = HubName.read(str(name))
    if asked is None:
        return Path(name)
    if asked.file is not None:
        file, count = Path(asked.file), part_count(Path(asked.file))
        parts = file if count == 1 else file.with_name(f"{model_name(file)}-*-of-{count:05d}.gguf")
        path = _fetch(asked, [parts.as_posix()], inner=True) / file
        if not path.exists():
            raise WeightsError(f"{asked}: the hub's model has no file {asked.file}")
        return path
    folder = _fetch(asked, DESCRIPTIONS)
    if not (folder / "config.json").exists() and not (folder / "spec.json").exists():
        raise WeightsError(f"{asked}: {_without_description(asked)}")
    if weights:
        from .load import read_spec  # which needs torch

        _, family = read_spec(folder)
        stem = getattr(family, "FILE", "model")
        files = [f"{stem}.safetensors", f"{stem}-*.safetensors"]
        folder = _fetch(asked, [*DESCRIPTIONS, *files])
        if not any(folder.glob("*.safetensors")):
            raise WeightsError(f"{asked}: {_without_weights(asked)}")
    return folder


def _fetch(asked: HubName, patterns: Sequence[str], *, inner: bool = False) -> Path:
    """The folder of a snapshot in the hub's cache that has all files of these names; inner: of those in folders too."""
    try:
        import huggingface_hub as hub
        from huggingface_hub import errors
    except ImportError:
        raise WeightsError(
            f"{asked}: no such folder; to fetch a model of that name from the hub, pip install huggingface_hub"
        ) from None
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # what is missing is told below
    try:
        found = hub.snapshot_download(
            asked.repo,
            revision=asked.revision,
            allow_patterns=list(patterns),
            ignore_patterns=None if inner else ["*/*"],
            tqdm_class=_progress(),
        )
    except errors.GatedRepoError:
        fault = "the hub gives this model to those who accepted its terms: do so on its page, and set HF_TOKEN"
    except errors.RepositoryNotFoundError:
        fault = "no such folder, and the hub has no such model (a private one needs HF_TOKEN)"
    except errors.RevisionNotFoundError:
        fault = f"the hub's model has no revision {asked.revision or 'main'!r}"
    except errors.LocalEntryNotFoundError as error:
        fault = f"no such folder, and the model is not in the hub's cache: {_reason(error)}"
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        fault = f"no such folder, and it cannot be fetched from the hub: {error}"
    except Exception as error:  # of the library beneath, whichever it is in this version
        if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "hf_xet"):
            raise
        fault = f"no such folder, and it cannot be fetched from the hub: {type(error).__name__}: {error}"
    else:
        return Path(found)
    raise WeightsError(f"{asked}: {fault}")


def _reason(error: BaseException) -> str:
    """Why the hub was not asked, or did not answer."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    cause: BaseException | None = error.__cause__
    if isinstance(cause, OfflineModeIsEnabled) or cause is None:
        return "HF_HUB_OFFLINE is set"
    return f"the hub cannot be reached ({type(cause).__name__}: {cause})"


def _without_description(asked: HubName) -> str:
    names = _listed(asked)
    quantised = [name for name in names if name.endswith(".gguf")]
    if quantised:
        more = f" (it has {len(quantised)})" if len(quantised) > 1 else ""
        return f"the hub's model is of GGUF files; name one of them, such as {asked.repo}/{quantised[0]}{more}"
    return "the hub's model has no config.json"


def _without_weights(asked: HubName) -> str:
    pickled = [name for name in _listed(asked) if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickled:
        return f"the hub's model has pickled weights alone ({pickled[0]}), which can run code and are not fetched"
    return "the hub's model has no safetensors"


def _listed(asked: HubName) -> list[str]:
    """The names of all files of a model; none where the hub does not say."""
    import huggingface_hub as hub

    try:
        return sorted(
            name for name in hub.HfApi().list_repo_files(asked.repo, revision=asked.revision) if "/" not in name
        )
    except Exception:  # what is missing is told all the same
        return []


def _progress() -> Any:
    """A bar on stderr for the bytes alone: how many of how many, the rate, the time left. None is drawn off a
    terminal."""
    from tqdm import tqdm

    class Bytes(tqdm):
        def __init__(self, *args: Any, **settings: Any) -> None:
            bytes_alone = settings.pop("name", None) == "huggingface_hub.snapshot_download"
            settings["disable"] = not (bytes_alone and sys.stderr.isatty())
            settings["bar_format"] = "{desc}: {percentage:.0f}% of {total_fmt}B, {rate_fmt}, {remaining} left"
            settings["leave"] = False
            super().__init__(*args, **settings)

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            super().set_description("downloading", refresh)

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            """The rate is in the format already."""

    return Bytes
