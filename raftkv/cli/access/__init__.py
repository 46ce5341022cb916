"""``raftkvctl auth``, ``user`` and ``role``: the words and exit codes of etcdctl.

    users    who there is, and whether users are asked for; how passwords are asked for
    roles    what a role may do

The words of the command line are in ``cli.words.users``. Leaves out ``run grant`` (``cli.runs.access``).
"""
