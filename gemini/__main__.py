"""``python -m gemini``: the command line, where the console script is not on PATH."""

from gemini.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
