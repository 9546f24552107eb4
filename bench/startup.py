"""How long a user waits before anything happens: fresh processes, taking turns with one that only imports torch."""

import resource
import subprocess
import sys

from bench.harness import Options, Row, compared, progress, report, timings

TORCH = [sys.executable, "-c", "import torch"]
FIRST_USE = [
    sys.executable,
    "-c",
    "import sublayer; sublayer.recipes.llama(64, 2, 4, 2, hidden=128, vocab=256).build()",
]
SHOW = [sys.executable, "-m", "sublayer", "show", "llama2-70b"]
HELP = [sys.executable, "-m", "sublayer", "--help"]


def main(options: Options) -> None:
    rounds = 3 if options.quick else 15
    progress(f"startup: {rounds} rounds of 4 processes")
    commands = {"torch": TORCH, "first use": FIRST_USE, "show": SHOW, "help": HELP}
    spent: dict[str, list[float]] = {name: [] for name in commands}

    def run(name: str) -> None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(commands[name], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent[name].append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    timings({name: lambda name=name: run(name) for name in commands}, rounds)
    peer = spent["torch"]
    rows: list[Row] = [
        compared("import sublayer and a first model", spent["first use"], peer, "import torch", goal="≤ 1.1"),
        compared("sublayer show llama2-70b", spent["show"], peer, "import torch", goal="≤ 2 s more"),
        compared("sublayer --help", spent["help"], peer, "import torch", goal="≤ 0.4 s"),
    ]
    report("startup", rows, {"seconds": spent, "of": "CPU time of each process"})
