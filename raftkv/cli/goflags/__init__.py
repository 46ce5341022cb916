"""Command lines as Go programs read them: pflag's flags, Go's values, cobra's tree of commands, over click's help.

``pflag`` reads words, numbers, durations and quoted strings, ``command`` finds the command and prints its
page. Laws: what etcdctl accepts is accepted, what it refuses is refused in the same words. Example:
``parse(flags, ["--rev=3", "key"]).values["rev"]``. Leaves out: which flags there are (``cli.ctl.tree``,
``cli.server``).
"""
