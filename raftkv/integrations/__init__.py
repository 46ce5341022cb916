"""Adapters for other people's frameworks; the rest of raftkv imports none of them.

    horovod    serves Horovod's HTTP rendezvous on a member's client port; needs nothing beside the member
    torchft    serves torchft's lighthouse as a daemon; needs nothing beside a cluster
    importers  registers checkpoints that other tools have left; needs nothing beside the registry
    lightning, transformers
               callbacks that save to the registry; need that framework and torch (``ranks``); programs import them
               from ``raftkv.torch``

Each module says at its head which protocol it speaks, which versions it was tested with, and what has to be installed.
This file imports nothing, so that an integration costs only the programs that use it.
"""
