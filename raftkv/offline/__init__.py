"""Operations on data directories and databases that no member has open.

    a member's directory, a database, archived segments  ->  read, verify, hash, rewrite, replay  ->  a report, or files

Invariants:

- Readers work next to a running member and change nothing; writers hold the member's own locks.
- New files get their final name when they are complete and durable; a failure leaves nothing that looks complete.
- No separate rules: ``storage`` reads records, ``apply`` executes entries.

Example::

    report = log.verify("default.etcd/member/wal")

Not here: messages, output and exit codes (``cli.utl``), and everything that needs a running member.
"""
