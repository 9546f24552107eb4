"""A model of Sublayer's for lm-evaluation-harness (the extra `eval`), which asks it as it asks one of transformers.

`python -m sublayer.eval` is the harness's own command line, which then knows `--model sublayer`. The text of a request
is the task's own, so the names of special tokens in it are those tokens, as the harness's other models have it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from ..decoding import generate
from ..decoding.slots import evaluating
from ..errors import UsageError, nearest
from ..nn.sublayer import ModelOp
from ..step import Step
from ..text import load_tokenizer
from ..text.chat import ChatTemplate
from ..text.tokenizer import begun, special_id
from ..train.loss import rows_of_a_chunk
from ..weights.context import trained_length
from ..weights.hub import local
from ..weights.load import load, read_spec
from .text import TOKENS, begin_token, refuse

import_module("lm_eval.models")  # registers its own, which it would leave out once another is registered

LONGEST = 2048
"""Tokens that a model reads where nothing says how many; the harness has the same."""
MAX_TOKENS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""What requests call the length of an answer; the first one counts. Without any it is 256."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What requests say of sampling, in Sublayer's words."""

Asked = tuple[list[int], int]
"""Ids, and how many of the last ones are asked."""


class SublayerLM(TemplateLM):
    """What the harness calls: log-likelihoods of continuations and of whole texts, and answers."""

    def __init__(
        self,
        pretrained: str | Path,
        *,
        dtype: str = "float32",
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        """pretrained: a folder, a GGUF file or a name of the hub. batch_size: rows read at once; "auto" or None: as
        many as make 8,192 tokens. max_length: tokens that the model reads; None: what it was made for.
        prefix_token_id: what stands before a text that has no context; None: see `begin_token`.

        Raises UsageError for a model that gives text no probability, and for a dtype that is none.
        """
        super().__init__()
        path = local(Path(pretrained))
        spec, _ = read_spec(path)
        refuse(spec)
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise UsageError(f"dtype={dtype!r}: a name such as float32 or bfloat16")
        self.path = path
        self.ours = load_tokenizer(path)
        named = device or "cpu"
        if named.startswith("cuda") and not torch.cuda.is_available():
            named = "cpu"  # the harness names the first GPU where nobody has named a device
        self.model: ModelOp = load(path, dtype=kind, device=named)
        self.rows = max_batch_size if batch_size is None or str(batch_size).startswith("auto") else int(batch_size)
        self.max_length = max_length or trained_length(path, spec) or LONGEST
        self.prefix = begin_token(path, self.ours) if prefix_token_id is None else prefix_token_id

    # --- what the harness asks of a tokenizer ---

    @property
    def eot_token_id(self) -> int:
        return self.ours.eos[0] if self.ours.eos else self.prefix_token_id

    @property
    def prefix_token_id(self) -> int:
        if self.prefix is None:
            raise UsageError(f"{self.path}: no token stands before a text: give prefix_token_id")
        return self.prefix

    @property
    def tokenizer_name(self) -> str:
        return str(self.path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With what the tokenizer puts before a text, unless told otherwise or the text begins with it already."""
        plain = self.ours.encode(string, specials="special")
        if add_special_tokens is False or (add_special_tokens is None and plain[:1] == [self.prefix]):
            return plain
        return begun(self.ours, string, "special")

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Both together, cut where the context's own ids end; apart, where joining them leaves nothing to ask. A
        context of nothing but spaces goes to the continuation, which then stands behind the prefix token."""
        before, after = super()._encode_pair(context, continuation)
        return before or [self.prefix_token_id], after or self.tok_encode(continuation, add_special_tokens=False)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        found = ChatTemplate.read(self.path) if chat_template else None
        return None if found is None else found.source

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Without a generation prompt the last message is left open, to be gone on with."""
        template = ChatTemplate.read(self.path)
        if template is None:
            raise UsageError(f"{self.path}: no chat template in it: leave --apply_chat_template out")
        text = template.render(chat_history, answer=add_generation_prompt)
        last = chat_history[-1]["content"].strip()
        return text if add_generation_prompt or last not in text else text[: text.rindex(last) + len(last)]

    # --- the three kinds of requests ---

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        answers = self._answers([(context + asked, len(asked)) for _, context, asked in requests], disable_tqdm)
        for key, answer in zip((request[0] for request in requests), answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Windows that just meet; the last one reaches back, so that it is as long as the others."""
        windows, owner = list[Asked](), list[int]()
        for number, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, asked in map(make_disjoint_window, found):
                windows.append((context + asked, len(asked)))
                owner.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _) in zip(owner, self._answers(windows, disable_tqdm), strict=True):
            sums[number] += value
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        alike: dict[str, list[int]] = {}
        given: list[Any] = [request.args for request in requests]
        for number, (_, words) in enumerate(given):
            alike.setdefault(json.dumps(words, sort_keys=True), []).append(number)
        answers = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="generate_until") as bar:
            for numbers in alike.values():
                options = self._options(given[numbers[0]][1])
                room = self.max_length - options["max_tokens"]
                if room < 1:
                    raise UsageError(f"an answer of {options['max_tokens']} tokens leaves no room in {self.max_length}")
                prompts = [self.tok_encode(given[i][0])[-room:] or [self.prefix_token_id] for i in numbers]
                seed = None if options.get("temperature") == 0 else torch.initial_seed() % 2**31
                made = generate(self.model, prompts, tokenizer=self.ours, seed=seed, slots=self.rows, **options)
                for number, row in zip(numbers, made, strict=True):
                    answers[number] = row.text or ""
                    self.cache_hook.add_partial("generate_until", given[number], answers[number])
                bar.update(len(numbers))
        return answers

    def _options(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """A request's words in Sublayer's. Raises UsageError for one that has no meaning here."""
        rest = dict(asked)
        until = rest.pop("until", None) or []
        lengths = [rest.pop(name, None) for name in MAX_TOKENS]
        drawn = rest.pop("do_sample", None)
        if drawn is False or (drawn is None and not rest.get("temperature")):
            rest["temperature"] = 0.0
        unknown = next((name for name in rest if name not in SAMPLING), None)
        if unknown is not None:
            known = ("until", "do_sample", *MAX_TOKENS, *SAMPLING)
            raise UsageError(f"generation_kwargs: {unknown!r} is not known{nearest(unknown, known)}")
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        ids = {stop: special_id(self.ours, stop) for stop in stops}
        return rest | {
            "max_tokens": int(next((length for length in lengths if length is not None), 256)),
            "stop": tuple(stop for stop in stops if ids[stop] is None),
            "stop_ids": (*self.ours.eos, *(id for id in ids.values() if id is not None)),
        }

    @torch.inference_mode()
    def _answers(self, asked: Sequence[Asked], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability of the ids that are asked, whether each is the best) of each request.

        What is too long for the model loses its beginning. Requests that read the same are read once: continuations of
        one token, as in a choice between letters.
        """
        inputs: dict[tuple[int, ...], list[int]] = {}
        for number, (ids, last) in enumerate(asked):
            if last > self.max_length:
                raise UsageError(f"a continuation of {last} tokens is more than the {self.max_length} that are read")
            inputs.setdefault(tuple(ids[-self.max_length - 1 : -1]), []).append(number)
        rows = sorted(inputs, key=len, reverse=True)
        answers = [(0.0, True)] * len(asked)
        with evaluating(self.model), tqdm(total=len(asked), disable=disable_tqdm, desc="log-likelihoods") as bar:
            while rows:
                count = min(self.rows or len(rows), max(1, TOKENS // max(len(rows[0]), 1)))
                batch, rows = rows[:count], rows[count:]
                for row, hidden in zip(batch, self._hidden(batch), strict=True):
                    for number in inputs[row]:
                        ids, last = asked[number]
                        if last:
                            answers[number] = self._answer(hidden[len(row) - last : len(row)], ids[-last:])
                    bar.update(len(inputs[row]))
        return answers

    def _hidden(self, rows: Sequence[tuple[int, ...]]) -> Tensor:
        """[B, L, D]; the rows fall in length."""
        length, device = len(rows[0]), next(self.model.parameters()).device
        ids = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows], device=device)
        real = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
        step = Step() if len(rows[-1]) == length else Step(segment=real)
        found = self.model(ids, step, output="hidden")
        return found[0] if isinstance(found, tuple) else found

    def _answer(self, hidden: Tensor, asked: list[int]) -> tuple[float, bool]:
        wanted, size = torch.tensor(asked, device=hidden.device), self.model.spec.vocab or 1
        total, right = 0.0, True
        chunk = rows_of_a_chunk(len(wanted), size, hidden.device)
        for part, labels in zip(hidden.split(chunk), wanted.split(chunk), strict=True):
            logits = self.model.logits(part)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            total += float(logits.log_softmax(-1).gather(1, labels[:, None]).sum())
            right = right and bool((logits.argmax(-1) == labels).all())
        return total, right


register_model("sublayer")(SublayerLM)
