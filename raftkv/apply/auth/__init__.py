"""Users, roles and what they may do: the part of it that all members have alike.

    store           users, roles, whether they are asked for; each change is an entry of the log
    permissions     intervals of keys that a user may read and write, joined over the user's roles
    rights          what a request of each kind needs, checked where it is proposed and again where it is applied
    caller          who causes a request

Invariants
- The revision of users and roles grows with each change of rights. An entry that was admitted under an older one is
  refused while applying (etcd: ErrAuthOldRevision), for any change; requests that need root are the exception: for
  them the caller's present role counts.
- The rights of a user are a function of the applied state alone: no clock, no token, no certificate.

Leaves out how a member finds out who calls (``server.auth``): tokens, passwords and certificates.
"""
