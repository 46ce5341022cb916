"""Users, roles and permissions: the part that is the same on all members.

    store           users, roles, whether authentication is enabled; each change is an entry of the log
    directory       all users and roles, in memory and in etcd's form on disk, with their limits
    records         one user, one role
    permissions     intervals of keys that a user may read and write, the union over the user's roles
    rights          the rights that each kind of request needs, checked where it is proposed and where it is applied

The caller of a request is an ``apply.wire.Caller``.

Invariants

- The revision of users and roles grows with each change of rights. An entry that was admitted under an older revision
  is refused while applying (etcd: ErrAuthOldRevision), for any change of users or roles. For requests that need root
  the caller's current role counts instead.
- The rights of a user depend only on the applied state: not on clocks, tokens or certificates.

Not here: how a member authenticates a caller (``server.auth``): tokens, passwords and certificates.
"""
