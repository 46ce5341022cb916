"""Authentication and admission: the part of users that each member does for itself.

    call -> guard -> callers: token, else certificate -> row of the table -> rights -> handler
                     (simple_tokens, jwt_tokens)

    callers         who calls: a token in the metadata, else the name in a verified certificate, else none
    simple_tokens   tokens that members gave for passwords; every member knows them by the log
    jwt_tokens      tokens that carry what they say, signed
    table           what each RPC needs: one row for every method of the client ports
    guard           wraps every handler: finds the caller, asks the table, then calls the handler
    live            long calls, which end when the right, the user or the token does
    passwords       bcrypt in threads of its own
    service         the Auth service

Invariants
- A method without a row is not served: the member does not start.
- Without users a call pays for one test of an attribute.
- A token, a password or a key is in no log, no error and no ``repr``. The log holds digests of tokens, which admit no
  caller; passwords are hashed before anything is proposed.
- Refusals come in etcd's order: an invalid request first, then its caller.

Leaves out what is replicated: users, roles, and the rules of who may do what (``raftkv.apply.auth``).
"""
