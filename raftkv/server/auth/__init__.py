"""Authentication and admission: the part of user management that each member does by itself.

    call -> guard -> callers: token, else certificate -> row of the table -> rights -> handler
                     (simple_tokens, jwt_tokens)

    callers         the caller: the user of a token in the metadata, else the name in a verified certificate, else none
    simple_tokens   tokens given for passwords; all members learn them from the log
    jwt_tokens      signed tokens that carry their own content
    table           the rights that each RPC needs: one row for every method of the client ports
    guard           wraps every handler: finds the caller, checks the table, then calls the handler
    live            long calls, which end when their right, user or token ends
    passwords       bcrypt in its own threads
    service         the Auth service

Invariants
- A method without a row is not served: the member does not start.
- While authentication is off, a call costs one test of an attribute.
- No log, error or ``repr`` contains a token, a password or a key. The Raft log has digests of tokens, which do not
  admit a caller. Passwords are hashed before anything is proposed.
- Refusals come in etcd's order: first the request is validated, then its caller.

Leaves out the replicated part: users, roles, and the rules for their rights (``raftkv.apply.auth``).
"""
