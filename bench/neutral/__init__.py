"""raftkv beside etcd under a load generator that neither of them wrote: h2load, of Debian's package `nghttp2-client`.

Owns rows whose calls are the same bytes whoever sends them, and the processor time that all members and the generator
spend on a call. `rows` says what is measured, `h2load` and `generators` send it, `processor` reads times, `pairs`
measures in alternating order and checks that the answers were good, `report` makes the tables.
"""
