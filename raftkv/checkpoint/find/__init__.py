"""How committed checkpoints are found, and how others hear of them.

    lookup    by step, by tag, the latest, the best; of one run or of all; where one descends from
    commits   a watch that tells every commit once, from a revision on
    bests     which one is the best by a metric, whenever it is another one

Everything here only reads. A checkpoint that is found may be deleted a moment later: who loads it takes a pin first
(``retention.holds``).
"""
