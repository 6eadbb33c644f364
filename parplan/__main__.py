"""`python -m parplan` is the command `parplan`, which can be interrupted from its first import on."""

import sys


def main() -> int:
    """Run one command and give its exit code (see parplan/cli/main.py)."""
    try:
        from parplan.cli.main import main as command

        return command()
    except KeyboardInterrupt:  # before the command's own handler
        print("parplan: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
