"""``python -m raftkv`` runs the server command."""

import sys

from raftkv.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
