"""Renders a chat template, which is a stranger's program, in a process of its own: `python render.py` < job > result.

Jinja's sandbox keeps it from files and attributes; the process bounds its time and memory, which no sandbox inside a
process can. Nothing but Jinja is imported. A job is {"template", "contexts", "longest"}, a result {"texts"} or
{"error"}, both JSON.
"""

import json
import sys
from datetime import datetime
from typing import Any, ClassVar, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 512 << 20
"""Bytes of address space."""
SECONDS = 5
"""Of processor time."""


class Generation(Extension):
    """{% generation %}…{% endgeneration %} marks what an assistant said, for training; here it is read over."""

    tags: ClassVar[set[str]] = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(message: Any) -> NoReturn:
    raise TemplateError(str(message))


def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def now(form: str) -> str:
    return datetime.now().strftime(form)


def render(template: str, contexts: list[dict[str, Any]], longest: int) -> list[str]:
    """The text of each context. Raises TemplateError for what the template cannot do, or refuses to."""
    # As the field's templates expect it: blocks leave no line behind, and these names are there.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": refuse, "strftime_now": now}
    compiled = environment.from_string(template)
    texts: list[str] = []
    for context in contexts:
        parts: list[str] = []
        size = 0
        for part in compiled.generate(context):
            size += len(part)
            if size > longest:
                raise TemplateError(f"it writes more than {longest} characters")
            parts.append(part)
        texts.append("".join(parts))
    return texts


def limit() -> None:
    try:
        import resource
    except ImportError:  # not on Windows, where only the caller's patience ends it
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    limit()
    try:
        result: dict[str, Any] = {"texts": render(job["template"], job["contexts"], job["longest"])}
    except (MemoryError, RecursionError) as error:
        result = {"error": f"it takes too much memory ({type(error).__name__})"}
    except Exception as error:  # whatever a stranger's program may come to
        result = {"error": str(error) or type(error).__name__}
    sys.stdout.buffer.write(json.dumps(result).encode())


if __name__ == "__main__":
    main()
