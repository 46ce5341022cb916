"""``python -m raftkv`` is the server command."""

from raftkv.cli.main import main

if __name__ == "__main__":
    main()
