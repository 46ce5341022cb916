"""``raftkv certs``: authorities and certificates of a small cluster, as files in one directory.

    raftkv certs tls a=10.0.0.1 b=10.0.0.2 c=10.0.0.3 --client alice

    command   words, flags and output
    folder    the directory: what lies where, what is made, renewed, revoked

How a certificate is made is ``server.tls.issue``, which members use too for those of ``--auto-tls``. It is imported
when a command runs: ``raftkv --help`` does not wait for it. Left out: certificates for anything but raftkv, keys with
passwords, requests that another authority signs.
"""
