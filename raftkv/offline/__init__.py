"""Work on data directories and databases that no member has open.

    a member's directory, a database, archived segments  ->  read, verify, hash, rewrite, replay  ->  a report, or files

Laws:

- Readers work beside a running member and change nothing; writers hold the member's own locks.
- New files get their final name when they are whole and durable; what fails leaves nothing that looks whole.
- No rule of its own: records are read by ``storage``, entries are executed by ``apply``.

Example::

    report = log.verify("default.etcd/member/wal")

Leaves out: words, output and exit codes (``cli.utl``), and everything that needs a running member.
"""
