"""The command line of lm-evaluation-harness, with `--model sublayer` among its models."""

import sys
from importlib import import_module

from ..errors import SublayerError


def main() -> int:
    """Runs it. A user's mistake, such as a harness that is not installed, is one line and an exit code."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import_module("sublayer.eval.harness")  # which registers the model
    except ModuleNotFoundError as error:
        missing = (error.name or "lm_eval").partition(".")[0]
        print(f"sublayer: {missing} is not installed: pip install 'sublayer[eval]'", file=sys.stderr)
        return 1
    try:
        cli_evaluate()
    except SublayerError as error:
        print(f"sublayer: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
