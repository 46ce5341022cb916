"""Keys and values: single calls, many keys, transactions, transactions written as plain code.

    kv.put / get / range / delete      kv      a message each; with ``fence`` a txn
    put_many / get_many, pages / scan          many calls over one connection; one revision, page by page
    txn().when().then().commit()       txn     ``operations``: its conditions, and what it does
    stm(function)                              reads of one revision, writes if nothing that was read has changed

Laws:

- Keys pass through the client's ``Space``: a view's prefix is put before them and taken off again.
- A write that relies on a lease or a fence (``operations``) is checked twice: here by this client's clock, and by the
  cluster within the write.
- A write is repeated only if it certainly did not happen.

Example::

    ok, results = await kv.txn().when(kv.version("a") == 0).then(put("a", b"1")).commit()

Leaves out: watching what changes (``client.watch``).
"""
