"""The output formats of etcdctl: simple, fields, json, protobuf, table.

``printer`` has the methods of all formats, and ``make_printer`` chooses one; ``table`` has tables and progress bars.
Laws: bytes are etcdctl 3.5's; keys and values go to standard output as they are stored; a format that cannot show an
answer ends the command with code 4. Example: ``make_printer("json").put(response)``. Leaves out: what is asked of the
cluster.
"""
