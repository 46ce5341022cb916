"""What workers print: passed on in whole lines, each with its worker's rank, and kept in files if that is wanted.

    worker's stdout, stderr --pipe--> a thread each (``pump``): log file as it is, lines with "[rank3]: " before them
                                          |
                                          v
                    ``console``: a backlog and a thread each for our own stdout and stderr

Invariants:

1. A worker never waits for whoever reads our output: what is not taken waits in memory, then in a temporary file.
2. When ``Output.drained`` returns, everything that the workers had printed is in the log files and on its way to the
   console; ``Console.close`` waits for the rest of the way.
3. No line is mixed with another, whatever process printed them, and the last one ends with a newline.

Which streams go where is torchrun's (``destinations``): ``--redirects``, ``--tee``, ``--log-dir``.
"""

from raftkv.training.process.output.console import Console
from raftkv.training.process.output.destinations import Destinations, parse_streams
from raftkv.training.process.output.pump import Output

__all__ = ["Console", "Destinations", "Output", "parse_streams"]
