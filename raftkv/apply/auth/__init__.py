"""Users, roles and what they may do: the part of it that all members have alike.

    store           users, roles, whether they are asked for; each change is an entry of the log
    permissions     intervals of keys that a user may read and write, joined over the user's roles
    rights          what a request of each kind needs, checked where it is proposed and again where it is applied
    caller          who causes a request

Invariants
- The revision of the store grows with each change that can change what somebody may do. An entry that was let in under
  an older one is refused while applying (etcd: ErrAuthOldRevision), whatever the change was; but for what needs root:
  there the role counts that the caller has by then.
- What a user may do is a function of the applied state alone: no clock, no token, no certificate.

Leaves out how a member finds out who calls (``server.auth``): tokens, passwords and certificates.
"""
