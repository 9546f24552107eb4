"""One contender of the training bench, a process of its own: `python train_step.py CONTENDER SHAPE_AS_JSON`.

It imports nothing of the bench, since litgpt runs in an environment of its own. Answers stand on lines of JSON: once
built, {"parameters", "flops", "gemm"}; then to each line "N" of the input {"seconds", "losses", "peak"}, of N steps.
"""

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Shape = dict[str, Any]
Step = Callable[[Tensor], Tensor]  # ids [B, L + 1] → the mean loss, a tensor that nobody waits for


def main() -> None:
    contender, shape = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(shape["threads"])
    library = {"sublayer": sublayer, "transformers": transformers, "litgpt": litgpt}[contender]
    prepare = library(shape)  # imports alone
    gc.collect()
    before = _resident()
    model, step = prepare()
    facts = {"parameters": sum(p.numel() for p in model.parameters())}
    if contender == "sublayer":
        from sublayer.train.flops import flops_per_token

        facts |= {"flops": flops_per_token(model, shape["length"]), "gemm": _gemm_rate()}
    print(json.dumps(facts), flush=True)
    batches = _batches(shape)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew, proc(5)
    for line in sys.stdin:
        begun, losses = _clock(), []
        for _ in range(int(line)):
            losses.append(step(next(batches)))
        seconds = _clock() - begun
        answer = {"seconds": seconds, "losses": [float(x) for x in losses], "peak": _highest() - before}
        print(json.dumps(answer), flush=True)


def sublayer(shape: Shape) -> Callable[[], tuple[nn.Module, Step]]:
    import sublayer
    from sublayer.train.batch import Batch
    from sublayer.train.language import next_token
    from sublayer.train.optim import AdamW
    from sublayer.train.update import update

    def prepare() -> tuple[nn.Module, Step]:
        model = sublayer.load(shape["weights"])
        optimizer = AdamW(rate=RATE, betas=BETAS, decay=0.0).build(model)

        def step(ids: Tensor) -> Tensor:
            batch = Batch(ids[:, :-1], ids[:, 1:])
            return torch.tensor(update(model, [batch], next_token, optimizer, limit=LIMIT).loss)

        return model, step

    return prepare


def transformers(shape: Shape) -> Callable[[], tuple[nn.Module, Step]]:
    from transformers import AutoModelForCausalLM

    def prepare() -> tuple[nn.Module, Step]:
        model = AutoModelForCausalLM.from_pretrained(shape["weights"], dtype=torch.float32)

        def loss(ids: Tensor) -> Tensor:
            labels = ids[:, 1:].contiguous()  # moved by one already
            return model(ids[:, :-1], labels=labels, shift_labels=labels, use_cache=False).loss

        return model, _peer(model, loss)

    return prepare


def litgpt(shape: Shape) -> Callable[[], tuple[nn.Module, Step]]:
    """litgpt has no learned positions: in place of GPT-2 stands its GPT-NeoX form, which rotates."""
    from litgpt import GPT, Config  # pyright: ignore[reportMissingImports]
    from litgpt.utils import chunked_cross_entropy  # pyright: ignore[reportMissingImports]

    form: dict[str, Any] = {"norm_class_name": "LayerNorm", "mlp_class_name": "GptNeoxMLP", "gelu_approximate": "tanh"}
    if shape["family"] == "llama":
        form = {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": shape["hidden"]}

    def prepare() -> tuple[nn.Module, Step]:
        config = Config(
            block_size=shape["length"],
            n_layer=shape["layers"],
            n_embd=shape["dim"],
            n_head=shape["heads"],
            vocab_size=shape["vocab"],
            padded_vocab_size=shape["vocab"],
            bias=shape["family"] == "gpt2",
            parallel_residual=False,
            rotary_percentage=1.0,
            **form,
        )
        model = GPT(config)
        model.lm_head.weight = model.transformer.wte.weight
        torch.manual_seed(0)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        return model, _peer(model, lambda ids: chunked_cross_entropy(model(ids[:, :-1]), ids[:, 1:]))

    return prepare


RATE, BETAS, LIMIT = 1e-4, (0.9, 0.95), 1.0  # on random ids a rate of 1e-3 lets rounding grow: 1e-6 to 1e-4 in 16 steps


def _peer(model: nn.Module, loss: Step) -> Step:
    """The usual step of a training loop: nothing decays, so that groups do not matter."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    model.train()

    def step(ids: Tensor) -> Tensor:
        value = loss(ids)
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _batches(shape: Shape) -> Iterator[Tensor]:
    """Random ids, the same for all."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(shape["vocab"], (shape["rows"], shape["length"] + 1), generator=generator)


def _gemm_rate() -> float:
    """Operations a second of square matrix products, the best of ten."""
    a, b = (torch.randn(1024, 1024) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        begun = _clock()
        torch.mm(a, b)
        best = min(best, _clock() - begun)
    return 2 * 1024**3 / best


def _clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _highest() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
