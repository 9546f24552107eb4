"""`sublayer quickstart`: the whole way, from text that every machine has to a model that writes, in about a minute."""

import math
from pathlib import Path
from typing import Annotated

import typer

WINDOW = 256
OWN = Path("quickstart/model")


def command(
    folder: Annotated[Path, typer.Option("--out", help="Where the model is written.")] = OWN,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of 16 windows of 256 bytes.")] = 240,
    seed: Annotated[
        int, typer.Option(min=0, max=2**62, help="Seed of the first weights, of the order and of the sample.")
    ] = 0,
) -> None:
    """Train a small Llama-type model on Python's own standard library, byte by byte; save, reload and sample it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .. import recipes
    from ..data.corpus import split, standard_library, unigram_bits
    from ..errors import UsageError
    from ..inspect.count import readable
    from ..text import Bytes, load_tokenizer
    from ..train.loop import bits_per_byte, pack, train
    from ..weights import load, save

    if folder != OWN and folder.exists():  # its own folder may be written again
        raise UsageError(f"{folder}: exists already; choose a new folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}") from None
    console = Console(highlight=False)
    documents = standard_library()
    training, held = split(documents)
    held = [text[:8_000] for text in held[:12]]  # about a hundred kilobytes judge well enough here
    unigram = unigram_bits(training)
    size = sum(len(text.encode()) for text in documents)
    console.print(f"corpus   Python's standard library: {len(documents)} files, {readable(size)}B; every 20th held out")

    tokenizer = Bytes(("<|end|>",))
    end = tokenizer.eos[0]
    spec = recipes.llama(128, 4, 4, 2, hidden=352, vocab=tokenizer.size)
    model = spec.build(seed)
    console.print(f"model    {readable(spec.parameters())} parameters; the architecture is data:\n")
    console.print(spec.tree() + "\n", markup=False, soft_wrap=True)

    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]:.2f} bits/byte, {task.fields[rate]} bytes/s"),
        TimeRemainingColumn(),
    )
    windows = pack([tokenizer.encode(text) for text in training], WINDOW + 1, end)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps, loss=8.0, rate="–")

        def report(step: int, loss: float) -> None:
            speed = progress.tasks[0].speed
            rate = readable(speed * 16 * WINDOW) if speed else "–"
            progress.update(task, advance=1, loss=loss / math.log(2), rate=rate)
            if not console.is_terminal and (step + 1) % max(steps // 8, 1) == 0:  # where no bar can be drawn
                left = progress.tasks[0].time_remaining or 0
                console.print(
                    f"step {step + 1}/{steps}  {loss / math.log(2):.2f} bits/byte  {rate} bytes/s  {left:.0f} s left"
                )

        train(model, windows, steps, seed=seed, report=report)

    judged = pack([tokenizer.encode(text) for text in held], WINDOW + 1, end)
    bits = bits_per_byte(model, judged, end)
    console.print(f"held out {bits:.3f} bits per byte; single bytes alone would take {unigram:.3f}")

    save(model, folder)
    tokenizer.save(folder)
    console.print(f"saved    {folder}, and loaded again from there. It continues 'def ':\n")
    again, text = load(folder), load_tokenizer(folder)
    result = again.generate(["def "], tokenizer=text, max_tokens=300, temperature=0.7, seed=seed)[0]
    console.print(f"def {result.text}", style="green", markup=False)
    console.print(
        f"\nnext:    sublayer generate {folder} --prompt 'import ' --temperature 0.7\n         sublayer show llama3-8b",
        markup=False,
    )
    if bits >= unigram:
        console.print("\nIt has learned no more than how often each byte occurs: give it more --steps.", style="yellow")
