"""Run the command line as ``python -m lipaudit``."""

from lipaudit.cli import main

if __name__ == "__main__":
    main()
