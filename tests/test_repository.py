"""Checks of the repository itself: what it promises outside of any one module."""

import inspect
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import sublayer

ROOT = Path(__file__).parent.parent

PACKAGES = ["decoding", "eval", "inspect", "nn", "recipes", "text", "train", "weights"]
PUBLIC = ["Model", "Spec", "State", "Step", "attend", "load", "save", *PACKAGES]

# An absolute path into one machine: one of these folders at the root, not a part of a longer path or of an address.
MACHINE_PATH = re.compile(r"(?<![A-Za-z0-9_.])/(home|root|tmp|opt|work|farm|Users)/[a-z.]")


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"not a git checkout: {done.stderr.strip()}")
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert found == []


@pytest.mark.parametrize("path", ["home/me/model", "root/.cache", "tmp/x", "Users/me"])
def test_a_path_of_one_machine_is_recognised(path: str) -> None:
    assert MACHINE_PATH.search(f"open('/{path}')")  # the slash apart, or the test above would find this file
    assert not MACHINE_PATH.search(f"https://example.org/{path}, docs/{path}, ./{path}")


def test_importing_sublayer_imports_none_of_its_parts() -> None:
    program = "import sys, sublayer; print(*(name for name in sys.modules if name.startswith(('sublayer', 'torch'))))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {"sublayer", "sublayer.errors"}


def test_public_names_are_frozen() -> None:
    assert sorted(sublayer.__all__) == sorted(PUBLIC)
    assert dir(sublayer) == sorted([*PUBLIC, "__version__"])


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_name_is_there(name: str) -> None:
    assert inspect.ismodule(getattr(sublayer, name)) == (name in PACKAGES)


def test_an_unknown_name_is_told_with_the_nearest() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'atend' \(did you mean 'attend'\?\)"):
        sublayer.atend
    with pytest.raises(ImportError, match="recipe"):
        exec("from sublayer import recipe")


def test_every_make_target_that_a_text_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = {}
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / ".ci" / "run"):
        # In code only, for prose may say "make sure": `make x`, or a line of a block that starts with it.
        for target in re.findall(r"(?:`|^\s*\$? ?)make ([a-z][a-z-]*)", path.read_text(), flags=re.MULTILINE):
            named[target] = path.name
    assert {"quickstart", "test"} <= set(named)
    assert {target: file for target, file in named.items() if target not in targets} == {}


def test_ci_runs_every_check() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    match = re.search(r"^for target in (.+); do$", script, flags=re.MULTILINE)
    assert match is not None
    assert sorted(match[1].split()) == ["floors", "lint", "test", "test-slow", "types"]


def test_constraints_pin_torch_first_and_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert lines[0].startswith("torch==")
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.split(r"[^A-Za-z0-9_-]", need)[0] for need in needed}
    pinned = {pin.partition("==")[0].lower() for pin in pins}
    assert names - pinned == {"triton"}  # constraints.txt says why
